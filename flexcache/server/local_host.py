"""The machine that a server runs on, as the hub uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import MAX_FRAME_BYTES
from flexcache.protocol.scratch import Scratch
from flexcache.server.reactor import Reactor


class LocalHost:
    """A `Host` that watches processes with the event loop and makes real shared memory.

    Args:
        died: Called with a peer's identity and the time when its process has ended.
    """

    def __init__(self, reactor: Reactor, died: Callable[[bytes, float], None]) -> None:
        self._reactor = reactor
        self._died = died

    def watch(self, identity: bytes, pid: int) -> None:
        # A process of another pid namespace is not seen: heartbeats and deadlines have to do.
        self._reactor.watch_process(identity, pid, partial(self._died, identity))

    def unwatch(self, identity: bytes) -> None:
        self._reactor.unwatch_process(identity)

    def make_fence(self) -> Fence:
        return Fence.create()

    def map_scratch(self, pid: int, fd: int) -> Scratch | None:
        return Scratch.open(pid, fd, MAX_FRAME_BYTES)
