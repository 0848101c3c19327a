"""Puts by reference while vLLM runs out of GPU blocks, aborts, resets, and processes die.

In float32, since in bfloat16 another schedule already gives other tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from paths import MODELS
from probe_connector import compare_probes

pytestmark = [pytest.mark.whole, pytest.mark.runners]


NUM_GENERATED = 150
STEPS_LATE = 3
PREEMPTIONS = "vllm:num_preemptions"
PROMPTS = [make_prompt(200, 70 + i) for i in range(6)]
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 40,
    "kv_cache_memory_bytes": 32 << 20,
    "seed": 0,
}


@pytest.fixture(scope="module", autouse=True)
def _models() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


def pressed(tmp_path: Path, config: dict[str, Any], **engine: Any) -> DrivenEngine:
    settings = Settings(
        "FlexCache", "tiny", dram_gb=None, more=config, engine={**ENGINE, **engine},
        probe_dir=str(tmp_path), num_threads=1,
    )  # fmt: skip
    return DrivenEngine(settings, tmp_path / "log")


def assert_all_free(engine: DrivenEngine) -> None:
    blocks = engine.gpu_blocks()
    assert blocks["free"] == blocks["all"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrivenEngine]:
    path = tmp_path_factory.mktemp("pressed")
    ssd = {"ssd_cache_gb": 0.1, "ssd_cache_dirs": [str(path)], "skip_slow_loads": False}
    with running(pressed(path, {"num_cpu_blocks": 512, **ssd})) as made:
        yield made


@pytest.fixture(scope="module")
def alone(engine: DrivenEngine) -> dict[int, list[int]]:
    """What the engine answers without a connector."""
    tokens = engine.answers(PROMPTS, NUM_GENERATED, without="cache")
    assert engine.metric(PREEMPTIONS) > 0
    return tokens


def test_preemptions(engine: DrivenEngine, alone: dict[int, list[int]]) -> None:
    before = engine.metric(PREEMPTIONS)
    for _ in range(2):
        engine.forget("GPU")
        assert engine.answers(PROMPTS, NUM_GENERATED) == alone
        assert_all_free(engine)
    assert engine.metric(PREEMPTIONS) > before
    assert engine.stats()["engine"]["hit_blocks"]["CPU"] > 0
    assert compare_probes(Path(engine.settings.probe_dir or ""))["different"] == []


def test_late_copies_aborts_and_resets(engine: DrivenEngine, alone: dict[int, list[int]]) -> None:
    engine.open_gates_late(STEPS_LATE)
    assert engine.answers(PROMPTS, NUM_GENERATED) == alone
    assert_all_free(engine)
    aborted = [1, 4]
    engine.forget("GPU")
    kept = {i: tokens for i, tokens in alone.items() if i not in aborted}
    assert engine.answers(PROMPTS, NUM_GENERATED, aborted=aborted) == kept
    assert_all_free(engine)
    assert engine.answers(PROMPTS, NUM_GENERATED, resets=True) == alone
    assert_all_free(engine)
    assert compare_probes(Path(engine.settings.probe_dir or ""))["different"] == []
    disk = engine.stats()["workers"]["disk"]
    engine.forget("DRAM")
    assert engine.answers(PROMPTS, NUM_GENERATED, kill=disk) == alone
    assert_all_free(engine)


def test_a_server_killed_while_blocks_are_pinned(
    tmp_path: Path, alone: dict[int, list[int]]
) -> None:
    endpoint = f"ipc://{tmp_path}/cache.sock"
    server = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server"],
        env={**os.environ, "FLEXCACHE_ENDPOINT": endpoint, "FLEXCACHE_CPU_CACHE_GB": "0.2"},
        stdout=(tmp_path / "cache.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        with running(pressed(tmp_path, {"endpoint": endpoint})) as engine:
            engine.open_gates_late(STEPS_LATE)
            assert engine.answers(PROMPTS, NUM_GENERATED, kill=server.pid) == alone
            assert server.wait() != 0
            assert_all_free(engine)
            assert engine.answers(PROMPTS, NUM_GENERATED) == alone
            assert_all_free(engine)
    finally:
        server.kill()
        server.wait()
    assert compare_probes(tmp_path)["different"] == []


def test_tokens_that_were_only_drafted_are_not_stored(tmp_path: Path) -> None:
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    made = pressed(
        tmp_path, {"num_cpu_blocks": 512}, num_gpu_blocks_override=200, speculative_config=drafts
    )
    with running(made) as engine:
        answers = engine.answers(PROMPTS, NUM_GENERATED)
        assert engine.metric("vllm:spec_decode_num_draft_tokens") > 0
        turns = [prompt + answers[i] + prompt[:20] for i, prompt in enumerate(PROMPTS)]
        engine.forget("GPU")
        seen = engine.answers(turns, 30)
        blocks = (200 + NUM_GENERATED - 1) // 32
        assert engine.stats()["engine"]["hit_blocks"]["CPU"] == len(turns) * blocks
        engine.forget("GPU")
        assert engine.answers(turns, 30, without="cache") == seen
        assert_all_free(engine)
    assert compare_probes(tmp_path)["different"] == []
