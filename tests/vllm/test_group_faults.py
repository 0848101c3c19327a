"""Models with several KV cache groups: a damaged part is noticed, a lost disk worker is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import until
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
]
NUM_GENERATED = 40
PROMPTS = [make_prompt(800 + 130 * i, 90 + i) for i in range(4)]


def settings(model: str, probes: Path, config: dict[str, Any], **engine: Any) -> Settings:
    arguments = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "enable_prefix_caching": True,
        **engine,
    }  # fmt: skip
    return Settings(
        "FlexCache", model, dram_gb=None, more=config, engine=arguments, probe_dir=str(probes),
        num_threads=1, has_groups=True,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["gemma3", "nemotronh"])
def test_a_disk_worker_that_is_killed_under_load_costs_no_answer(
    model: str, tmp_path: Path
) -> None:
    ssd = {"ssd_cache_gb": 0.2, "ssd_cache_dirs": [str(tmp_path)], "skip_slow_loads": False}
    made = DrivenEngine(settings(model, tmp_path, {"cpu_cache_gb": 0.2, **ssd}), tmp_path / "log")
    with running(made) as engine:
        alone = engine.answers(PROMPTS, NUM_GENERATED, without="cache")
        engine.forget("GPU")
        disk = engine.stats()["workers"]["disk"]
        assert engine.answers(PROMPTS, NUM_GENERATED, kill=disk) == alone
        until(lambda: engine.stats()["tiers"]["SSD"]["available"])
        assert engine.stats()["workers"]["disk"] != disk
        for _ in range(2):  # what was lost is stored again
            engine.forget("DRAM")
            assert engine.answers(PROMPTS, NUM_GENERATED) == alone
        assert engine.stats()["engine"]["hit_blocks"]["SSD"] > 0
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    assert compare_probes(tmp_path)["different"] == []


@pytest.mark.parametrize(
    ("model", "num_groups"), [("gemma3", 3), ("llama4", 4), ("qwen3next", 2), ("mamba2", 1)]
)
def test_a_byte_of_any_group_that_changes_in_dram_is_seen(
    model: str, num_groups: int, tmp_path: Path
) -> None:
    dtype = "bfloat16" if model == "qwen3next" else "float32"
    made = settings(model, tmp_path, {"cpu_cache_gb": 0.1}, dtype=dtype)
    with running(DrivenEngine(made, tmp_path / "log")) as engine:
        prompt = PROMPTS[1]  # not to the edge of a chunk, where no chunked group needs anything
        engine.generate(prompt)
        for group in range(num_groups):
            engine.forget("GPU")
            engine.damage_loads(group)
            engine.generate(prompt)
    different = compare_probes(tmp_path)["different"]
    groups = {int(key.split("/")[1]) for _, key in different}
    assert groups == set(range(num_groups))
