"""The router predicts from KV events what a real SGLang finds, on its GPU and in the tiers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from predictions import PATIENCE_S, Predictions, predicting
from sglang_engine import (
    PAGE,
    TinyEngine,
    apart,
    linker_of,
    linker_options,
    manager_of,
    prompt,
    settle,
)
from test_hicache_storage import engine_with_storage
from test_hicache_storage import manager_of as manager_below
from test_hicache_storage import settle as settle_storage

from flexcache.router.fleet import EventSource, Tier
from flexcache.router.prober import Capacity, parse_capacities

NOTHING = {Tier.GPU: 0, Tier.DRAM: 0, Tier.DISK: 0}


class Followed:
    """An engine, and the predictions of two routers.

    Attributes:
        both: By SGLang's stream, which has the tiers' events too.
        cache: By FlexCache's own publisher.
    """

    def __init__(self, engine: TinyEngine, both: Predictions, cache: Predictions) -> None:
        self.engine = engine
        self.both, self.cache = both, cache

    async def generate(self, tokens: list[int], **fields: Any) -> int:
        """Return the cached tokens that SGLang reports."""
        request = self.engine.generate(tokens, **fields)
        settle(self.engine)
        return int(request.cached_tokens)

    async def come_to(
        self, router: Predictions, tokens: list[int], wanted: dict[Tier, int], **more: Any
    ) -> None:
        """Step until a router expects this of tiers; of those not named nothing."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while (found := expected(router, tokens, **more)) != {**NOTHING, **wanted}:
            assert asyncio.get_running_loop().time() < deadline_s, (found, wanted)
            self.engine.step()  # SGLang publishes when it steps
            await asyncio.sleep(0.001)


def expected(router: Predictions, tokens: list[int], **more: Any) -> dict[Tier, int]:
    return {**NOTHING, **router.of("engine", tokens, **more)}


def sources(directory: str) -> tuple[EventSource, EventSource]:
    """Return the addresses of SGLang's publisher and of ours."""
    return (
        EventSource(f"ipc://{directory}/tree", f"ipc://{directory}/tree-replay"),
        EventSource(f"ipc://{directory}/cache", f"ipc://{directory}/cache-replay"),
    )


@asynccontextmanager
async def followed(engine: TinyEngine, directory: str) -> AsyncIterator[Followed]:
    trees, ours = sources(directory)
    async with predicting(engine=(trees,)) as both, predicting(engine=(ours,)) as cache:
        yield Followed(engine, both, cache)


def engine_with_events(directory: str) -> TinyEngine:
    trees, ours = sources(directory)
    tiers = {"num_cpu_blocks": 200, "num_ssd_blocks": 400, "ssd_cache_dirs": [f"{directory}/ssd"]}
    published = {
        "kv_events_endpoint": ours.endpoint,
        "kv_events_replay_endpoint": ours.replay,
    }
    return TinyEngine(
        kv_events_config=publisher(trees),
        enable_metrics=True,
        **linker_options(**tiers, **published, skip_slow_loads=False),
    )


def publisher(source: EventSource) -> str:
    config = {"publisher": "zmq", "endpoint": source.endpoint, "replay_endpoint": source.replay}
    return json.dumps(config)


async def tiers_are_told_apart(world: Followed) -> None:
    engine, tokens, longer = world.engine, prompt(200), prompt(333)
    assert expected(world.both, tokens) == NOTHING
    assert await world.generate(tokens) == 0
    await world.come_to(world.both, tokens, {Tier.GPU: 192})
    await world.come_to(world.cache, tokens, {Tier.DRAM: 192})
    assert await world.generate(tokens) == 192

    engine.flush()
    await world.come_to(world.both, tokens, {Tier.DRAM: 192})
    assert expected(world.both, longer) == {**NOTHING, Tier.DRAM: 192}
    assert await world.generate(longer) == 192
    await world.come_to(world.both, longer, {Tier.GPU: 320})
    await world.come_to(world.cache, longer, {Tier.DRAM: 320})

    engine.flush()
    linker_of(engine).cache.manager.clear("CPU")
    for router in (world.both, world.cache):
        await world.come_to(router, longer, {Tier.DISK: 320})
    assert await world.generate(longer) == 320


async def salts_are_kept_apart(world: Followed) -> None:
    tokens = prompt(120, seed=5)
    assert await world.generate(tokens, cache_salt="alice") == 0
    await world.come_to(world.both, tokens, {Tier.GPU: 112}, cache_salt="alice")
    await world.come_to(world.cache, tokens, {Tier.DRAM: 112}, cache_salt="alice")
    for router in (world.both, world.cache):
        for salt in (None, "bob"):
            assert expected(router, tokens, cache_salt=salt) == NOTHING
    assert await world.generate(tokens, cache_salt="bob") == 0
    assert await world.generate(tokens, cache_salt="alice") == 112


def check_metrics(engine: TinyEngine) -> None:
    """SGLang's metrics have our counters, as they were at most a second ago; and what the router
    assumes an engine without events to hold."""
    from prometheus_client import REGISTRY, generate_latest

    capacities = list(parse_capacities(generate_latest(REGISTRY).decode()))
    assert capacities == [Capacity(None, engine.scheduler.max_total_num_tokens // PAGE, PAGE)]
    labels = engine.scheduler.metrics_reporter.metrics_collector.labels
    labels = {name: str(value) for name, value in labels.items()}
    hits = manager_of(engine).stats()["engine"]["hit_blocks"]
    for tier, name in (("CPU", "dram"), ("SSD", "ssd")):
        assert hits[tier]
        counter = (f"sglang:flexcache_{name}_hit_tokens_total", labels)
        deadline_s = time.monotonic() + PATIENCE_S
        while (REGISTRY.get_sample_value(*counter) or 0) < PAGE * hits[tier]:
            assert time.monotonic() < deadline_s, hits
            engine.generate(prompt(20), 1)


def check_linker(directory: str) -> None:
    engine = engine_with_events(directory)

    async def run() -> None:
        async with followed(engine, directory) as world:
            await tiers_are_told_apart(world)
            await salts_are_kept_apart(world)
        check_metrics(engine)

    asyncio.run(run())


def test_what_tree_and_tiers_hold_is_predicted(tmp_path: Path) -> None:
    apart(check_linker, str(tmp_path))


def check_storage(directory: str) -> None:
    trees, ours = sources(directory)
    engine = engine_with_storage(
        "page_first_direct",
        kv_events_config=publisher(trees),
        flexcache={"kv_events_endpoint": ours.endpoint, "kv_events_replay_endpoint": ours.replay},
    )
    tokens = prompt(200)

    async def run() -> None:
        async with predicting(engine=(trees, ours)) as router:
            world = Followed(engine, router, router)
            engine.generate(tokens)
            settle_storage(engine)
            await world.come_to(router, tokens, {Tier.GPU: 192})
            engine.flush()  # HiCache's host pool, too
            await world.come_to(router, tokens, {Tier.DRAM: 192})
            assert engine.generate(tokens).cached_tokens_storage == 192
            settle_storage(engine)
            engine.flush()
            manager_below(engine).reset()
            await world.come_to(router, tokens, {})

    asyncio.run(run())


@pytest.mark.whole
def test_what_is_stored_below_hicache_is_known_by_its_name(tmp_path: Path) -> None:
    """HiCache names pages without their tokens, which its own events have."""
    apart(check_storage, str(tmp_path))
