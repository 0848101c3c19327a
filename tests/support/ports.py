"""TCP ports for servers that tests and benchmarks start.

They lie below those that the kernel gives to outgoing connections, which could otherwise take one
before its server starts. A random choice keeps tests that run side by side apart.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

_FIRST, _LAST = 12_000, 32_000


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
    while True:
        first = choice.randrange(_FIRST, _LAST - count)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
