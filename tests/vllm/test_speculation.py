"""Drafts and adapters in real engines: their KV comes back, and belongs to them alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from make_models import make_adapter, make_draft
from paths import MODELS
from probe_connector import compare_probes

pytestmark = pytest.mark.runners
PROMPT = make_prompt(700, 1)
BLOCKS = 21  # whole blocks of 32
CACHED = BLOCKS * 32


@contextmanager
def engine_with(tmp_path: Path, **engine: Any) -> Iterator[DrivenEngine]:
    """An engine that computes with 32 bits: other steps then give equal tokens."""
    common = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
    }  # fmt: skip
    probe = tmp_path / "probe"
    probe.mkdir()
    settings = Settings(
        "FlexCache", "tiny", str(tmp_path / "ssd"), dram_gb=0.1, engine={**common, **engine},
        num_threads=1, probe_dir=str(probe),
        more={"skip_slow_loads": False, "answer_interval_tokens": 32},
    )  # fmt: skip
    with running(DrivenEngine(settings, tmp_path / "log")) as driven:
        yield driven


def speculation(method: str) -> dict[str, Any]:
    if method == "eagle":
        return {"method": "eagle", "model": str(make_draft(MODELS)), "num_speculative_tokens": 2}
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"method": "ngram", "num_speculative_tokens": 3, **lookup}


@pytest.mark.parametrize("method", ["eagle", pytest.param("ngram", marks=pytest.mark.whole)])
def test_a_prompt_and_its_answer_come_back_with_drafts_under_way(
    method: str, tmp_path: Path
) -> None:
    with engine_with(tmp_path, speculative_config=speculation(method)) as engine:
        cold, cached = engine.generate(PROMPT, 100)
        assert cached == 0
        engine.settle()
        assert engine.metric("vllm:spec_decode_num_draft_tokens") > 0
        second = PROMPT + cold + PROMPT[:50]
        whole = len(PROMPT + cold) // 32 * 32
        for tier in ("GPU", "DRAM"):
            engine.forget(tier)
            assert engine.generate(PROMPT, 100) == (cold, CACHED)
        engine.forget("GPU")
        alone = engine.answers([second], 8, without="cache")[0]
        engine.forget("GPU")
        expected, cached = engine.generate(second)
        assert expected == alone
        assert whole - 32 <= cached <= whole  # the last step's tokens may not have been computed
        engine.forget("DRAM")
        assert engine.generate(second) == (expected, len(second) // 32 * 32)
        num_loaded = 2 * BLOCKS + cached // 32 + len(second) // 32
        assert sum(engine.stats()["hit_blocks"].values()) == num_loaded
    seen = compare_probes(tmp_path / "probe")
    assert seen["different"] == []
    assert seen["loaded"] == num_loaded


@pytest.mark.whole
def test_adapters_have_blocks_of_their_own(tmp_path: Path) -> None:
    adapters = [None, str(make_adapter(MODELS, 1)), str(make_adapter(MODELS, 2))]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine_with(tmp_path, **lora) as engine:
        cold = []
        for adapter in adapters:
            tokens, cached = engine.generate(PROMPT, adapter=adapter)
            assert cached == 0
            cold.append(tokens)
        assert len(set(map(tuple, cold))) == 3
        engine.settle()
        assert engine.stats()["tiers"]["CPU"]["indexed"] == 3 * (BLOCKS + 1)  # with the answer's
        for tier in ("GPU", "DRAM"):
            engine.forget(tier)
            answers = [engine.generate(PROMPT, adapter=adapter) for adapter in adapters]
            assert answers == [(tokens, CACHED) for tokens in cold]
        assert engine.stats()["hit_blocks"] == {"CPU": 3 * BLOCKS, "SSD": 3 * BLOCKS}
    seen = compare_probes(tmp_path / "probe")
    assert seen["different"] == []
    assert seen["loaded"] == 6 * BLOCKS
