"""Two hundred updates of the weights with a full SSD tier: nothing grows, all tiers go on."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
from weighted_engine import TOKENS_PER_BLOCK, WeightedEngine, content_of

from flexcache import CacheConfig

NUM_UPDATES = 200
SETTLED = 20
"""Updates after which nothing may grow any more."""
PROMPTS = [f"{letter}bcdefgh" for letter in "klmnopqrstuv"]
NUM_BLOCKS = sum(map(len, PROMPTS))


def occupancy(engine: WeightedEngine) -> dict[str, float]:
    """The share of each tier that is free."""
    tiers = engine.manager.stats()["tiers"]
    return {name: tier["free"] / tier["capacity"] for name, tier in tiers.items()}


def memory_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["own names", "given names", "resets"])
def test_nothing_grows(kind: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    config = CacheConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        num_cpu_blocks=NUM_BLOCKS,
        num_ssd_blocks=2 * NUM_BLOCKS,
        ssd_cache_dirs=[str(tmp_path)],
    )
    engine = WeightedEngine(config, "own")
    free: dict[int, dict[str, float]] = {}
    memory: dict[int, float] = {}
    try:
        engine.wait_ready()
        for number in range(1, NUM_UPDATES + 1):
            version = f"step-{number}" if kind == "given names" else None
            engine.update(f"weights {number}", version)
            if kind == "resets":
                engine.manager.reset()
            for prompt in PROMPTS:
                assert engine.put(prompt)[0].all()
            engine.manager.clear("CPU")
            assert [engine.get(prompt) for prompt in PROMPTS] == [len(p) for p in PROMPTS]
            content_of.cache_clear()
            if number in (SETTLED, NUM_UPDATES):
                free[number], memory[number] = occupancy(engine), memory_mb()
        engine.manager.check()
    finally:
        engine.close()
    if kind != "resets":
        assert free[SETTLED]["SSD"] == 0.0, "it is to be full"
    for tier, share in free[NUM_UPDATES].items():
        assert abs(share - free[SETTLED][tier]) <= 0.02
    growth = memory[NUM_UPDATES] - memory[SETTLED]
    record_property("growth_mb", growth)
    print(f"{kind}: {growth:+.1f} MB, free {free}")
    assert growth < 20.0
