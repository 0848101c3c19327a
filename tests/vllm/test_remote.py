"""Two real vLLM engines, each with its own cache, share blocks through a remote store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, driven_engines
from engines import make_prompt
from paths import MODELS
from probe_connector import compare_probes
from stores import PATIENT, store_at

pytestmark = pytest.mark.whole


NUM_TOKENS = 700
NUM_BLOCKS = 21  # whole blocks of 32; the last token is left to compute
CACHED = NUM_BLOCKS * 32


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


def until_it_stores(engine: DrivenEngine, first_seed: int) -> None:
    """Generate until the store, which connects in the background, has taken something."""
    for seed in range(first_seed, first_seed + 200):
        if engine.stats()["tiers"]["REMOTE"]["stored_blocks"]:
            return
        engine.generate(make_prompt(70, seed))
        engine.settle()
    raise AssertionError(engine.stats()["remote"])


@pytest.mark.parametrize("kind", ["mooncake", "s3", "file"])
def test_one_engine_loads_what_the_other_has_stored(kind: str, tmp_path: Path) -> None:
    probe_dir = tmp_path / "probe"
    probe_dir.mkdir()

    def config(name: str, url: str) -> dict[str, Any]:
        return {
            "num_cpu_blocks": 192,
            "num_ssd_blocks": 512,
            "ssd_cache_dirs": [str(tmp_path / name)],
            "remote_url": url,
            **PATIENT,
            "skip_slow_loads": False,
        }

    with (
        store_at(kind, tmp_path) as url,
        driven_engines(
            config("one", url), config("two", url), probe_dir=probe_dir, log=tmp_path / "log"
        ) as (one, two),
    ):
        until_it_stores(one, first_seed=100)
        until_it_stores(two, first_seed=300)
        for seed, (giver, taker) in enumerate([(one, two), (two, one)], 1):
            prompt = make_prompt(NUM_TOKENS, seed)
            cold, cached = giver.generate(prompt)
            assert cached == 0
            giver.settle()
            assert taker.generate(prompt) == (cold, CACHED)
            assert taker.stats()["hit_blocks"] == {"REMOTE": NUM_BLOCKS}
            other = prompt[:300] + make_prompt(200, 90 + seed)
            cold, _ = giver.generate(other)
            giver.settle()
            assert taker.generate(other) == (cold, 480)  # nine blocks were on its GPU
            assert taker.stats()["hit_blocks"] == {"REMOTE": NUM_BLOCKS + 6}
    seen = compare_probes(probe_dir)
    assert seen["different"] == []
    assert seen["loaded"] == 2 * (NUM_BLOCKS + 6)
