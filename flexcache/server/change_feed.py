"""Where the changes of the tiers go: to a publisher, and to whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig

if TYPE_CHECKING:
    from flexcache.events.publisher import KVEventPublisher


class ChangeFeed:
    """Of one server. Not thread-safe; nothing here waits.

    Args:
        config: Says who wants to be told.
        model_id: Part of the topic.
    """

    def __init__(self, config: CacheConfig, model_id: str) -> None:
        self._publisher: KVEventPublisher | None = None
        if config.kv_events_endpoint is not None:
            from flexcache.events.publisher import KVEventPublisher

            self._publisher = KVEventPublisher(config, model_id)
            self._publisher.start()
        self._is_taken = config.kv_events
        self._waiting: deque[Sequence[Change]] = deque(maxlen=config.kv_events_queue)
        self._num_dropped = 0

    def pass_on(self, changes: Sequence[Change]) -> None:
        if self._publisher is not None:
            self._publisher.publish(changes)
        if self._is_taken:
            self._num_dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(changes)

    def take(self) -> list[Change]:
        """What nobody has taken yet, in order. Beyond ``kv_events_queue`` the oldest are gone."""
        changes = [change for batch in self._waiting for change in batch]
        self._waiting.clear()
        return changes

    def stats(self) -> dict[str, int]:
        report = {} if self._publisher is None else self._publisher.stats()
        return report | {"untaken_batches": len(self._waiting), "lost_batches": self._num_dropped}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
