"""Peers: other routers before the same engines, whose running requests count here too."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence

from flexcache.errors import ConfigError
from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.subscriber import BatchNews, BatchSubscriber, Lost, Received
from flexcache.logs import log_event
from flexcache.router.load import GONE, Running
from flexcache.router.messages import (
    TOPIC,
    Alive,
    AllRunning,
    Began,
    End,
    FirstToken,
    Life,
    RunningRequest,
    decode_life,
    encode_life,
)
from flexcache.router.router import KVRouter
from flexcache.router.stats import PeerStats
from flexcache.router.waiting import is_set_within

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""The requests of a router that is silent for this long are dropped."""
_POLL_S = 0.2
_REPLAY_S = 1.0


class Peer:
    """Another router.

    Args:
        name: Its endpoint.
        routing: Counts its requests; those at a worker that is not known here yet count from a
            later snapshot on.

    Attributes:
        is_known: Whether all its requests are known: nothing was lost since its last snapshot.
    """

    def __init__(self, name: str, routing: KVRouter) -> None:
        self.name = name
        self.is_known = False
        self._routing = routing
        self._heard_s: float | None = None
        self._counts = PeerStats()

    def apply(self, events: Sequence[Life], now: float) -> None:
        """Apply a batch."""
        self._heard_s = now
        self._counts.batches += 1
        for event in events:
            match event:
                case Began(request):
                    self._begin(request, now)
                case FirstToken(request_id):
                    self._routing.first_token(self._local(request_id), now)
                case End(request_id):
                    self._routing.ended(self._local(request_id), now)
                case AllRunning(requests):
                    self.is_known = True
                    self._replace(requests, now)

    def lost(self) -> None:
        """Note that batches were lost for good: a snapshot will follow."""
        self._counts.gaps += 1
        self.is_known = False

    def restarted(self, now: float) -> None:
        """Note that the router restarted: its requests of before are unknown to it."""
        self._replace([], now)

    def expire(self, now: float) -> bool:
        """Drop the requests of a router that is silent; returns whether it was given up now."""
        if self._heard_s is None or now - self._heard_s < LEASE_S:
            return False
        self._heard_s = None
        self._replace([], now)
        return True

    def stats(self, now: float) -> PeerStats:
        return self._counts.snapshot(
            is_up=self._heard_s is not None,
            requests=sum(running.number != GONE for running in self._requests()),
            last_batch_age_s=None if self._heard_s is None else max(0.0, now - self._heard_s),
        )

    def _requests(self) -> list[Running]:
        return [each for each in self._routing.running.values() if each.owner == self.name]

    def _local(self, request_id: str) -> str:
        """Return the name of a request here: ids of several routers may be equal."""
        return f"{self.name} {request_id}"

    def _begin(self, request: RunningRequest, now: float) -> None:
        self._routing.follow(request, now, owner=self.name, is_peers=True)

    def _replace(self, requests: Sequence[RunningRequest], now: float) -> None:
        named = {self._local(request.request_id): request for request in requests}
        for running in self._requests():
            request = named.get(running.request_id)
            if request is None:
                self._routing.ended(running.request_id, now)
            elif running.worker == request.worker and running.number != GONE:
                if running.was_served and not request.has_first_token:
                    continue  # a retry, which is not known yet
                del named[running.request_id]
                if request.has_first_token:
                    self._routing.first_token(running.request_id, now)
        for request in named.values():
            self._begin(request, now)


class Follower:
    """Follows other routers, from `start` to `close`.

    Args:
        pairs: ``ENDPOINT,REPLAY`` of each.
        routing: Counts their requests.

    Raises:
        ConfigError: On `start`: an address cannot be used.
    """

    def __init__(self, pairs: Sequence[str], routing: KVRouter) -> None:
        self._peers = [Peer(pair.partition(",")[0], routing) for pair in pairs]
        self._replays = [pair.partition(",")[2] for pair in pairs]
        self._threads: list[threading.Thread] = []
        self._caught_up = [asyncio.Event() for _ in pairs]
        self._is_closing = False

    def start(self) -> None:
        """Follow from now on; what was published before is requested."""
        loop = asyncio.get_running_loop()
        subscribers = []
        try:
            for peer, replay in zip(self._peers, self._replays, strict=True):
                subscribers.append(
                    BatchSubscriber(
                        peer.name, decode_life, replay, TOPIC, replay_timeout_s=_REPLAY_S
                    )
                )
        except ConfigError:
            for subscriber in subscribers:
                subscriber.close()
            raise
        for subscriber, peer, caught_up in zip(
            subscribers, self._peers, self._caught_up, strict=True
        ):
            thread = threading.Thread(
                target=self._follow, args=(subscriber, peer, caught_up, loop),
                name="flexcache-router-peer", daemon=True,
            )  # fmt: skip
            thread.start()
            self._threads.append(thread)

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until all requests of the other routers are known; False: one did not tell them."""
        found = [is_set_within(event, timeout_s) for event in self._caught_up]
        return all(await asyncio.gather(*found))

    async def close(self) -> None:
        """Stop following. Idempotent."""
        self._is_closing = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._threads.clear()

    def expire(self, now: float) -> None:
        """Drop the requests of routers that are silent."""
        for peer in self._peers:
            if peer.expire(now):
                log_event(logger, logging.WARNING, "peer_lost", peer=peer.name)

    def stats(self, now: float) -> dict[str, PeerStats]:
        return {peer.name: peer.stats(now) for peer in self._peers}

    def _follow(
        self,
        subscriber: BatchSubscriber[list[Life]],
        peer: Peer,
        caught_up: asyncio.Event,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Run on a thread of its own."""
        with subscriber:
            while not self._is_closing:
                news = subscriber.receive(0)
                try:
                    if news is None and not caught_up.is_set():
                        loop.call_soon_threadsafe(_set_if_known, peer, caught_up)
                    news = news or subscriber.receive(_POLL_S)
                    if news is not None:
                        loop.call_soon_threadsafe(_take, peer, news)
                except RuntimeError:  # the event loop is closed
                    return


def _set_if_known(peer: Peer, caught_up: asyncio.Event) -> None:
    if peer.is_known:
        caught_up.set()


def _take(peer: Peer, news: BatchNews[list[Life]]) -> None:
    now = time.monotonic()
    if isinstance(news, Received):
        peer.apply(news.batch, now)
    elif isinstance(news, Lost):
        log_event(
            logger, logging.WARNING, "peer_batches_lost", peer=peer.name, first=news.first,
            stop=news.stop,
        )  # fmt: skip
        peer.lost()
    else:
        log_event(logger, logging.INFO, "peer_restarted", peer=peer.name)
        peer.restarted(now)


BEAT_S = 0.5
SNAPSHOT_S = 5.0
_GATHER_S = 0.001  # requests that begin together travel together
_KEPT = 4096  # batches that a follower may ask for again; then the next snapshot must do


_PAGE_S = 1.0

Pages = Callable[[int], Coroutine[None, None, tuple[bytes, int | None]]]
"""Returns a page of the index, and the cursor of the next one, for its own cursor."""


class _Sync(BatchPublisher[Life]):
    """Gives pages of the index besides, from the event loop, to which the index belongs."""

    def __init__(self, address: Address, pages: Pages) -> None:
        super().__init__(address, encode_life, num_kept=_KEPT, num_queued=_KEPT, gather_s=_GATHER_S)
        self._pages = pages
        self._loop = asyncio.get_running_loop()

    def _page(self, cursor: int) -> tuple[bytes, int | None] | None:
        page = asyncio.run_coroutine_threadsafe(self._pages(cursor), self._loop)
        try:
            return page.result(_PAGE_S)
        except Exception as error:  # a router that starts can do without
            page.cancel()
            log_event(logger, logging.WARNING, "index_not_given", cursor=cursor, error=repr(error))
            return None


class LifePublisher:
    """Publishes at ``ENDPOINT,REPLAY``. Calls take microseconds. Make it on the event loop.

    Args:
        pair: Both endpoints.
        running: Returns all requests that this router sent and that run.
        pages: For a router that starts, see `takeover`.

    Raises:
        ConfigError: On `start`: an address cannot be used.
    """

    def __init__(
        self, pair: str, running: Callable[[], list[RunningRequest]], pages: Pages
    ) -> None:
        endpoint, _, replay = pair.partition(",")
        self._publisher = _Sync(Address(endpoint, replay, TOPIC), pages)
        self._running = running
        self._beat_due = 0.0
        self._snapshot_due = 0.0

    def start(self) -> None:
        self._publisher.start()

    def close(self) -> None:
        """Publish what is queued, and stop. Idempotent."""
        self._publisher.close()

    def tell(self, event: Life) -> None:
        self._publisher.publish([event])

    def beat(self, now: float) -> None:
        """Publish what is due by time."""
        if now >= self._snapshot_due:
            self._snapshot_due, self._beat_due = now + SNAPSHOT_S, now + BEAT_S
            self._publisher.publish([AllRunning(self._running())])
        elif now >= self._beat_due:
            self._beat_due = now + BEAT_S
            self._publisher.publish([Alive()])
