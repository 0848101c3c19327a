"""What worker processes serve: it is informed of their lives and their answers."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from flexcache.transfer.messages import Done, LookedUp


class WorkerOwner(Protocol):
    """Called under the owner's lock, by the thread that drives the `WorkerPool`."""

    @property
    def counters(self) -> Counter[str]:
        """Counts deaths and refused messages."""

    def worker_up(self, worker: str) -> None:
        """A worker serves from now on."""

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone, and with it what it was moving."""

    def op_done(self, worker: str, done: Done, now: float) -> None:
        """A worker has ended an op."""

    def looked_up(self, answer: LookedUp, now: float) -> None:
        """The remote worker has answered a question."""
