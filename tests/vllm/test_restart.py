"""What an engine stores is found again byte for byte: on SSD, and by another in a remote store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import second_runner
from driven_engine import DrivenEngine, driven_engines
from engines import make_prompt
from paths import MODELS
from probe_connector import compare_probes
from stores import PATIENT, store_at

NUM_TOKENS = 700
NUM_BLOCKS = 21  # whole blocks of 32; the last token is left to compute
CACHED = NUM_BLOCKS * 32


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


@pytest.mark.runners
def test_a_killed_and_a_stopped_engine_find_their_ssd_cache_again(tmp_path: Path) -> None:
    probe_dir = tmp_path / "probe"
    probe_dir.mkdir()
    config = {
        "num_cpu_blocks": 128,
        "num_ssd_blocks": 512,
        "ssd_cache_dirs": [str(tmp_path / "ssd")],
        "skip_slow_loads": False,
    }
    life = {"probe_dir": probe_dir, "log": tmp_path / "log"}
    stored, late, after = (make_prompt(NUM_TOKENS, seed) for seed in (1, 2, 3))

    with driven_engines(config, **life) as (engine,):
        cold, cached = engine.generate(stored)
        assert cached == 0
        engine.settle()
        cold_late, _ = engine.generate(late)
        engine.generate(make_prompt(40, 4))  # its steps begin the put of the late one
        engine.kill()

    with driven_engines(config, **life) as (engine,):
        assert engine.generate(stored) == (cold, CACHED)
        assert engine.stats()["hit_blocks"] == {"SSD": NUM_BLOCKS}
        block_bytes = engine.stats()["block_bytes"]
        assert engine.stats()["tiers"]["SSD"]["read_bytes"] == NUM_BLOCKS * block_bytes
        assert engine.generate(late)[0] == cold_late  # however much of it got there
        runs_second = "Using V2 Model Runner" in (tmp_path / "log").read_text()
        assert runs_second is not second_runner.is_first()
        cold_after, cached = engine.generate(after)
        assert cached == 0
        engine.settle()

    with driven_engines(config, **life) as (engine,):
        for prompt, cold_tokens in ((stored, cold), (late, cold_late), (after, cold_after)):
            assert engine.generate(prompt) == (cold_tokens, CACHED)
        assert engine.stats()["hit_blocks"] == {"SSD": 3 * NUM_BLOCKS}

    seen = compare_probes(probe_dir)
    assert seen["different"] == []
    assert seen["loaded"] >= 4 * NUM_BLOCKS


@pytest.mark.runners
@pytest.mark.whole
def test_an_engine_without_a_dram_tier_is_killed_and_finds_its_ssd_cache_again(
    tmp_path: Path,
) -> None:
    probe_dir = tmp_path / "probe"
    probe_dir.mkdir()
    config = {
        "num_cpu_blocks": 0,
        "num_ssd_blocks": 64,
        "ssd_cache_dirs": [str(tmp_path / "ssd")],
        "skip_slow_loads": False,
    }
    life = {"probe_dir": probe_dir, "log": tmp_path / "log"}
    prompt = make_prompt(NUM_TOKENS, seed=1)
    with driven_engines(config, **life) as (engine,):
        cold, cached = engine.generate(prompt)
        assert cached == 0
        engine.settle()
        engine.kill()
    with driven_engines(config, **life) as (engine,):
        assert engine.generate(prompt) == (cold, CACHED)
        assert engine.stats()["ops"]["DISK2D"]["blocks"] == NUM_BLOCKS
    seen = compare_probes(probe_dir)
    assert seen["different"] == []
    assert seen["loaded"] == NUM_BLOCKS


# -- another engine, through a remote store --------------------------------------------------------


def until_it_stores(engine: DrivenEngine, first_seed: int) -> None:
    """Generate until the store, which connects in the background, has taken something."""
    for seed in range(first_seed, first_seed + 200):
        if engine.stats()["tiers"]["REMOTE"]["stored_blocks"]:
            return
        engine.generate(make_prompt(70, seed))
        engine.settle()
    raise AssertionError(engine.stats()["remote"])


@pytest.mark.whole
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
