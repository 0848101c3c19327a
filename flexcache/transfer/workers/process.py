"""What every worker process does first."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from typing import TypeVar

import msgspec

Config = TypeVar("Config", bound=msgspec.Struct)


def start_worker_process(config_type: type[Config]) -> Config:
    """Tie this process to its parent and read its config, one line of standard input."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's ^C is the parent's business
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=config_type)


def set_up_logging(level: str) -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
