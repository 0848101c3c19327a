"""Observers of a cache, which never needs them: HTTP, KV events, traces.

An observer that cannot start is absent: the cache runs without it and reports degraded health.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from flexcache.cache.journal import Change, Stored
from flexcache.config import CacheConfig
from flexcache.events.held_blocks import PublishedNames
from flexcache.events.publisher import NUM_KEPT, NUM_QUEUED, KVEventPublisher
from flexcache.logs import log_event
from flexcache.server.cache import ServedCache
from flexcache.stats import EventStats, TraceStats
from flexcache.tracing.tracer import Tracer, make_header

if TYPE_CHECKING:
    from flexcache.server.http import HttpService

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Observers:
    """The observers of one server.

    Attributes:
        absent: Names of those that could not start.
        feed: Takes the changes of the tiers; None if nothing records them.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._http: HttpService | None = None
        self._tracer: Tracer | None = None
        self.feed: ChangeFeed | None = None
        self.absent: list[str] = []

    def open_http(self, start: Callable[[], HttpService]) -> None:
        """Start HTTP."""
        self._http = self._start("HTTP", start)

    def follow(self, cache: ServedCache) -> ChangeFeed | None:
        """Start publishing and tracing what happens in a cache that has just been opened. Returns
        what takes the changes of its tiers, if anything records them."""
        config = self._config
        if config.records_changes:
            publisher = None
            if config.kv_events_endpoint is not None:
                publisher = self._start("KV events", lambda: self._open_publisher(cache))
            if config.http_endpoint is not None:
                cache.published = PublishedNames(config.kv_events_hashes)
            self.feed = ChangeFeed(config, publisher, cache.published)
        if config.trace_dir is not None:
            self._tracer = self._start("trace", lambda: self._open_tracer(cache))
            cache.tasks.recorder = self._tracer
        return self.feed

    def _open_publisher(self, cache: ServedCache) -> KVEventPublisher:
        publisher = KVEventPublisher(
            self._config, cache.model.model_id, num_kept=NUM_KEPT, num_queued=NUM_QUEUED
        )
        publisher.start()
        return publisher

    def _open_tracer(self, cache: ServedCache) -> Tracer:
        header = make_header(
            cache.config,
            cache.tasks.cache.tiers,
            fingerprint=cache.fingerprint,
            block_bytes=cache.shards.block_bytes,
        )
        return Tracer(self._config, header)

    def _start(self, name: str, start: Callable[[], T]) -> T | None:
        """Start an optional observer. If it fails (port taken, say), run without it."""
        try:
            return start()
        except Exception as error:
            log_event(
                logger, logging.ERROR, "observer_not_started", observer=name, error=error,
                effect="the cache runs without it",
            )  # fmt: skip
            self.absent.append(name)
            return None

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call, with ``kv_events``."""
        return [] if self.feed is None else self.feed.take()

    def event_stats(self) -> EventStats | None:
        return None if self.feed is None else EventStats(**self.feed.stats())

    def trace_stats(self) -> TraceStats | None:
        return None if self._tracer is None else TraceStats(**self._tracer.stats())

    def close_http(self) -> None:
        """Answer no more requests. Idempotent."""
        if self._http is not None:
            self._http.close()

    def close(self) -> None:
        """Publish and write what is queued, for a limited time. Idempotent."""
        if self.feed is not None:
            self.feed.close()
        if self._tracer is not None:
            self._tracer.close()


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
        self._max_waiting = NUM_QUEUED
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
        """Take the changes since the last call. Beyond `NUM_QUEUED` batches or eight million
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
