"""A real vLLM engine whose KV is in a fake GPU's memory: FlexCache's copies land late."""

from __future__ import annotations

import os
from typing import Any

import preloaded
import pytest
import vllm_on_fake_gpu
from engines import make_prompt
from paths import MODELS

pytestmark = pytest.mark.whole


BLOCK, NUM_LAYERS = 32, 4
LENGTHS = (500, 333, 65)
PROMPTS = [make_prompt(length, seed + 7001) for seed, length in enumerate(LENGTHS)]
CACHED = [length // BLOCK * BLOCK for length in LENGTHS]
NUM_BLOCKS = sum(CACHED) // BLOCK
TIMEOUT_S = 400.0


def in_engine_process(function: Any, *arguments: Any) -> Any:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return preloaded.call("vllm_imports", environment, TIMEOUT_S, function, PROMPTS, *arguments)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    from make_models import make_model

    make_model(MODELS, vllm_on_fake_gpu.MODEL)
    tokens: list[list[int]] = in_engine_process(vllm_on_fake_gpu.serve_alone)
    return tokens


@pytest.fixture(scope="module", params=["layers apart", "blocks in one piece"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(alone: list[list[int]], layout: str) -> dict[str, Any]:
    in_one_piece = layout == "blocks in one piece"
    seen: dict[str, Any] = in_engine_process(vllm_on_fake_gpu.serve_on_fake_gpu, in_one_piece)
    return seen


@pytest.mark.parametrize("loads", ["not cached", "between steps", "by layer"])
def test_tokens_are_those_of_vllm_alone(
    alone: list[list[int]], seen: dict[str, Any], loads: str
) -> None:
    assert seen[loads]["tokens"] == alone
    assert seen[loads]["cached"] == ([0, 0, 0] if loads == "not cached" else CACHED)


def test_every_block_comes_back_byte_for_byte_both_ways(seen: dict[str, Any]) -> None:
    assert seen["probes"] == {
        "ranks": 1, "loaded": 2 * NUM_BLOCKS, "by_layer": NUM_BLOCKS, "different": []
    }  # fmt: skip


def test_layers_come_one_by_one_on_the_urgent_stream_and_otherwise_as_few_copies(
    seen: dict[str, Any], layout: str
) -> None:
    most = NUM_BLOCKS * (NUM_LAYERS if layout == "layers apart" else 1)
    assert seen["between steps"]["num_copies"] <= most
    assert seen["between steps"]["num_urgent"] == 0
    assert seen["by layer"]["num_urgent"] == NUM_LAYERS * len(PROMPTS)


def test_nothing_is_copied_to_memory_that_was_taken_away_and_what_was_lost_is_computed(
    alone: list[list[int]], seen: dict[str, Any]
) -> None:
    assert seen["asleep"] == {"tokens": alone[0], "written": 0}


def test_without_the_wait_for_each_layer_the_tokens_are_wrong(
    alone: list[list[int]], seen: dict[str, Any]
) -> None:
    """The negative control: the model computes before the copies have landed."""
    assert seen["without waiting"]["cached"] == CACHED
    assert seen["without waiting"]["tokens"] != alone


def test_a_put_has_what_its_step_writes_late(alone: list[list[int]]) -> None:
    """And without its wait for the compute stream it has not: the negative control."""
    late, unwaited = in_engine_process(vllm_on_fake_gpu.serve_late_writes)
    assert late == {"tokens": alone[0], "cached": CACHED[0]}
    assert unwaited["cached"] == CACHED[1]
    assert unwaited["tokens"] != alone[1]
