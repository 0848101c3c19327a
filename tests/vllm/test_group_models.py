"""Models with windows, chunks and states beside full attention, in a real vLLM engine.

Each keeps its groups and all its GPU blocks, answers the same wherever its KV comes from, and gets
back the bytes of each layer that were stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
    pytest.mark.newest,
]
KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Model:
    """A model, and what vLLM does with it when it is alone.

    Attributes:
        position: Tokens between the positions where prefixes can end.
        num_blocks: GPU blocks that it has in `KV_BYTES`.
    """

    name: str
    position: int
    num_blocks: int
    dtype: str = "float32"


MODELS = [
    Model("gemma3", 128, 256),
    Model("hybrid", 128, 256),
    Model("two_sizes", 256, 128),
    Model("gptoss", 128, 256),
    Model("llama4", 128, 512),
    Model("qwen3next", 256, 256, "bfloat16"),
    Model("nemotronh", 256, 128),
    Model("granite4", 256, 128),
    Model("falconh1", 256, 64),
    Model("mamba2", 16, 119),
]


def engine_of(model: Model, directory: Path, probes: Path | None, **more: Any) -> DrivenEngine:
    config = {
        "cpu_cache_gb": 0.2, "ssd_cache_gb": 0.2, "ssd_cache_dirs": [str(directory / "ssd")],
        "skip_slow_loads": False, **more,
    }  # fmt: skip
    engine = {
        "dtype": model.dtype, "max_model_len": 2048, "kv_cache_memory_bytes": KV_BYTES, "seed": 0,
        "enable_prefix_caching": True,
        "mamba_ssm_cache_dtype": "float32",  # else it, and so the position, depends on the CPU
    }  # fmt: skip
    settings = Settings(
        "FlexCache", model.name, dram_gb=None, more=config, engine=engine,
        probe_dir=None if probes is None else str(probes), num_threads=1, has_groups=True,
    )  # fmt: skip
    return DrivenEngine(settings, directory / "log")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_it_answers_the_same_from_every_tier_and_after_a_restart(
    model: Model, tmp_path: Path
) -> None:
    prompt = make_prompt(1200, 1)
    longer = prompt + make_prompt(500, 2)
    hit = 1199 // model.position * model.position
    probes = tmp_path / "probes"
    probes.mkdir()
    with running(engine_of(model, tmp_path, probes)) as engine:
        assert engine.gpu_blocks()["all"] == model.num_blocks - 1  # one is vLLM's null block
        cold, cached = engine.generate(prompt)
        assert cached == 0
        engine.forget("GPU")
        assert engine.generate(prompt) == (cold, hit)
        assert engine.stats()["hit_blocks"] == {"CPU": hit // model.position}
        cold_longer, cached = engine.generate(longer)
        assert cached == hit
        engine.forget("DRAM")
        assert engine.generate(prompt) == (cold, hit)
        assert engine.stats()["hit_blocks"]["SSD"] == hit // model.position
        engine.settle()
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    with running(engine_of(model, tmp_path, probes)) as engine:
        assert engine.generate(prompt) == (cold, hit)
        answer, cached = engine.generate(longer)
        assert answer == cold_longer
        assert cached == 1699 // model.position * model.position
    seen = compare_probes(probes)
    assert seen["different"] == []
    assert seen["loaded"] > 0
