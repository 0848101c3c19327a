"""Feeds an index with the KV events of all sources, on the event loop that routes.

    SourceThread --+
    SourceThread --+--> bounded queue --> event loop: slices of at most 1 ms --> sink
    SourceThread --+

A source that is slow, away or misconfigured holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Iterable
from typing import Protocol

from flexcache.errors import InternalError
from flexcache.events.wire import EventBatch
from flexcache.logs import log_event
from flexcache.router.source_thread import Item, SourceThread, Unknown
from flexcache.router.source_watch import Alarm, SourceWatch
from flexcache.router.stats import SourceStats
from flexcache.router.workers import EventSource

logger = logging.getLogger(__name__)

_SLICE_S = 0.001
_QUEUE = 512
"""Slices of batches that wait for the event loop, of all sources together."""
_HINTS = {
    Alarm.SILENT: "check the endpoint, the topic, and that the engine publishes KV events",
    Alarm.UNMATCHED: "check tokenizer, chat template and model of the router",
}


class Sink(Protocol):
    """What takes the events; `KVRouter` is one. ``source`` is the endpoint."""

    def apply(self, source: str, batch: EventBatch) -> None:
        """Take events, in the order in which they happened."""

    def lost(self, source: str) -> None:
        """Take note that events are missing: what the source holds is unknown."""

    def restarted(self, source: str) -> None:
        """Take note that the source holds nothing, or what the batches that follow say: it
        restarted, or lists all that it holds."""


class Feed:
    """Follows sources and applies what they say to a sink.

    Use it from the event loop's thread. The caller that removes a source also has the sink forget
    it; the feed itself tells the sink of sources that begin again.

    Args:
        sink: Called on the event loop.
        loop: The event loop.
    """

    def __init__(self, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop
        self._items: queue.Queue[Item] = queue.Queue(_QUEUE)
        self._threads: dict[str, SourceThread] = {}
        self._watches: dict[str, SourceWatch] = {}
        self._ending: list[SourceThread] = []
        self._is_scheduled = False

    def set_sources(self, sources: Iterable[EventSource]) -> None:
        """Follow these sources, and only these. One whose addresses changed begins again.

        Raises:
            ConfigError: An address cannot be used. Sources before it are followed.
        """
        wanted = {source.endpoint: source for source in sources}
        for endpoint, thread in list(self._threads.items()):
            if wanted.get(endpoint) != thread.source:
                thread.stop()
                self._ending.append(self._threads.pop(endpoint))
                del self._watches[endpoint]
                if endpoint in wanted:
                    self._sink.restarted(endpoint)
        for endpoint, source in wanted.items():
            if endpoint not in self._threads:
                self._threads[endpoint] = SourceThread(source, self._items, self._wake)
                self._watches[endpoint] = SourceWatch()

    def answered(
        self,
        endpoints: Iterable[str],
        *,
        num_tokens: int,
        predicted_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """Note that a worker answered a prompt whose tokens are known here.

        Args:
            endpoints: The worker's sources.
            num_tokens: Length of the prompt.
            predicted_tokens: Cached tokens that the index predicted, over all tiers.
            cached_tokens: Cached tokens that the engine reported; None if it did not.
        """
        for endpoint in endpoints:
            watch = self._watches.get(endpoint)
            if watch is None:
                continue
            alarm = watch.answered(num_tokens, predicted_tokens, cached_tokens)
            if alarm is not None:
                log_event(
                    logger, logging.WARNING, f"kv_events_source_{alarm.value}",
                    endpoint=endpoint, hint=_HINTS[alarm],
                    effect="requests do not go where their KV is",
                )  # fmt: skip

    def stats(self) -> dict[str, SourceStats]:
        """Return statistics by endpoint."""
        now = time.monotonic()
        return {
            endpoint: _stats_of(thread, self._watches[endpoint], now)
            for endpoint, thread in self._threads.items()
        }

    async def close(self) -> None:
        """Follow nothing any more; wait until the threads have ended. Idempotent."""
        self.set_sources(())
        ending, self._ending = self._ending, []
        for thread in ending:
            await asyncio.to_thread(thread.join)

    def check(self) -> None:
        """Raise `InternalError` if sources, threads and watches do not belong together."""
        if self._threads.keys() != self._watches.keys():
            raise InternalError("a source is followed and not watched, or the reverse")
        for endpoint, thread in self._threads.items():
            if thread.source.endpoint != endpoint or thread in self._ending:
                raise InternalError(f"{endpoint}: the thread is not this source's")

    # -- from the threads to the event loop ------------------------------------------------------

    def _wake(self) -> None:
        """Have the queue drained; called on the sources' threads."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the event loop is closed
            return

    def _drain(self) -> None:
        """Apply what waits, for a limited time; the rest when the loop comes by again."""
        self._is_scheduled = False  # first, so that nothing put from now on waits unseen
        deadline = time.monotonic() + _SLICE_S
        while time.monotonic() < deadline:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                return
            item.source.num_taken += 1
            self._take(item)
        self._is_scheduled = True
        self._loop.call_soon(self._drain)

    def _take(self, item: Item) -> None:
        endpoint = item.source.source.endpoint
        if self._threads.get(endpoint) is not item.source:
            return  # it was removed meanwhile
        try:
            self._apply(endpoint, item)
        except Exception as error:  # routing goes on, without this source's blocks
            log_event(
                logger, logging.ERROR, "kv_events_not_applied", endpoint=endpoint, error=error,
                exc_info=True,
            )  # fmt: skip
            item.source.num_losses += 1
            self._sink.lost(endpoint)

    def _apply(self, endpoint: str, item: Item) -> None:
        if item.content is Unknown.LOST:
            self._sink.lost(endpoint)
        elif item.content is Unknown.RESTARTED:
            self._sink.restarted(endpoint)
        else:
            self._watches[endpoint].event()
            self._sink.apply(endpoint, item.content)


def _stats_of(thread: SourceThread, watch: SourceWatch, now: float) -> SourceStats:
    counters, last = thread.subscriber.counters, thread.last_batch_s
    return SourceStats(
        is_connected=thread.subscriber.is_connected,
        is_silent=Alarm.SILENT in watch.alarms,
        is_unmatched=Alarm.UNMATCHED in watch.alarms,
        last_batch_age_s=None if last is None else max(0.0, now - last),
        batches=counters.received,
        waiting_batches=max(0, thread.num_put - thread.num_taken),
        gaps=counters.gaps,
        losses=thread.num_losses,
        replayed_batches=counters.replayed,
        restarts=counters.restarts,
        snapshots=counters.snapshots,
        bad_batches=counters.malformed,
    )
