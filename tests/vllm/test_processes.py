"""Real vLLM topologies, each in its own processes, and more than one vLLM version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import run_scenario
from paths import MODELS, ROOT, SUPPORT

pytestmark = pytest.mark.whole


OLD_VLLM = os.environ.get("OLD_VLLM_PATH")
"""Where an older vLLM (0.28) is unpacked; `scripts/test.sh` sees to it."""
TIMEOUT_S = 400.0


def run(options: dict[str, Any], *, in_process: bool = False) -> Any:
    """Return what is seen of an engine with these options, see `run_scenario`."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
    return preloaded.call("vllm_imports", environment, TIMEOUT_S, run_scenario.main, options)


def run_old(options: dict[str, Any]) -> Any:
    """Do the same with the older vLLM."""
    path = os.pathsep.join([OLD_VLLM or "", str(SUPPORT), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "run_scenario.py"), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError(f"the engine did not answer:\n{done.stdout[-6000:]}")


@pytest.fixture(scope="module", autouse=True)
def _models() -> None:
    from make_models import make_model

    for name in ("tiny", "hybrid", "mla", "two_sizes"):
        make_model(MODELS, name)


def assert_exact(seen: Any, num_ranks: int, cached: list[int]) -> None:
    assert all(seen["tokens_equal"])
    assert seen["cached"] == cached
    assert seen["probes"]["different"] == []
    assert seen["probes"]["ranks"] == num_ranks
    assert seen["probes"]["loaded"] == sum(cached) // 32 * num_ranks


@pytest.mark.runners
@pytest.mark.parametrize("tp_size", [1, 2])
def test_scheduler_and_workers_in_separate_processes(tp_size: int) -> None:
    options = {
        "model": "tiny",
        "prompts": [700, 900, 800, 65, 64, 63],
        "cpu_blocks": 64,  # the first prompts must come back from SSD
        "settle": True,
        "engine": {"tensor_parallel_size": tp_size},
    }
    seen = run(options)
    assert_exact(seen, tp_size, [672, 896, 800, 64, 64, 32])
    assert seen["ssd_hit_tokens"] > 0


@pytest.mark.runners
@pytest.mark.parametrize("model", ["tiny", "two_sizes"])
def test_pipeline_stages_each_store_their_own_layers(model: str) -> None:
    options = {
        "model": model,
        "prompts": [65, 700, 900, 1000],
        "cpu_blocks": 72,  # not all of them
        "settle": True,
        "engine": {
            "pipeline_parallel_size": 2,
            "worker_extension_cls": "pp_eager.EagerStages",
            "disable_hybrid_kv_cache_manager": True,
        },
    }
    seen = run(options)
    assert_exact(seen, 2, [64, 672, 896, 992])
    assert seen["ssd_hit_tokens"] > 0
    assert seen["errors"] == []


@pytest.mark.runners
def test_preemption_under_a_small_pool_changes_nothing() -> None:
    options = {
        "model": "tiny",
        "prompts": [200] * 6,
        "max_tokens": 200,
        "together": True,
        "cpu_blocks": 512,
        "engine": {"num_gpu_blocks_override": 40, "max_model_len": 1024},
    }
    seen = run(options, in_process=True)
    assert seen["preemptions"] > 0
    assert all(seen["tokens_equal"])
    assert seen["probes"]["different"] == []
    assert seen["probes"]["loaded"] > 0


def test_a_hybrid_model_runs_with_all_layers_in_one_group() -> None:
    options = {
        "model": "hybrid",
        "prompts": [700, 33],
        "cpu_blocks": 512,
        "engine": {"disable_hybrid_kv_cache_manager": True},
    }
    assert_exact(run(options, in_process=True), 1, [672, 32])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_of_two_sizes_in_one_group_come_back_from_dram_and_ssd(tp_size: int) -> None:
    options = {
        "model": "two_sizes",
        "prompts": [65, 700, 900, 1000],
        "cpu_blocks": 72,  # not all of them
        "settle": True,
        "engine": {"tensor_parallel_size": tp_size, "disable_hybrid_kv_cache_manager": True},
    }
    seen = run(options, in_process=tp_size == 1)
    assert_exact(seen, tp_size, [64, 672, 896, 992])
    assert seen["ssd_hit_tokens"] > 0
    assert seen["dram_hit_tokens"] > 0


def test_latent_attention_blocks_come_back_byte_for_byte() -> None:
    # vLLM's CPU backend computes MLA differently in prefill and decode: tokens prove nothing there.
    # Its kernel for AMX takes blocks of 32 tokens, the other one of 16.
    block = 32 if "amx_tile" in _cpu_flags() else 16
    options = {
        "model": "mla",
        "prompts": [200, 100],
        "cpu_blocks": 512,
        "engine": {"block_size": block, "kv_cache_memory_bytes": 64 << 20},
    }
    seen = run(options, in_process=True)
    assert seen["probes"]["different"] == []
    assert seen["probes"]["loaded"] >= 200 // block + 100 // block - 2


def _cpu_flags() -> str:
    return Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif("avx512f" not in _cpu_flags(), reason="vLLM's fp8 KV on a CPU needs AVX-512")
def test_fp8_kv_comes_back_byte_for_byte() -> None:
    options = {
        "model": "tiny",
        "prompts": [300],
        "cpu_blocks": 512,
        "engine": {"kv_cache_dtype": "fp8"},
    }
    assert_exact(run(options, in_process=True), 1, [288])


@pytest.mark.skipif(not OLD_VLLM, reason="OLD_VLLM_PATH names no vLLM 0.28 (scripts/test.sh does)")
def test_the_oldest_supported_vllm_works_the_same() -> None:
    # Without settling, the reset would withdraw the last put, which is launched with the next step.
    options = {"model": "tiny", "prompts": [700, 65, 64], "cpu_blocks": 64, "settle": True}
    seen = run_old(options)
    assert seen["vllm"].startswith("0.28")
    assert_exact(seen, 1, [672, 64, 64])


@pytest.mark.skipif(not OLD_VLLM, reason="OLD_VLLM_PATH names no vLLM 0.28 (scripts/test.sh does)")
def test_the_oldest_supported_vllm_can_have_one_tensor_for_all_layers() -> None:
    path = os.pathsep.join([OLD_VLLM or "", str(SUPPORT), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "old_vllm_layers.py")],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.stdout.endswith("as expected\n"), done.stdout + done.stderr
