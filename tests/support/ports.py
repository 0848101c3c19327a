"""TCP ports for servers that tests and benchmarks start."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    return free_ports(1)[0]


def free_range(count: int) -> int:
    """Return the first of that many consecutive ports that were free a moment ago."""
    while True:
        first = free_port()
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def free_ports(count: int) -> list[int]:
    """Return that many distinct ones."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
