"""A restarted vLLM engine finds on SSD what it had stored, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import second_runner
from driven_engine import driven_engines
from engines import make_prompt
from paths import MODELS
from probe_connector import compare_probes

pytestmark = pytest.mark.runners
NUM_TOKENS = 700
NUM_BLOCKS = 21  # whole blocks of 32; the last token is left to compute
CACHED = NUM_BLOCKS * 32


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


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
