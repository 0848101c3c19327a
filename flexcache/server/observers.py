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

_MAX_WAITING_TOKENS = 8 << 20  # some 300 MB


class Observers:
    """The observers of one server. `pass_on` and `take_changes` never wait, and need its lock.

    Attributes:
        absent: Names of those that could not start.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._http: HttpService | None = None
        self._tracer: Tracer | None = None
        self._publisher: KVEventPublisher | None = None
        self._names: PublishedNames | None = None
        self._waiting: deque[Sequence[Change]] = deque()
        """Batches of changes that were not taken yet."""
        self._num_tokens = 0
        self._num_dropped = 0
        self.absent: list[str] = []

    def open_http(self, start: Callable[[], HttpService]) -> None:
        """Start HTTP."""
        self._http = self._start("HTTP", start)

    def follow(self, cache: ServedCache) -> None:
        """Start publishing and tracing what happens in a cache that has just been opened."""
        config = self._config
        if config.kv_events_endpoint is not None:
            self._publisher = self._start("KV events", lambda: self._open_publisher(cache))
        if config.records_changes and config.http_endpoint is not None:
            self._names = cache.published = PublishedNames(config.kv_events_hashes)
        if config.trace_dir is not None:
            self._tracer = self._start("trace", lambda: self._open_tracer(cache))
            cache.tasks.accounts.recorder = self._tracer

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
        # Of any class, as it may come from optional packages: the cache runs without them.
        except Exception as error:
            log_event(
                logger, logging.ERROR, "observer_not_started", observer=name, error=error,
                effect="the cache runs without it",
            )  # fmt: skip
            self.absent.append(name)
            return None

    def pass_on(self, changes: Sequence[Change]) -> None:
        """Queue changes of the tiers for the publisher and for `take_changes`."""
        if self._names is not None:
            self._names.apply(changes)
        if self._publisher is not None:
            self._publisher.publish(changes)
        # No caller takes them: they would only be dropped later.
        if not self._config.kv_events:
            return
        self._waiting.append(changes)
        self._num_tokens += _num_tokens(changes)
        # The last batch is kept, however large: a caller might never get any else.
        while len(self._waiting) > 1 and (
            len(self._waiting) > NUM_QUEUED or self._num_tokens > _MAX_WAITING_TOKENS
        ):
            self._num_tokens -= _num_tokens(self._waiting.popleft())
            self._num_dropped += 1

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call, with ``kv_events``. Beyond
        `NUM_QUEUED` batches or eight million tokens the oldest were dropped."""
        changes = [change for batch in self._waiting for change in batch]
        self._waiting.clear()
        self._num_tokens = 0
        return changes

    def event_stats(self) -> EventStats | None:
        if not self._config.records_changes:
            return None
        published = {} if self._publisher is None else self._publisher.stats()
        return EventStats(
            **published, untaken_batches=len(self._waiting), lost_batches=self._num_dropped
        )

    def trace_stats(self) -> TraceStats | None:
        return None if self._tracer is None else TraceStats(**self._tracer.stats())

    def close_http(self) -> None:
        """Answer no more requests. Idempotent."""
        if self._http is not None:
            self._http.close()

    def close(self) -> None:
        """Publish and write what is queued, for a limited time. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
        if self._tracer is not None:
            self._tracer.close()


def _num_tokens(changes: Sequence[Change]) -> int:
    return sum(len(change.token_ids) for change in changes if isinstance(change, Stored))
