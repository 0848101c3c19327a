"""Where prompts of a model with windows resume: the next turn of a chat, and shared prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only")
POSITION = 128
NUM_ANSWER = 400


@pytest.mark.parametrize("interval", [POSITION, pytest.param(None, marks=pytest.mark.whole)])
def test_the_next_turn_and_shared_prefixes(interval: int | None, tmp_path: Path) -> None:
    config = {"cpu_cache_gb": 0.5, "tail_interval_tokens": interval}
    engine_options = {
        "dtype": "float32", "max_model_len": 4096, "kv_cache_memory_bytes": 128 << 20, "seed": 0,
        "enable_prefix_caching": True,
    }  # fmt: skip
    settings = Settings(
        "FlexCache", "gemma3", dram_gb=None, more=config, engine=engine_options,
        probe_dir=str(tmp_path), num_threads=1, has_groups=True,
    )  # fmt: skip
    with running(DrivenEngine(settings, tmp_path / "log")) as engine:
        prompt = make_prompt(1200, 1)
        answer = engine.ask(prompt, NUM_ANSWER)["tokens"]
        turn = prompt + answer + make_prompt(50, 2)
        engine.forget("GPU")
        seen = engine.ask(turn)
        assert seen["cached"] == (1200 + NUM_ANSWER - 1) // POSITION * POSITION
        engine.forget("DRAM")
        assert engine.ask(turn)["tokens"] == seen["tokens"]

        long = make_prompt(3000, 3)
        engine.ask(long)
        for num_shared in (600, 1400, 2800):
            engine.forget("GPU")
            unlike = long[:num_shared] + make_prompt(40, num_shared)
            every = interval or 1024  # four windows
            assert engine.ask(unlike)["cached"] == num_shared // every * every
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    assert compare_probes(tmp_path)["different"] == []
