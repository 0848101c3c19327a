"""Feed of KV events: follows all sources, and applies what they say, on the loop that routes.

One epoll watches the sockets of all sources. The loop takes a part from each source that has
something, in turns, for 1 ms at a time. It waits for none, so that a source that is slow, away,
misconfigured or talkative holds up no other.

A thread would not help: decoding holds Python's lock as applying does. With a thread for each
source, 1,000 of them took a minute to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Protocol

import msgspec
import zmq

from flexcache.errors import ConfigError, InternalError
from flexcache.events.subscriber import (
    KVEventSubscriber,
    Lost,
    News,
    Position,
    PublisherRestarted,
    Received,
    SnapshotPart,
    SubscriberCounters,
    Wait,
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
    if not isinstance(event, BlockStored | BlockRemoved):
        return 1
    return len(event.block_hashes) * (_run_blocks(event) if isinstance(event, BlockStored) else 1)


def _run_blocks(event: BlockStored) -> int:
    """Return how many blocks there are for each hash: without tokens there is but the hash."""
    return event.blocks_a_hash if event.token_ids else 1


def _pieces(event: Event) -> Iterator[Event]:
    """Yield an event in parts; whole if its tokens cannot be assigned to its blocks."""
    if _num_blocks(event) <= MAX_BLOCKS:
        yield event
    elif isinstance(event, BlockRemoved):
        hashes = iter(event.block_hashes)
        while part := list(islice(hashes, MAX_BLOCKS)):
            yield msgspec.structs.replace(event, block_hashes=part)
    elif isinstance(event, BlockStored):
        run = _run_blocks(event)
        count, size, step = len(event.block_hashes), event.block_size * run, MAX_BLOCKS // run or 1
        if len(event.token_ids) not in (0, count * size):
            yield event
            return
        for start in range(0, count, step):
            stop = start + step
            yield msgspec.structs.replace(
                event,
                block_hashes=event.block_hashes[start:stop],
                parent_block_hash=event.block_hashes[start - 1]
                if start
                else event.parent_block_hash,
                token_ids=event.token_ids[start * size : stop * size],
                extra_keys=None
                if event.extra_keys is None
                else event.extra_keys[start * run : stop * run],
                lookahead_token_ids=None
                if event.lookahead_token_ids is None
                else event.lookahead_token_ids[start:stop],
            )


SILENT_REQUESTS = 50
SILENT_TOKENS = 20_000
"""Computed by that many requests at least: prompts shorter than a block store nothing."""
UNREACHED_REQUESTS = 3
UNMATCHED_REQUESTS = 20
UNMATCHED_TOKENS = 64
"""Cached tokens from which a report counts."""


class Alarm(str, Enum):
    """What is wrong with a source."""

    UNREACHED = "unreached"
    SILENT = "silent"
    UNMATCHED = "unmatched"


class SourceWatch:
    """Watches one source.

    A router that hears nothing, or hears of blocks under other tokens than it sees in requests,
    still routes, by load: nothing fails, only the gain is gone. Hence three rules:

    * *unreached*: workers answered prompts, and there is no connection to the publisher.
    * *silent*: workers computed many prompts since the publisher's last event, although each new
      block is an event.
    * *unmatched*: the engine reports cached tokens time after time, and the index predicted none.

    Attributes:
        alarms: What is wrong now.
    """

    def __init__(self) -> None:
        self.alarms: set[Alarm] = set()
        self._num_unreached = 0
        self._num_requests = 0
        self._num_tokens = 0
        self._num_unmatched = 0

    def event(self) -> None:
        """Note that the publisher said something."""
        self._num_requests = self._num_tokens = 0
        self.alarms.discard(Alarm.SILENT)

    def answered(
        self, num_tokens: int, predicted_tokens: int, cached_tokens: int | None,
        is_connected: bool,
    ) -> Alarm | None:  # fmt: skip
        """Note that a worker of this source answered a prompt; return an alarm that is new.

        Args:
            num_tokens: Length of the prompt.
            predicted_tokens: What the index said was cached.
            cached_tokens: What the engine said was cached; None if it did not say.
            is_connected: Whether there is a connection to the publisher.
        """
        self._num_unreached = 0 if is_connected else self._num_unreached + 1
        if is_connected:
            self.alarms.discard(Alarm.UNREACHED)
        if self._num_unreached >= UNREACHED_REQUESTS:
            return self._raise(Alarm.UNREACHED)
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


class FollowedSource:
    """A source, and what it is at.

    Attributes:
        subscriber: None while it cannot be opened.
        retry_s: When it is opened again; None: it is open.
        rest: What is still to be applied of what it has said; None: what it said before no longer
            holds, since batches are missing for good, it restarted, or it is going to list all that
            it holds.
        num_losses: How often the source's blocks became unknown.
        last_batch_s: Monotonic time of the last batch, or of its takeover; None: there was none.
        lag_s: How long after its publication the last batch was applied.
        watched: What the feed's epoll knows the sockets of.
        position: Up to where all it said is applied, or a little before; None: what it holds is not
            known.
        is_taken_over: What is known of it is still coming from another router.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self.watch = SourceWatch()
        self.counters = SubscriberCounters()
        self.subscriber: KVEventSubscriber | None = None
        self.retry_s: float | None = None
        self.rest: Iterator[EventBatch | None] = iter(())
        self.num_losses = 0
        self.last_batch_s: float | None = None
        self.lag_s: float | None = None
        self.watched: Wait | None = None
        self.position: Position | None = None
        self.is_taken_over = False
        self._num_connects = 0
        try:
            self._open()
        except zmq.ZMQError as error:
            self.fail(error)

    def _open(self) -> None:
        source = self.source
        self.subscriber = KVEventSubscriber(
            source.endpoint, source.replay, source.topic, _REPLAY_TIMEOUT_S, snapshots=True
        )
        self.subscriber.counters = self.counters
        self._num_connects = 0
        self.retry_s = None

    def fail(self, error: Exception) -> None:
        """Note that the sockets failed: there are no descriptors left, say."""
        log_event(
            logger, logging.ERROR, "kv_events_source_failed", endpoint=self.source.endpoint,
            error=error, retry_s=_RETRY_S, exc_info=True,
        )  # fmt: skip
        self.close()
        self.subscriber, self.rest = None, iter(())
        self.num_losses += 1
        self.retry_s = time.monotonic() + _RETRY_S

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self.subscriber is not None:
            self.subscriber.close()

    @property
    def is_connected(self) -> bool:
        return self.subscriber is not None and self.subscriber.is_connected

    def begin_at(self, position: Position | None) -> None:
        """Begin with what another router knows of it; None: with nothing, after all."""
        if self.subscriber is not None:
            self.subscriber.begin_at(position)
        self.is_taken_over = self.subscriber is not None and self.subscriber.position is not None
        self.last_batch_s = time.monotonic() if self.is_taken_over else None

    def go_on(self) -> bool:
        """Take a message, if there is any; returns whether there was one. `rest` may be new."""
        if self.subscriber is None:
            return self._reopens()
        subscriber = self.subscriber
        if subscriber.news:
            self.rest = self._contents(subscriber.news.popleft())
            return True
        if not subscriber.step():
            return False
        is_new = subscriber.num_connects != self._num_connects
        if is_new and self._num_connects and self.source.replay is None:
            # A publisher that was away may have restarted, or not.
            self.rest = self._losing()
        self._num_connects = subscriber.num_connects
        return True

    def _reopens(self) -> bool:
        if self.retry_s is None or time.monotonic() < self.retry_s:
            return False
        self.retry_s = time.monotonic() + _RETRY_S
        try:
            self._open()
        except (zmq.ZMQError, ConfigError):
            return False
        return True

    def _contents(self, news: News) -> Iterator[EventBatch | None]:
        match news:
            case PublisherRestarted():
                log_event(
                    logger, logging.INFO, "kv_events_source_restarted",
                    endpoint=self.source.endpoint,
                )  # fmt: skip
                yield None
            case Lost(first, stop):
                # What was published before the first connection was never known here.
                if self.last_batch_s is not None:
                    log_event(
                        logger, logging.WARNING, "kv_events_lost",
                        endpoint=self.source.endpoint, batches=stop - first,
                    )  # fmt: skip
                    yield from self._losing()
            case Received() | SnapshotPart():
                if isinstance(news, SnapshotPart) and news.is_first:
                    yield None
                self.last_batch_s = time.monotonic()
                yield from slices(news.batch)
                self.lag_s = time.time() - news.batch.ts

    def _losing(self) -> Iterator[None]:
        self.num_losses += 1
        yield None


_SLICE_S = 0.001  # so long may events hold requests up at a time
_HINTS = {
    Alarm.UNREACHED: "check the address, and that the engine publishes KV events "
    "(vLLM, SGLang: --kv-events-config; a FlexCache server: kv_events_endpoint)",
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
        is_held: Connect only, until `release`: what sources publish waits in their sockets.
    """

    def __init__(
        self, sink: Sink, loop: asyncio.AbstractEventLoop, *, is_held: bool = False
    ) -> None:
        self._sink = sink
        self._loop = loop
        self._sources: dict[str, FollowedSource] = {}
        self._ready: dict[FollowedSource, None] = {}
        """Those that may have something, by turns."""
        self._is_scheduled = is_held  # `release` has the first turn then
        # To poll thousands of sockets takes as long as a batch; this finds those that have news.
        self._epoll = select.epoll()
        self._of_file: dict[int, FollowedSource] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    def set_sources(self, sources: Iterable[EventSource]) -> None:
        """Follow these sources, and only these. One whose addresses changed begins again.

        Raises:
            ConfigError: An address cannot be used. Sources before it are followed.
        """
        wanted = {source.endpoint: source for source in sources}
        for endpoint, followed in list(self._sources.items()):
            if wanted.get(endpoint) != followed.source:
                followed.close()
                self._ready.pop(self._sources.pop(endpoint), None)
                if endpoint in wanted:
                    self._sink.forget(endpoint)
        living = set(self._sources.values())
        self._of_file = {file: each for file, each in self._of_file.items() if each in living}
        for endpoint, source in wanted.items():
            if endpoint not in self._sources:
                self._sources[endpoint] = FollowedSource(source)
                self._mark(self._sources[endpoint])

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
            source = self._sources.get(endpoint)
            if source is None:
                continue
            alarm = source.watch.answered(
                num_tokens, predicted_tokens, cached_tokens, source.is_connected
            )
            if alarm is not None:
                log_event(
                    logger, logging.WARNING, f"kv_events_source_{alarm.value}",
                    endpoint=endpoint, hint=_HINTS[alarm],
                    effect="requests do not go where their KV is",
                )  # fmt: skip

    def positions(self) -> dict[str, Position]:
        """Return up to where sources were followed, of those whose blocks are known, by
        endpoint."""
        return {
            each.source.endpoint: each.position for each in self._sources.values() if each.position
        }

    def begin_at(self, positions: Mapping[str, Position]) -> None:
        """Begin with what another router knows of sources, while the feed is held."""
        for endpoint, position in positions.items():
            if endpoint in self._sources:
                self._sources[endpoint].begin_at(position)

    @property
    def taken_over(self) -> set[str]:
        """Endpoints of the sources whose blocks are to come from the other router."""
        return {each.source.endpoint for each in self._sources.values() if each.is_taken_over}

    def release(self, *, is_whole: bool) -> None:
        """Follow the sources that were held until now.

        Args:
            is_whole: Whether the sink has all of what `begin_at` began with.
        """
        for source in self._sources.values():
            if source.is_taken_over and not is_whole:
                self._forget(source)
                source.begin_at(None)
            source.is_taken_over = False
        self._go_on()

    def stats(self) -> dict[str, SourceStats]:
        """Return statistics by endpoint."""
        now = time.monotonic()
        return {endpoint: _stats_of(source, now) for endpoint, source in self._sources.items()}

    def close(self) -> None:
        """Follow nothing any more. Idempotent."""
        self.set_sources(())
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def check(self) -> None:
        """Raise `InternalError` if what is followed are not the sources."""
        for endpoint, followed in self._sources.items():
            if followed.source.endpoint != endpoint:
                raise InternalError(f"{endpoint}: what is followed is not this source")
        if strangers := {*self._ready, *self._of_file.values()} - {*self._sources.values()}:
            raise InternalError(f"{len(strangers)} sources are watched that are not followed")

    # -- turns -----------------------------------------------------------------------------------

    def _look(self) -> None:
        for file, _ in self._epoll.poll(0):
            if file in self._of_file:
                self._mark(self._of_file[file])

    def _mark(self, source: FollowedSource) -> None:
        """Note that a source may have something."""
        if self._sources.get(source.source.endpoint) is not source:
            return  # it was removed meanwhile
        self._ready[source] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Take what there is, for a limited time; the rest when the loop comes by again."""
        self._is_scheduled = False
        deadline = time.monotonic() + _SLICE_S
        while self._ready and time.monotonic() < deadline:
            source = next(iter(self._ready))
            del self._ready[source]
            if self._take_part(source):
                self._ready[source] = None
            else:
                self._watch(source)
        if self._ready:
            self._is_scheduled = True
            self._loop.call_soon(self._go_on)

    def _take_part(self, source: FollowedSource) -> bool:
        """Apply a slice, or take a message; returns whether there may be more."""
        endpoint = source.source.endpoint
        try:
            for content in source.rest:
                self._apply(source, content)
                return True
        except Exception as error:  # routing goes on, without this source's blocks
            log_event(
                logger, logging.ERROR, "kv_events_not_applied", endpoint=endpoint, error=error,
                exc_info=True,
            )  # fmt: skip
            source.num_losses += 1
            self._forget(source)
            return True
        try:
            return source.go_on()
        except Exception as error:
            source.fail(error)
            self._forget(source)
            return False

    def _apply(self, source: FollowedSource, content: EventBatch | None) -> None:
        if content is None:
            self._forget(source)
        else:
            source.watch.event()
            self._sink.apply(source.source.endpoint, content)

    def _forget(self, source: FollowedSource) -> None:
        source.position = None
        self._sink.forget(source.source.endpoint)

    def _watch(self, source: FollowedSource) -> None:
        """Have a source that has nothing marked when it has.

        ZMQ's files tell of changes only, so its sockets were looked at since the last one.
        """
        until_s = source.retry_s
        if source.subscriber is not None:
            source.position = source.subscriber.position
            waits = source.subscriber.waits
            if waits is source.watched:
                return
            source.watched, until_s = waits, waits.until_s
            for socket in waits.sockets:
                file = int(socket.getsockopt(zmq.FD))
                self._of_file[file] = source
                with contextlib.suppress(FileExistsError):
                    self._epoll.register(file, select.EPOLLIN | select.EPOLLET)
        if until_s is not None:
            self._loop.call_later(max(0.0, until_s - time.monotonic()), self._mark, source)


def _stats_of(source: FollowedSource, now: float) -> SourceStats:
    counters, last, alarms = source.counters, source.last_batch_s, source.watch.alarms
    return SourceStats(
        is_connected=source.is_connected,
        is_silent=Alarm.SILENT in alarms,
        is_unmatched=Alarm.UNMATCHED in alarms,
        last_batch_age_s=None if last is None else max(0.0, now - last),
        batches=counters.received,
        lag_s=source.lag_s,
        gaps=counters.gaps,
        losses=source.num_losses,
        replayed_batches=counters.replayed,
        restarts=counters.restarts,
        snapshots=counters.snapshots,
        bad_batches=counters.malformed,
    )
