"""Names by which a server knows its engines."""

from __future__ import annotations

import os
import re
import uuid

MAX_NAME_LENGTH = 256
"""A server refuses greetings with a longer name of an engine."""
_ANONYMOUS = re.compile(r"dp\d+")


def engine_name(engine_id: str, dp_rank: int) -> str:
    """Name a data-parallel rank; ``engine_id`` distinguishes engines with the same ranks."""
    return f"{engine_id}/dp{dp_rank}" if engine_id else f"dp{dp_rank}"


def is_anonymous(name: str) -> bool:
    """Whether the name lacks an engine id, so that several engines may share it."""
    return _ANONYMOUS.fullmatch(name) is not None


def new_engine_id() -> str:
    """Make a unique engine id; it begins with our process id, for readability."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def pid_namespace() -> int:
    """Return the inode of the namespace in which this process's id counts; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
