"""Publishes the life of this router's requests."""

from __future__ import annotations

from collections.abc import Callable

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.router.link.messages import RunningRequest
from flexcache.router.sync.life import (
    TOPIC,
    Alive,
    AnswerBegan,
    Began,
    Life,
    Over,
    Snapshot,
    encode,
)

BEAT_S = 0.5
SNAPSHOT_S = 5.0
_GATHER_S = 0.001
_KEPT = 4096


class LifePublisher:
    """Publishes at ``ENDPOINT,REPLAY``. Calls take microseconds.

    Args:
        pair: Both endpoints.
        running: Returns all requests that this router sent and that run.

    Raises:
        ConfigError: On `start`: an address cannot be used.
    """

    def __init__(self, pair: str, running: Callable[[], list[RunningRequest]]) -> None:
        endpoint, _, replay = pair.partition(",")
        self._publisher: BatchPublisher[Life] = BatchPublisher(
            Address(endpoint, replay, TOPIC),
            encode,
            num_kept=_KEPT,
            num_queued=_KEPT,
            gather_s=_GATHER_S,
        )
        self._running = running
        self._beat_due = 0.0
        self._snapshot_due = 0.0

    def start(self) -> None:
        self._publisher.start()

    def close(self) -> None:
        """Publish what is queued, and stop. Idempotent."""
        self._publisher.close()

    def began(self, request: RunningRequest) -> None:
        self._publisher.publish([Began(request)])

    def first_token(self, request_id: str) -> None:
        self._publisher.publish([AnswerBegan(request_id)])

    def ended(self, request_id: str) -> None:
        self._publisher.publish([Over(request_id)])

    def beat(self, now: float) -> None:
        """Publish what is due by time."""
        if now >= self._snapshot_due:
            self._snapshot_due, self._beat_due = now + SNAPSHOT_S, now + BEAT_S
            self._publisher.publish([Snapshot(self._running())])
        elif now >= self._beat_due:
            self._beat_due = now + BEAT_S
            self._publisher.publish([Alive()])
