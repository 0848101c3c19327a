"""The least work of a server: it answers every message with 64 bytes.

python echo.py ENDPOINT          until its standard input ends
"""

from __future__ import annotations

import contextlib
import sys
import time

import zmq

ANSWER = bytes(64)
_COPY_BELOW_BYTES = 64 << 10
_SPIN_S = 0.0002  # like the cache server: waking up takes longer than most requests


def echo(endpoint: str, request: bytes, seconds: float) -> list[float]:
    """Return the seconds of each round trip to an echo server, one after the other."""
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
                raise AssertionError("the echo server sent another answer")
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


if __name__ == "__main__":
    main()
