"""Probes of engines: health, models and cache sizes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from flexcache.logs import log_event
from flexcache.router.fleet import ModelCard, Tier
from flexcache.router.roster import Probe
from flexcache.router.tokens.engines import MAX_ANSWER_BYTES, BadAnswer, read_answer
from flexcache.router.waiting import Turns, is_set_within

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
DETAILS_INTERVAL_S = 15.0
_LIST_TIMEOUT_S = 5.0
_SHORTEST_S = 0.1
"""Time between probes of one engine at least."""
_MAX_METRICS_BYTES = 8 << 20
_MAX_NUMBER = 1 << 31
_VLLM_CONFIG = "vllm:cache_config_info"
_FLEXCACHE_GAUGES = ("flexcache_tier_capacity_blocks{", "flexcache_block_tokens")
_SGLANG_GAUGES = ("sglang:max_total_num_tokens", "sglang:page_size")


class Capacity(NamedTuple):
    """GPU blocks of an engine, or of one of its ranks.

    Attributes:
        rank: Data-parallel rank; None if the engine does not say.
    """

    rank: int | None
    num_gpu_blocks: int
    block_size: int


class Prober:
    """Probes engines until told to forget them.

    Args:
        session: For requests to engines (`tokens.engines.open_session`).
        on_probe: Called with URL and result.
        on_details: Called with URL, models and adapters (None: the engine did not answer), and
            capacities (empty: it did not tell them).
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        on_probe: Callable[[str, Probe], None],
        on_details: Callable[[str, list[ModelCard] | None, list[Capacity]], None],
    ) -> None:
        self._session = session
        self._on_probe = on_probe
        self._on_details = on_details
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._bad: dict[tuple[str, str], str] = {}
        self._details_wanted: set[str] = set()

    def follow(self, urls: tuple[str, ...]) -> None:
        """Probe these engines from now on, new ones at once, and no others."""
        for url in self._tasks.keys() - set(urls):
            self._tasks.pop(url).cancel()
            del self._wake[url]
            self._details_wanted.discard(url)
            self._bad = {key: why for key, why in self._bad.items() if key[0] != url}
        for url in urls:
            if url not in self._tasks:
                self._wake[url] = asyncio.Event()
                self._tasks[url] = asyncio.create_task(self._probe_on(url, self._wake[url]))

    def hurry(self, url: str, *, with_details: bool = False) -> None:
        """Probe an engine now; with its details, even if these are not due."""
        if url in self._wake:
            if with_details:
                self._details_wanted.add(url)
            self._wake[url].set()

    async def close(self) -> None:
        """Stop probing."""
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_on(self, url: str, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        details_due, was_up = 0.0, False
        probes, details = Turns("probes", url), Turns("details", url)
        while True:
            wake.clear()
            with probes.turn():
                probe = await self._probe(url)
                is_up = probe is Probe.GOOD
                is_due = loop.time() >= details_due or url in self._details_wanted
                if is_up and (is_due or not was_up):
                    self._details_wanted.discard(url)
                    is_known = False
                    with details.turn():  # the engine gets requests all the same
                        is_known = await self._read_details(url)  # before it gets requests
                    details_due = loop.time() + (DETAILS_INTERVAL_S if is_known else 0.0)
                self._on_probe(url, probe)
                was_up = is_up
            await asyncio.sleep(_SHORTEST_S)  # failing requests must not become a storm of probes
            await is_set_within(wake, PROBE_INTERVAL_S - _SHORTEST_S)

    async def _probe(self, url: str) -> Probe:
        try:
            await self._get(url, "/health", MAX_ANSWER_BYTES)
        except (asyncio.TimeoutError, aiohttp.ServerTimeoutError):
            return Probe.LATE
        except BadAnswer as error:
            self._note(url, "/health", str(error))
            return Probe.BAD
        except (aiohttp.ClientError, OSError, ValueError):
            return Probe.BAD
        self._note(url, "/health")
        return Probe.GOOD

    async def _read_details(self, url: str) -> bool:
        """Read models and capacities; what cannot be read is left out.

        Returns:
            Whether the engine listed its models.
        """
        cards: list[ModelCard] | None = None
        try:
            cards = await read_models(self._session, url)
            self._note(url, "/v1/models")
        except BadAnswer as error:
            self._note(url, "/v1/models", str(error))
        self._on_details(url, cards, await self._read_capacities(url))
        return cards is not None

    async def _read_capacities(self, url: str) -> list[Capacity]:
        capacities: list[Capacity] = []
        try:
            content = await self._get(url, "/metrics", _MAX_METRICS_BYTES)
            capacities = list(parse_capacities(content.decode()))
            self._note(url, "/metrics")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            log_event(logger, logging.DEBUG, "capacity_unknown", url=url, error=repr(error))
        except ValueError as error:  # BadAnswer, or what cannot be parsed
            self._note(url, "/metrics", str(error))
        return capacities

    def _note(self, url: str, path: str, why: str = "") -> None:
        """Log that an answer is bad, unless the last one was bad in the same way."""
        if why and self._bad.get((url, path)) != why:
            log_event(
                logger, logging.WARNING, "engine_answer_bad", url=url, path=path, error=why[:500],
                effect="it is not used",
            )  # fmt: skip
        self._bad[url, path] = why

    async def _get(self, url: str, path: str, max_bytes: int) -> bytes:
        return await _get(self._session, url + path, max_bytes, PROBE_TIMEOUT_S)


async def _get(session: aiohttp.ClientSession, url: str, max_bytes: int, timeout_s: float) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
        if answer.status != 200:
            raise aiohttp.ClientPayloadError(f"status {answer.status}")
        return await read_answer(answer, max_bytes)


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


_models = msgspec.json.Decoder(_Models)
_card = msgspec.json.Decoder(_Card)


async def read_models(session: aiohttp.ClientSession, url: str) -> list[ModelCard] | None:
    """Ask an engine which models it serves; None: it did not answer.

    Raises:
        BadAnswer: Its answer is no list of models.
    """
    try:
        content = await _get(session, f"{url}/v1/models", MAX_ANSWER_BYTES, _LIST_TIMEOUT_S)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return None
    return parse_models(content)


def parse_models(content: bytes) -> list[ModelCard]:
    """
    Raises:
        BadAnswer: It is no list of models.
    """
    try:
        raws = _models.decode(content).data
        read = [_card.decode(raw) for raw in raws]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"/v1/models is no list of models: {error}") from None
    return [
        ModelCard(card.id, card.root, card.parent, bytes(raw), card.owned_by)
        for card, raw in zip(read, raws, strict=True)
    ]


def parse_capacities(text: str) -> Iterator[Capacity]:
    """Parse the capacities in metrics of vLLM or SGLang.

    Raises:
        ValueError: The text is malformed, or a number cannot be one of blocks or tokens.
    """
    starts = tuple(f"{name}{{" for name in (_VLLM_CONFIG, *_SGLANG_GAUGES))
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    gauges: dict[str, dict[int | None, int]] = {name: {} for name in _SGLANG_GAUGES}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            labels: dict[str, str] = sample.labels
            if sample.name in gauges:
                gauges[sample.name][_rank(labels.get("dp_rank", ""))] = _number(sample.value)
            else:
                yield from _vllm_capacity(labels)
    num_tokens, page_sizes = gauges.values()
    for rank, size_of_page in page_sizes.items():
        if rank in num_tokens and size_of_page > 0:
            yield Capacity(rank, num_tokens[rank] // size_of_page, size_of_page)


def _vllm_capacity(labels: Mapping[str, str]) -> Iterator[Capacity]:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if blocks.isdecimal() and size.isdecimal() and int(size) > 0:
        yield Capacity(_rank(labels.get("engine", "")), _number(int(blocks)), _number(int(size)))


async def read_lower_tiers(
    session: aiohttp.ClientSession, cache_url: str
) -> tuple[dict[Tier, int], int] | None:
    """Ask a cache for the sizes of its tiers; see `parse_lower_tiers`. None: it did not say."""
    try:
        content = await _get(session, f"{cache_url}/metrics", _MAX_METRICS_BYTES, PROBE_TIMEOUT_S)
        return parse_lower_tiers(content.decode())
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        log_event(logger, logging.DEBUG, "capacity_unknown", url=cache_url, error=repr(error))
        return None


def parse_lower_tiers(text: str) -> tuple[dict[Tier, int], int] | None:
    """Parse the sizes of tiers in FlexCache's metrics; None: they are not there.

    Returns:
        Blocks of each tier, and tokens per block. SSD and remote store are one tier: it has what
        the larger of them has.

    Raises:
        ValueError: The text is malformed, or a number cannot be one of blocks or tokens.
    """
    lines = [line for line in text.splitlines() if line.startswith(_FLEXCACHE_GAUGES)]
    blocks: dict[str, int] = {}
    block_size = 0
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if "tier" in sample.labels:
                blocks[sample.labels["tier"]] = _number(sample.value)
            else:
                block_size = _number(sample.value)
    below = max(blocks.get("SSD", 0), blocks.get("REMOTE", 0))
    tiers = {Tier.DRAM: blocks.get("CPU", 0), Tier.DISK: below}
    return (tiers, block_size) if block_size else None


def _number(value: float) -> int:
    """Return a number of blocks or tokens; 0 where the engine knows none yet."""
    if not 0 <= value <= _MAX_NUMBER:  # NaN is not either
        raise BadAnswer(f"{value!r:.40} blocks or tokens")
    return int(value)


def _rank(label: str) -> int | None:
    return int(label) if label.isdecimal() else None
