"""The least that a server can do: answers whatever it is sent with 64 bytes.

`main` is run in a process of its own, with the endpoint as its argument, until its standard input
ends.
"""

from __future__ import annotations

import contextlib
import sys
import time

import zmq

ANSWER = bytes(64)
_COPY_BELOW_BYTES = 64 << 10
_SPIN_S = 0.0002  # as the cache's server does: being woken takes longer than most requests


def echo(endpoint: str, request: bytes, seconds: float) -> list[float]:
    """Seconds of each round trip to an echo server, one after the other for so long."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        times: list[float] = []
        give_up = time.perf_counter() + seconds
        while (started := time.perf_counter()) < give_up:
            if len(request) < _COPY_BELOW_BYTES:
                socket.send(request)
            else:
                socket.send(request, copy=False)
            answer = socket.recv()
            times.append(time.perf_counter() - started)
            if answer != ANSWER:
                raise AssertionError("the echo server answers something else")
        return times


def main() -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(sys.argv[1])
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while sys.stdin.fileno() not in dict(poller.poll()):
        spin_until = time.monotonic() + _SPIN_S
        while time.monotonic() < spin_until:
            with contextlib.suppress(zmq.Again):
                identity, _ = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                socket.send_multipart([identity, ANSWER])
                spin_until = time.monotonic() + _SPIN_S
