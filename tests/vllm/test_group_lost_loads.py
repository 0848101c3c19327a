"""A load that fails in a model with groups costs its request a recompute, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import HEADER_BYTES

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
    pytest.mark.runners,
]
HIT = 1024


def damage(path: Path) -> None:
    """Overwrite all slots of an SSD file."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(HEADER_BYTES)
        file.write(os.urandom(size - HEADER_BYTES))


@pytest.mark.parametrize("model", ["gemma3", "nemotronh"])
def test_a_load_with_bad_checksums(model: str, tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    config = {
        "cpu_cache_gb": 0.2, "ssd_cache_gb": 0.05, "ssd_cache_dirs": [str(ssd)],
        "skip_slow_loads": False,
    }  # fmt: skip
    engine_options = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "enable_prefix_caching": True,
    }  # fmt: skip
    settings = Settings(
        "FlexCache", model, dram_gb=None, more=config, engine=engine_options,
        probe_dir=str(tmp_path), num_threads=1, has_groups=True,
    )  # fmt: skip
    prompt = make_prompt(HIT + 2, 1)
    with running(DrivenEngine(settings, tmp_path / "log")) as engine:
        cold, _ = engine.generate(prompt)
        engine.forget("DRAM")
        damage(ssd / DATA_FILE)
        assert engine.generate(prompt)[0] == cold
        assert engine.stats()["engine"]["ended_tasks"]["get_failed"] == 1
        engine.forget("GPU")
        assert engine.generate(prompt) == (cold, HIT)  # it was computed and stored again
        engine.settle()
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    assert compare_probes(tmp_path)["different"] == []
