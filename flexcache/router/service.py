"""Service of a decider: what it reads from, discovery, probes, tokenizers, KV events."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError
from flexcache.ids import __version__
from flexcache.logs import log_event
from flexcache.router.chooser import Decision
from flexcache.router.decider import Decider, WaitingLine
from flexcache.router.discovery import Discovery
from flexcache.router.feed import Feed
from flexcache.router.fleet import ModelCard, Tier, WorkerSpec
from flexcache.router.link import LinkServer
from flexcache.router.load import Running
from flexcache.router.messages import ProxyCounters, RunningRequest, told
from flexcache.router.peers import SNAPSHOT_S, Follower, LifePublisher
from flexcache.router.prefetches import Prefetches, open_session
from flexcache.router.prober import (
    DETAILS_INTERVAL_S,
    PROBE_TIMEOUT_S,
    Capacity,
    Prober,
    read_lower_tiers,
)
from flexcache.router.roster import Probe, Roster
from flexcache.router.settings import cache_headers, engine_headers, listing_of, routing_of
from flexcache.router.stats import ProcessStats, ProxyStats, RouterStats
from flexcache.router.takeover import IndexPages, take_over
from flexcache.router.tokens import Tokenizers
from flexcache.router.tokens.engines import open_session as open_engine_session
from flexcache.router.waiting import Turns, is_set_within

logger = logging.getLogger(__name__)

THREAD_SWITCH_S = 0.0005
"""For `sys.setswitchinterval`: Python's 5 ms is how long a tokenizing thread may hold up the loop,
each time."""

_TICK_S = 0.05
_CATCH_UP_S = SNAPSHOT_S + 1.0  # a peer whose replay is lost is known from its next snapshot
_SWEPT_A_TICK = 2000


class DeciderService:
    """A decider with what it reads from: discovery, probes, tokenizers, KV events.

    Make and use it on one running event loop.

    Args:
        address: Where clients connect, for people.
        link: Endpoint for proxies in other processes; None: there are none.

    Attributes:
        count_own_proxy: Returns the counters of a proxy in this process, if there is one.

    Raises:
        ConfigError: The list of workers or a file is wrong.
    """

    def __init__(self, config: RouterConfig, address: str = "", link: str | None = None) -> None:
        self.config = config
        self._address = address
        self._started_s = time.monotonic()
        listing, file = listing_of(config)
        self.routing = routing_of(config)
        self.line = WaitingLine(config.queue_size, config.queue_timeout_s)
        self.roster = Roster(
            self.routing,
            on_change=self._workers_changed,
            on_state=self._states_changed,
            on_doubt=self._doubt,
        )
        headers = engine_headers(config)
        self.tokenizers = Tokenizers(tokenizer=config.tokenizer, headers=headers)
        self.decider = Decider(
            self.routing, self.roster, self.tokenizers.read, self.line, engine_headers=headers
        )
        self.decider.on_answer = self._answered
        self.decider.on_decision = self._decided
        self.decider.on_models_changed = self._read_models_again
        self.discovery = Discovery(listing, self.roster.set_listed, file=file)
        loop = asyncio.get_running_loop()
        self._feed = Feed(self.routing, loop, is_held=bool(config.peers))
        self._session = open_engine_session(headers)
        self._prober = Prober(
            self._session,
            on_probe=self._probed,
            on_details=self._details_read,
        )
        self._cache_session = open_session(cache_headers(config))
        self._prefetches = Prefetches(self._cache_session)
        self._publisher: LifePublisher | None = None
        if config.sync_endpoint is not None:
            pages = IndexPages(self._feed, self.routing.holdings)
            self._publisher = LifePublisher(config.sync_endpoint, self._own_requests, pages.page)
        self._follower = Follower(config.peers, self.routing)
        self._link_endpoint = link
        self._link: LinkServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._known = asyncio.Event()
        self._is_taken_over = asyncio.Event()
        self._has_new_caches = asyncio.Event()
        self.count_own_proxy: Callable[[], ProxyCounters] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a proxy accepts requests, the engines are known, and one takes requests."""
        if self._link is not None and not any(each.is_serving for each in self._link.counters):
            return False
        return self.roster.is_known and bool(self.roster.up)

    async def start(self) -> None:
        """Start all parts; returns when every listed engine was probed, and the other routers were
        followed, as far as they answer.

        Raises:
            ConfigError: An address of the other routers cannot be used.
        """
        if self._publisher is not None:
            self._publisher.start()
            self.decider.tell = self._publisher.tell
        await self.tokenizers.start()
        self._tasks = [
            asyncio.create_task(self._run("discovery", self.discovery.run())),
            asyncio.create_task(self._run("caches", self._read_caches())),
            asyncio.create_task(self._tick()),
        ]
        await is_set_within(self._known, 2 * PROBE_TIMEOUT_S)
        self._follower.start()  # now, since requests count at known workers only
        self._tasks.append(asyncio.create_task(self._run("takeover", self._take_over())))
        # A large index takes longer, and requests need not wait for all of it.
        taken_over = is_set_within(self._is_taken_over, _CATCH_UP_S)
        _, is_caught_up = await asyncio.gather(taken_over, self._follower.caught_up(_CATCH_UP_S))
        if not is_caught_up:
            log_event(
                logger, logging.WARNING, "peer_silent", waited_s=_CATCH_UP_S,
                effect="its requests are unknown until it answers",
            )  # fmt: skip
        if self._link_endpoint is not None:
            self._link = LinkServer(self.decider, self._link_endpoint)
            self._link.start()

    async def close(self) -> None:
        """Stop all parts. Idempotent."""
        if self._link is not None:
            await self._link.close()
            self._link = None
        await self._follower.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._prober.close()
        await self._session.close()
        await self._prefetches.close()
        await self._cache_session.close()
        self._feed.close()
        await self.tokenizers.close()

    async def _take_over(self) -> None:
        try:
            if self.config.peers:
                await take_over(self.config.peers, self._feed, self.routing.holdings)
        finally:
            self._is_taken_over.set()

    # -- what the parts tell each other ------------------------------------------------------------

    def _workers_changed(self, specs: tuple[WorkerSpec, ...]) -> None:
        urls = self.roster.urls
        self._prefetches.follow(filter(None, (spec.cache_url for spec in specs)))
        self._has_new_caches.set()
        self._prober.follow(urls)
        self.tokenizers.follow(urls)
        try:
            self._feed.set_sources(
                dict.fromkeys(source for spec in specs for source in spec.sources)
            )
        except ConfigError as error:  # requests are routed without these events
            log_event(logger, logging.ERROR, "kv_events_not_followed", error=str(error))

    def _states_changed(self) -> None:
        self.line.wake()
        if self._link is not None:
            self._link.announce()

    def _doubt(self, url: str) -> None:
        self._prober.hurry(url)

    def _read_models_again(self) -> None:
        for url in self.roster.urls:
            self._prober.hurry(url, with_details=True)

    def _probed(self, url: str, probe: Probe) -> None:
        self.roster.probed(url, probe, time.monotonic())
        if self.roster.is_known:
            self._known.set()

    def _details_read(
        self, url: str, cards: list[ModelCard] | None, capacities: list[Capacity]
    ) -> None:
        if cards is not None:
            self.roster.set_cards(url, cards)
            self.tokenizers.set_cards(url, cards)
        for spec in self.roster.specs:
            if spec.url != url:
                continue
            for capacity in capacities:
                if capacity.rank in (None, spec.data_parallel_rank or 0):
                    self.routing.set_capacity(
                        spec.name, capacity.num_gpu_blocks, capacity.block_size
                    )

    async def _read_caches(self) -> None:
        """Keep the sizes of caches known, where what they hold is guessed."""
        while True:
            self._has_new_caches.clear()
            urls = self.routing.holdings.guessed_caches
            reads = [read_lower_tiers(self._cache_session, url) for url in urls]
            for url, read in zip(urls, await asyncio.gather(*reads), strict=True):
                if read is not None:
                    self.routing.set_lower_tiers(url, *read)
            await is_set_within(self._has_new_caches, DETAILS_INTERVAL_S)

    def _decided(self, decision: Decision) -> None:
        """Have the cache of the chosen worker begin to load, before the request arrives there."""
        cache_url = self.roster.spec(decision.worker).cache_url
        if decision.disk_block is not None and cache_url is not None:
            num_tokens = decision.matched[Tier.DISK]
            self._prefetches.begin(cache_url, decision.disk_block, num_tokens)

    def _answered(self, running: Running, cached_tokens: int | None) -> None:
        if running.worker in self.roster:
            assert running.predicted_tokens is not None
            self._feed.answered(
                [source.endpoint for source in self.roster.spec(running.worker).sources],
                num_tokens=running.work.num_tokens,
                predicted_tokens=running.predicted_tokens,
                cached_tokens=cached_tokens,
            )

    def _own_requests(self) -> list[RunningRequest]:
        return [told(each) for each in self.routing.running.values() if not each.is_peers]

    async def _tick(self) -> None:
        turns = Turns("tick")
        while True:
            await asyncio.sleep(_TICK_S)
            with turns.turn():
                self._do_what_is_due(time.monotonic())

    def _do_what_is_due(self, now: float) -> None:
        self.decider.expire()
        self.routing.sweep(_SWEPT_A_TICK)
        self._follower.expire(now)
        if self._publisher is not None:
            self._publisher.beat(now)
        if self._link is not None:
            self._link.expire()

    async def _run(self, name: str, work: object) -> None:
        """Run a part; should it fail, routing goes on with what is known."""
        try:
            await work  # type: ignore[misc]
        except Exception as error:
            log_event(
                logger, logging.ERROR, "router_part_failed", part=name, error=repr(error),
                exc_info=True,
            )  # fmt: skip

    # -- reports -----------------------------------------------------------------------------------

    def stats(self) -> RouterStats:
        now = time.monotonic()
        stats = self.routing.stats(now)
        workers = {
            name: msgspec.structs.replace(
                worker,
                circuit=self.roster.engine(name).circuit.state,
                health_failures=self.roster.engine(name).num_failures,
            )
            for name, worker in stats.workers.items()
        }
        return msgspec.structs.replace(
            stats,
            workers=workers,
            process=ProcessStats(
                version=__version__, pid=os.getpid(), uptime_s=now - self._started_s,
                ready=self.is_ready, address=self._address,
            ),
            sources=self._feed.stats(),
            caches=self._prefetches.stats(),
            tokens=self.tokenizers.stats(),
            queue=self.line.counts.snapshot(
                waiting=len(self.line),
                queued_prefill_s={
                    "engines": sum(worker.wait_s for worker in workers.values()),
                    "router": self.line.service_s,
                },
            ),
            proxy=self._proxy_stats(),
            peers=self._follower.stats(now),
        )  # fmt: skip

    def _proxy_stats(self) -> ProxyStats:
        proxies = [] if self._link is None else self._link.counters
        if self.count_own_proxy is not None:
            proxies.append(self.count_own_proxy())
        return ProxyStats(
            processes=len(proxies),
            restarts=0 if self._link is None else self._link.num_lost,
            open_requests=sum(proxy.open_requests for proxy in proxies),
            ended={outcome.value: n for outcome, n in self.decider.num_ended.items()},
            retries=sum(proxy.retries for proxy in proxies),
            rejected=dict(sum((Counter(proxy.rejected) for proxy in proxies), Counter())),
            unsupervised_requests=sum(proxy.unsupervised for proxy in proxies),
        )
