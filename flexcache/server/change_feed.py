"""Passes the changes of the tiers on to a publisher, and to callers that take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flexcache.cache.journal import Change, Stored
from flexcache.config import CacheConfig
from flexcache.events.held_blocks import PublishedNames
from flexcache.events.publisher import KVEventPublisher

_MAX_WAITING_TOKENS = 8 << 20  # some 300 MB


class ChangeFeed:
    """Changes of one server's tiers, in order. Not thread-safe; never waits.

    Args:
        config: Has whether callers take changes, and how many batches may wait for them.
        publisher: A publisher that was started, if changes are published. Closed with the feed.
        names: Follows what blocks are called, if they may be asked for by name.
    """

    def __init__(
        self,
        config: CacheConfig,
        publisher: KVEventPublisher | None,
        names: PublishedNames | None = None,
    ) -> None:
        self._publisher = publisher
        self._names = names
        self._is_taken = config.kv_events
        self._max_waiting = config.kv_events_queue
        self._waiting: deque[Sequence[Change]] = deque()
        self._num_tokens = 0
        self._num_dropped = 0

    def pass_on(self, changes: Sequence[Change]) -> None:
        """Queue changes for the publisher and for `take`."""
        if self._names is not None:
            self._names.apply(changes)
        if self._publisher is not None:
            self._publisher.publish(changes)
        if not self._is_taken:
            return
        self._waiting.append(changes)
        self._num_tokens += _num_tokens(changes)
        while len(self._waiting) > 1 and (
            len(self._waiting) > self._max_waiting or self._num_tokens > _MAX_WAITING_TOKENS
        ):
            self._num_tokens -= _num_tokens(self._waiting.popleft())
            self._num_dropped += 1

    def take(self) -> list[Change]:
        """Take the changes since the last call. Beyond ``kv_events_queue`` batches or eight million
        tokens the oldest were dropped."""
        changes = [change for batch in self._waiting for change in batch]
        self._waiting.clear()
        self._num_tokens = 0
        return changes

    def stats(self) -> dict[str, int]:
        report = {} if self._publisher is None else self._publisher.stats()
        return report | {"untaken_batches": len(self._waiting), "lost_batches": self._num_dropped}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _num_tokens(changes: Sequence[Change]) -> int:
    return sum(len(change.token_ids) for change in changes if isinstance(change, Stored))
