"""Everything that a decider is made of, started and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

import aiohttp
import msgspec

from flexcache.config.router import RouterConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.router.decider.decider import Decider
from flexcache.router.decider.health import Probe
from flexcache.router.decider.line import WaitingLine
from flexcache.router.decider.prober import Capacity, Prober
from flexcache.router.decider.roster import Roster
from flexcache.router.discovery.discovery import Discovery
from flexcache.router.discovery.file import WorkerFile
from flexcache.router.discovery.listing import parse_options
from flexcache.router.feed import Feed
from flexcache.router.router import KVRouter
from flexcache.router.stats import ProcessStats, ProxyStats, RouterStats
from flexcache.router.tokens import Tokenizers
from flexcache.router.workers import WorkerSpec
from flexcache.version import __version__

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_SWEPT_A_TICK = 2000


class DeciderService:
    """A decider with what it reads from: discovery, probes, tokenizers, KV events.

    Args:
        address: Where clients connect, for people.

    Raises:
        ConfigError: The list of workers or a file is wrong.
    """

    def __init__(self, config: RouterConfig, address: str = "") -> None:
        self.config = config
        self._address = address
        self._started_s = time.monotonic()
        self._listing = parse_options(config.workers, config.events)
        file = None if config.worker_file is None else WorkerFile(config.worker_file)
        self.routing = KVRouter(
            policy=config.policy,
            temperature=config.temperature,
            max_blocks=config.max_blocks,
            approximate=config.approximate,
            max_requests=config.max_requests_per_worker,
            max_wait_s=config.max_wait_s,
        )
        self.line = WaitingLine(config.queue_size, config.queue_timeout_s)
        self.roster = Roster(
            self.routing,
            on_change=self._workers_changed,
            on_room=self.line.wake,
            on_doubt=self._doubt,
        )
        self.engine_headers = _engine_headers(config.engine_key_file)
        self.tokenizers = Tokenizers(tokenizer=config.tokenizer)
        self.decider = Decider(
            self.routing, self.roster, self.tokenizers.read, self.line,
            engine_headers=self.engine_headers,
        )  # fmt: skip
        self.discovery = Discovery(self._listing, self.roster.set_listed, file=file)
        self._feed: Feed | None = None
        self._prober: Prober | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._known = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether the engines are known and one takes requests."""
        return self.roster.is_known and self.roster.num_up > 0

    async def start(self) -> None:
        """Start all parts; returns when every listed engine was probed."""
        await self.tokenizers.start()
        self._feed = Feed(self.routing, asyncio.get_running_loop())
        self._session = aiohttp.ClientSession(headers=self.engine_headers)
        self._prober = Prober(
            self._session,
            interval_s=self.config.health_interval_s,
            timeout_s=self.config.health_timeout_s,
            details_interval_s=self.config.metrics_interval_s,
            on_probe=self._probed,
            on_details=self._details_read,
        )
        self._tasks = [
            asyncio.create_task(self._run("discovery", self.discovery.run())),
            asyncio.create_task(self._tick()),
        ]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._known.wait(), 2 * self.config.health_timeout_s)

    async def close(self) -> None:
        """Stop all parts. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._prober is not None and self._session is not None:
            await self._prober.close()
            await self._session.close()
            self._prober = None
        if self._feed is not None:
            await self._feed.close()
            self._feed = None
            await self.tokenizers.close()

    # -- what the parts tell each other ------------------------------------------------------------

    def _workers_changed(self, specs: tuple[WorkerSpec, ...]) -> None:
        assert self._prober is not None and self._feed is not None
        urls = self.roster.urls
        self._prober.follow(urls)
        self.tokenizers.set_engines(dict.fromkeys(urls, self.engine_headers))
        try:
            self._feed.set_sources(
                dict.fromkeys(source for spec in specs for source in spec.sources)
            )
        except ConfigError as error:  # requests are routed without these events
            log_event(logger, logging.ERROR, "kv_events_not_followed", error=str(error))

    def _doubt(self, url: str) -> None:
        if self._prober is not None:
            self._prober.hurry(url)

    def _probed(self, url: str, probe: Probe) -> None:
        self.roster.probed(url, probe, time.monotonic())
        if self.roster.is_known:
            self._known.set()

    def _details_read(self, url: str, models: list[str], capacities: list[Capacity]) -> None:
        for spec in self.roster.specs:
            if spec.url != url:
                continue
            self.routing.set_models(spec.name, models)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.decider.expire()
            self.routing.sweep(_SWEPT_A_TICK)

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
                circuit=self.roster.health(name).circuit.state.value,
                health_failures=self.roster.health(name).num_failures,
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
            sources={} if self._feed is None else self._feed.stats(),
            tokens=self.tokenizers.stats(),
            queue=self.decider.queue_stats(),
            proxy=self._proxy_stats(),
        )  # fmt: skip

    def _proxy_stats(self) -> ProxyStats:
        return ProxyStats(
            processes=0, restarts=0, open_requests=len(self.decider.running),
            ended={outcome.value: n for outcome, n in self.decider.num_ended.items()},
            retries=0, rejected={}, unsupervised_requests=0,
        )  # fmt: skip


def _engine_headers(key_file: str | None) -> dict[str, str]:
    """Return the header with the engines' key.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    if key_file is None:
        return {}
    try:
        key = Path(key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise reject("engine_key_file", key_file, str(error)) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise reject("engine_key_file", key_file, "must contain one key of visible characters")
    return {"Authorization": f"Bearer {key}"}
