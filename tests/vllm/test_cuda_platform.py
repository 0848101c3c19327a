"""vLLM's CUDA wheel on a fake GPU, with what it chooses on an H100: second model runner,
asynchronous scheduling, KV layout, compiled model and graphs. See `cuda_on_host` for what is not
real there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import second_runner
from paths import ROOT, SUPPORT
from vllm_on_cuda_platform import ALONE, LENGTHS

CUDA_VLLM = os.environ.get("CUDA_VLLM_PATH")
"""Where vLLM's CUDA wheel is unpacked, without its libraries; `scripts/test.sh` sees to it."""

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(
        not (CUDA_VLLM and second_runner.is_installed()),
        reason="CUDA_VLLM_PATH names no vLLM, or there is no Triton (scripts/test.sh fetches)",
    ),
]

BLOCK = 16  # that vLLM chooses on CUDA
NUM_BLOCKS = [(length - 1) // BLOCK for length in LENGTHS]
CACHED = [BLOCK * blocks for blocks in NUM_BLOCKS]
NUM_TOKENS = 8
TIMEOUT_S = 900.0
EAGER = {"enforce_eager": True}
GRAPHS = {"enforce_eager": False}

ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "eager": ({"flexcache": {}, "engine": EAGER}, "NONE"),
    "graphs": ({"flexcache": {}, "engine": GRAPHS}, "FULL_AND_PIECEWISE"),
    "graphs, always by layer": (
        {"flexcache": {"layerwise_load": "on"}, "engine": GRAPHS}, "PIECEWISE"
    ),
}  # fmt: skip


def run(options: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join([CUDA_VLLM or "", str(SUPPORT), str(ROOT)])
    arguments = [str(SUPPORT / "cuda_on_host.py"), "vllm_on_cuda_platform", json.dumps(options)]
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found and not done.returncode, f"the engine failed:\n{done.stdout[-6000:]}"
    seen: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return seen


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What vLLM generates without a KV connector."""
    tokens: list[list[int]] = run({"flexcache": None, "engine": EAGER})["cold"]["tokens"]
    return tokens


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(engine: str) -> dict[str, Any]:
    return run(ENGINES[engine][0])


def test_what_runs_is_what_vllm_chooses_on_a_gpu(engine: str, seen: dict[str, Any]) -> None:
    assert seen["vllm"] == {
        "version": "0.32.0", "directory": f"{CUDA_VLLM}/vllm", "device": "cuda",
        "runner": "vllm.v1.worker.gpu.model_runner", "is_asynchronous": True,
        "backends": ["FLASH_ATTN"], "layout": "BLNHC", "graphs": ENGINES[engine][1],
    }  # fmt: skip


@pytest.mark.parametrize("tier", ["cold", "GPU", "DRAM", "SSD"])
def test_tokens_from_each_tier_are_those_of_vllm_alone(
    alone: list[list[int]], seen: dict[str, Any], tier: str
) -> None:
    assert seen[tier]["tokens"] == alone
    assert seen[tier]["cached"] == ([0, 0, 0] if tier == "cold" else CACHED)
    num_read = sum(n for op, n in seen[tier]["moved"].items() if op.startswith("DISK2"))
    assert num_read == (sum(NUM_BLOCKS) if tier == "SSD" else 0)


def test_every_block_comes_back_byte_for_byte_from_dram_within_the_step(
    seen: dict[str, Any],
) -> None:
    in_steps = sum(NUM_BLOCKS) + NUM_BLOCKS[ALONE]
    assert seen["probes"] == {
        "ranks": 1, "loaded": in_steps + sum(NUM_BLOCKS), "by_layer": in_steps, "different": []
    }  # fmt: skip


def test_a_load_comes_before_a_graph_of_the_whole_model(
    alone: list[list[int]], engine: str, seen: dict[str, Any]
) -> None:
    assert seen["DRAM, alone"]["tokens"] == [alone[ALONE]]
    assert seen["DRAM, alone"]["cached"] == [CACHED[ALONE]]
    whole = {"graphs": NUM_TOKENS}.get(engine, 0)  # the first step, which loads, as well
    assert seen["DRAM, alone"]["replays"].get("whole", 0) == whole
    assert ("piece" in seen["DRAM"]["replays"]) is (engine != "eager")


def test_without_the_wait_for_copies_the_tokens_are_wrong(
    alone: list[list[int]], seen: dict[str, Any]
) -> None:
    """The negative control: the model computes before the copies have landed."""
    assert seen["without waiting"]["cached"] == [CACHED[ALONE]]
    assert seen["without waiting"]["tokens"] != [alone[ALONE]]
