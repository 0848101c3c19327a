"""Follows other routers: one thread for each, which hands its batches to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from flexcache.errors import ConfigError
from flexcache.events.subscriber import BatchNews, BatchSubscriber, Lost, Received
from flexcache.logs import log_event
from flexcache.router.stats import PeerStats
from flexcache.router.sync.life import TOPIC, Life, decode
from flexcache.router.sync.peer import LoadBook, Peer
from flexcache.router.waiting import is_set_within

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_REPLAY_S = 1.0


class Follower:
    """Follows other routers, from `start` to `close`.

    Args:
        pairs: ``ENDPOINT,REPLAY`` of each.
        book: Counts their requests.

    Raises:
        ConfigError: On `start`: an address cannot be used.
    """

    def __init__(self, pairs: Sequence[str], book: LoadBook) -> None:
        self._peers = [Peer(pair.partition(",")[0], book) for pair in pairs]
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
                    BatchSubscriber(peer.name, decode, replay, TOPIC, replay_timeout_s=_REPLAY_S)
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
