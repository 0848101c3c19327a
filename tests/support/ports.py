"""TCP ports for servers that tests and benchmarks start.

They lie below those that the kernel gives to outgoing connections, which could otherwise take one
before its server starts. Processes of pytest-xdist, which run side by side, have different ones,
and a process is given none twice: the server that a port is for may be slow to start.
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack, suppress

_FIRST, _LAST = 12_000, 32_000
_NUM_SHARES = 8  # more processes than that share them

_given: set[int] = set()


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    return free_range(1)


def free_ports(count: int) -> list[int]:
    """Return that many distinct ones."""
    first = free_range(count)
    return list(range(first, first + count))


def free_range(count: int) -> int:
    """Return the first of that many consecutive ports that were free a moment ago."""
    choice = random.SystemRandom()  # a test may have seeded the usual one
    share = _share()
    while True:
        first = choice.randrange(share.start, share.stop - count)
        ports = range(first, first + count)
        if not _given.isdisjoint(ports):
            continue
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _given.update(ports)
            return first


def _share() -> range:
    """Return the ports of this process."""
    name = os.environ.get("PYTEST_XDIST_WORKER")
    if name is None:
        return range(_FIRST, _LAST)
    width = (_LAST - _FIRST) // _NUM_SHARES
    first = _FIRST + int(name.removeprefix("gw")) % _NUM_SHARES * width
    return range(first, first + width)
