"""Models with drafts in a real SGLang engine, with FlexCache behind its tree."""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import TinyEngine, apart, forget_gpu, linker_options, manager_of, prompt

NUM_NEW = 32
NUM_CACHED = 192


def kv_bytes(engine: TinyEngine, tokens: Sequence[int]) -> list[bytes]:
    """Return what the GPU has of a prefix in the tree, the draft's layers last."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array.array("q", tokens))
    node = engine.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    slots = engine.tree.path_device_indices(node)
    assert len(slots) == NUM_CACHED
    pools = (engine.kv_pool, engine.scheduler.draft_worker.primary_draft_kv_pool)
    layers = [layer for pool in pools for layer in (*pool.k_buffer, *pool.v_buffer)]
    return [layer[slots].view(torch.uint8).numpy().tobytes() for layer in layers]


def check_drafts(algorithm: str, directory: str) -> None:
    from sglang_models import drafting

    engine = TinyEngine(
        **drafting(algorithm, directory),
        **linker_options(
            num_cpu_blocks=200, skip_slow_loads=False,
            num_ssd_blocks=400, ssd_cache_dirs=[f"{directory}/ssd"],
        ),
    )  # fmt: skip
    tokens = prompt(200)

    def ask(num_cached: int) -> Any:
        """Generate; return tokens, passes and what was accepted, and the bytes."""
        request = engine.generate(tokens, NUM_NEW)
        assert request.cached_tokens == num_cached
        counts = request.spec_verify_ct, request.spec_num_correct_drafts
        return list(request.output_ids), counts, kv_bytes(engine, tokens[: NUM_CACHED + 1])

    def forget(*tiers: str) -> None:
        """Have the slots hold something else, and empty the tree."""
        forget_gpu(engine)
        engine.generate(prompt(300, seed=5), NUM_NEW)
        forget_gpu(engine, *tiers)

    cold = ask(0)
    if algorithm == "STANDALONE":
        assert cold[1][1] >= NUM_NEW // 3
    for tiers in (None, (), ("CPU",)):  # from the tree, DRAM and SSD
        if tiers is not None:
            forget(*tiers)
        loaded = ask(NUM_CACHED)
        assert loaded[:2] == cold[:2], f"{tiers}: {loaded[1]} passes and accepted, not {cold[1]}"
        assert loaded[2] == cold[2], tiers
    manager_of(engine).check()


def test_a_hit_costs_a_draft_nothing(tmp_path: Path) -> None:
    apart(check_drafts, "STANDALONE", str(tmp_path))


@pytest.mark.whole
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_a_draft_that_takes_hidden_states_finds_its_kv(algorithm: str, tmp_path: Path) -> None:
    apart(check_drafts, algorithm, str(tmp_path))
