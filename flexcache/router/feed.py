"""Feed of KV events: follows all sources, and applies what they say on the loop that routes.

    SourceThread --+
    SourceThread --+--> bounded queue --> event loop: slices of at most 1 ms --> sink
    SourceThread --+

A source that is slow, away or misconfigured holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

import msgspec
import zmq

from flexcache.errors import InternalError
from flexcache.events.subscriber import (
    KVEventSubscriber,
    Lost,
    News,
    PublisherRestarted,
    Received,
    SnapshotPart,
)
from flexcache.events.wire import BlockRemoved, BlockStored, Event, EventBatch
from flexcache.logs import log_event
from flexcache.router.fleet import EventSource
from flexcache.router.stats import SourceStats

MAX_BLOCKS = 256


def slices(batch: EventBatch) -> Iterator[EventBatch]:
    """Yield the batch in parts of at most `MAX_BLOCKS` blocks, in order.

    The last part has the number of unknown events.
    """
    events: list[Event] = []
    room = MAX_BLOCKS
    for event in batch.events:
        for piece in _pieces(event):
            size = _num_blocks(piece)
            if events and size > room:
                yield msgspec.structs.replace(batch, events=events, num_unknown=0)
                events, room = [], MAX_BLOCKS
            events.append(piece)
            room -= size
    if events or batch.num_unknown:
        yield msgspec.structs.replace(batch, events=events)


def _num_blocks(event: Event) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1


def _pieces(event: Event) -> Iterator[Event]:
    """Yield an event in parts; whole if its tokens cannot be assigned to its blocks."""
    if _num_blocks(event) <= MAX_BLOCKS:
        yield event
    elif isinstance(event, BlockRemoved):
        hashes = iter(event.block_hashes)
        while part := list(islice(hashes, MAX_BLOCKS)):
            yield msgspec.structs.replace(event, block_hashes=part)
    elif isinstance(event, BlockStored):
        count, size = len(event.block_hashes), event.block_size
        if len(event.token_ids) not in (0, count * size):
            yield event
            return
        for start in range(0, count, MAX_BLOCKS):
            stop = start + MAX_BLOCKS
            yield msgspec.structs.replace(
                event,
                block_hashes=event.block_hashes[start:stop],
                parent_block_hash=event.block_hashes[start - 1]
                if start
                else event.parent_block_hash,
                token_ids=event.token_ids[start * size : stop * size],
                extra_keys=None if event.extra_keys is None else event.extra_keys[start:stop],
                lookahead_token_ids=None
                if event.lookahead_token_ids is None
                else event.lookahead_token_ids[start:stop],
            )


SILENT_REQUESTS = 50
SILENT_TOKENS = 20_000
"""Computed by that many requests at least: prompts shorter than a block store nothing."""
UNMATCHED_REQUESTS = 20
UNMATCHED_TOKENS = 64
"""Cached tokens from which a report counts."""


class Alarm(str, Enum):
    """What is wrong with a source."""

    SILENT = "silent"
    UNMATCHED = "unmatched"


class SourceWatch:
    """Watches one source.

    A router that hears nothing, or hears of blocks under other tokens than it sees in requests,
    still routes, by load: nothing fails, only the gain is gone. Hence two rules:

    * *silent*: workers computed many prompts since the publisher's last event, although each new
      block is an event.
    * *unmatched*: the engine reports cached tokens time after time, and the index predicted none.

    Attributes:
        alarms: What is wrong now.
    """

    def __init__(self) -> None:
        self.alarms: set[Alarm] = set()
        self._num_requests = 0
        self._num_tokens = 0
        self._num_unmatched = 0

    def event(self) -> None:
        """Note that the publisher said something."""
        self._num_requests = self._num_tokens = 0
        self.alarms.discard(Alarm.SILENT)

    def answered(
        self, num_tokens: int, predicted_tokens: int, cached_tokens: int | None
    ) -> Alarm | None:
        """Note that a worker of this source answered a prompt; return an alarm that is new.

        Args:
            num_tokens: Length of the prompt.
            predicted_tokens: What the index said was cached.
            cached_tokens: What the engine said was cached; None if it did not say.
        """
        self._note_computed(num_tokens - max(predicted_tokens, cached_tokens or 0))
        if predicted_tokens > 0:
            self._num_unmatched = 0
            self.alarms.discard(Alarm.UNMATCHED)
        elif cached_tokens is not None and cached_tokens >= UNMATCHED_TOKENS:
            self._num_unmatched += 1
        if self._num_requests >= SILENT_REQUESTS and self._num_tokens >= SILENT_TOKENS:
            return self._raise(Alarm.SILENT)
        if self._num_unmatched >= UNMATCHED_REQUESTS:
            return self._raise(Alarm.UNMATCHED)
        return None

    def _note_computed(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._num_requests += 1
            self._num_tokens += num_tokens

    def _raise(self, alarm: Alarm) -> Alarm | None:
        is_new = alarm not in self.alarms
        self.alarms.add(alarm)
        return alarm if is_new else None


logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 1.0
_RETRY_S = 1.0
_STOP_PATIENCE_S = 0.1  # until a thread that waits for room looks whether it is to stop


@dataclass(frozen=True, slots=True)
class Item:
    """What a source says, for the event loop.

    Attributes:
        content: A slice of a batch; None: what the source said before no longer holds, since
            batches are missing for good, it restarted, or it is going to list all that it holds.
    """

    source: SourceThread
    content: EventBatch | None


class SourceThread:
    """Follows a source until `stop`.

    Receiving blocks while missed batches are requested, and decoding takes milliseconds for a long
    prompt: neither may hold up the event loop that routes.

    Args:
        source: The publisher.
        items: Takes what it says; its bound holds up this thread, and no other source.
        wake: Called, on this thread, after something was put there.

    Attributes:
        num_put: Items that it put into the queue so far.
        num_taken: Items that the event loop took from there, which counts them.
        num_losses: How often the source's blocks became unknown.
        last_batch_s: Monotonic time of the last batch; None: there was none.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(
        self, source: EventSource, items: queue.Queue[Item], wake: Callable[[], None]
    ) -> None:
        self.source = source
        self.num_put = self.num_taken = 0
        self.num_losses = 0
        self.last_batch_s: float | None = None
        self.subscriber = self._subscribe()
        self._items = items
        self._wake = wake
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_connects = 0
        self._thread = threading.Thread(
            target=self._run, name=f"flexcache-feed {source.endpoint}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end; it may take `_REPLAY_TIMEOUT_S`. Idempotent."""
        if not self._stopping.is_set():
            os.eventfd_write(self._wake_fd, 1)  # first: a thread that ends closes it
            self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception as error:  # no descriptors left, say
                log_event(
                    logger, logging.ERROR, "kv_events_source_failed",
                    endpoint=self.source.endpoint, error=error, retry_s=_RETRY_S, exc_info=True,
                )  # fmt: skip
                self._lose()
                self._renew()
        self.subscriber.close()
        os.close(self._wake_fd)

    def _subscribe(self) -> KVEventSubscriber:
        source = self.source
        return KVEventSubscriber(
            source.endpoint, source.replay, source.topic, _REPLAY_TIMEOUT_S, snapshots=True
        )

    def _renew(self) -> None:
        """Subscribe again, with the counts of before."""
        counters = self.subscriber.counters
        self.subscriber.close()
        while not self._stopping.wait(_RETRY_S):
            try:
                self.subscriber = self._subscribe()
            except Exception:
                continue
            self.subscriber.counters = counters
            self._num_connects = 0
            return

    def _follow(self) -> None:
        poller = zmq.Poller()
        self.subscriber.register(poller)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping.is_set():
            news = self.subscriber.receive(0)
            self._note_connects()
            if news is None:
                poller.poll()
            else:
                self._hand_over(news)

    def _note_connects(self) -> None:
        """Without replay a publisher that was away may have restarted, or not: its blocks are
        unknown."""
        is_new = self.subscriber.num_connects != self._num_connects
        if is_new and self._num_connects and self.source.replay is None:
            self._lose()
        self._num_connects = self.subscriber.num_connects

    def _hand_over(self, news: News) -> None:
        match news:
            case PublisherRestarted():
                log_event(
                    logger, logging.INFO, "kv_events_source_restarted",
                    endpoint=self.source.endpoint,
                )  # fmt: skip
                self._put(None)
            case Lost(first, stop):
                # What was published before the first connection was never known here.
                if self.last_batch_s is not None:
                    log_event(
                        logger, logging.WARNING, "kv_events_lost",
                        endpoint=self.source.endpoint, batches=stop - first,
                    )  # fmt: skip
                    self._lose()
            case Received() | SnapshotPart():
                if isinstance(news, SnapshotPart) and news.is_first:
                    self._put(None)
                self.last_batch_s = time.monotonic()
                for part in slices(news.batch):
                    self._put(part)

    def _lose(self) -> None:
        self.num_losses += 1
        self._put(None)

    def _put(self, content: EventBatch | None) -> None:
        item = Item(self, content)
        while not self._stopping.is_set():
            try:
                self._items.put(item, timeout=_STOP_PATIENCE_S)
            except queue.Full:
                continue
            self.num_put += 1
            self._wake()
            return


_SLICE_S = 0.001  # so long may events hold requests up at a time
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

    def forget(self, source: str) -> None:
        """Take note that the source holds nothing but what the batches that follow say: events are
        missing, it restarted, or lists all that it holds."""


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
                    self._sink.forget(endpoint)
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
            self._sink.forget(endpoint)

    def _apply(self, endpoint: str, item: Item) -> None:
        if item.content is None:
            self._sink.forget(endpoint)
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
