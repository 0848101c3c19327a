"""Common parts of worker processes: startup, and the connection to the server."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from flexcache.logs import log_event, set_up_logging
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.machine import count_nodes
from flexcache.transfer.messages import Ready, Stop

logger = logging.getLogger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True):
    """Configuration of every worker: the server, its name there, the host pool's segments."""

    endpoint: str
    identity: str
    segment_fds: list[int]
    segment_strides: list[int]
    num_host_blocks: int
    log_level: str
    log_format: str


Config = TypeVar("Config", bound=WorkerConfig)


def start_worker_process(config_type: type[Config]) -> Config:
    """Tie this process to its parent and read its config, one line of standard input."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the terminal's ^C
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=config_type)
    set_up_logging(config.log_level, config.log_format)
    return config


def map_segments(config: WorkerConfig) -> list[HostSegment]:
    """Map the host pool. With several NUMA nodes it is for the ranks to make its pages."""
    segments = [
        HostSegment(fd, stride, config.num_host_blocks)
        for fd, stride in zip(config.segment_fds, config.segment_strides, strict=True)
    ]
    for segment in segments:
        segment.map(populate=count_nodes() == 1)
    return segments


class ServedWorker(Protocol):
    """What a worker process does: of the SSD tier, or of the remote store."""

    @property
    def is_idle(self) -> bool:
        """Whether the worker may end after a `Stop`."""

    def take(self, message: Any) -> None:
        """Start processing a message. Does not block."""

    def advance(self) -> Sequence[msgspec.Struct]:
        """Return the answers to send. Called after every wake-up."""

    def filenos(self) -> Sequence[int]:
        """Return descriptors that are readable when there may be answers."""


def serve(config: WorkerConfig, detail: str, messages: Any, worker: ServedWorker) -> None:
    """Serve until a `Stop` message arrives or the parent closes its end of standard input.

    Args:
        detail: Describes how the worker works, for the server's log.
        messages: Union of the accepted messages, besides `Stop`.
    """
    decoder = msgspec.msgpack.Decoder(messages | Stop)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        # A server that is gone reads no answers.
        socket.linger = 0
        socket.identity = config.identity.encode()
        socket.connect(config.endpoint)
        socket.send(msgspec.msgpack.encode(Ready(detail)))
        poller = zmq.Poller()
        for source in (socket, sys.stdin.fileno(), *worker.filenos()):
            poller.register(source, zmq.POLLIN)
        stopping = False
        while not (stopping and worker.is_idle):
            if sys.stdin.fileno() in dict(poller.poll()):
                return
            with contextlib.suppress(zmq.Again):
                while True:
                    data = socket.recv(zmq.NOBLOCK)
                    try:
                        message = decoder.decode(data)
                    except msgspec.MsgspecError as error:
                        log_event(logger, logging.ERROR, "message_rejected", problem=error)
                        continue
                    if isinstance(message, Stop):
                        stopping = True
                    else:
                        worker.take(message)
            for answer in worker.advance():
                socket.send(msgspec.msgpack.encode(answer))
