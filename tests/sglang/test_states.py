"""A model with states in a real SGLang engine, with FlexCache behind its tree.

On a CPU, SGLang keeps states only with pages of one token, and at the ends of requests.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import TinyEngine, apart, forget_gpu, linker_options, manager_of, prompt, settle

pytestmark = pytest.mark.whole


def gpu_bytes(engine: TinyEngine, tokens: Sequence[int]) -> list[bytes]:
    """Return what the GPU has of a prefix in the tree: full attention, and the state behind it."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    tree = engine.tree
    key = RadixKey(array.array("q", tokens))
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    slots = tree.path_device_indices(node)
    assert len(slots) == len(tokens)
    state = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
    assert state is not None
    full = engine.kv_pool.full_kv_pool
    conv = engine.kv_pool.mamba_pool.mamba_cache.conv
    parts = [layer[slots] for layer in (*full.k_buffer, *full.v_buffer)]
    parts += [each[:, state] for each in conv]
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


def check_tiers(ssd: str) -> None:
    from sglang_models import states

    tiers = {"num_cpu_blocks": 1500, "num_ssd_blocks": 3000, "ssd_cache_dirs": [ssd]}
    engine = TinyEngine(
        **states(),
        page_size=1,
        max_mamba_cache_size=64,
        **linker_options(skip_slow_loads=False, **tiers),
    )
    first = engine.generate(prompt(200))
    told = [*prompt(200), *first.output_ids]
    resumed = told[:-1]  # where the state was kept
    follow_up = [*told, *prompt(50, seed=3)]

    def ask() -> Any:
        """Ask the next question; return all that may differ."""
        request = engine.generate(follow_up)
        assert request.cached_tokens == len(resumed)
        end = [*follow_up, *request.output_ids][:-1]
        return list(request.output_ids), gpu_bytes(engine, end)

    expected = ask()  # from the tree
    assert manager_of(engine).model_config.groups[1].blocks_per_state == 2
    forget_gpu(engine)
    assert ask() == expected  # from DRAM
    forget_gpu(engine, "CPU")
    assert ask() == expected  # parked: blocks and state come from SSD
    forget_gpu(engine)
    part = engine.generate(told[:150])
    assert part.cached_tokens == 0  # no state was kept there
    settle(engine)
    assert manager_of(engine).stats()["tiers"]["CPU"]["leased"] == 0
    manager_of(engine).check()


def test_states_come_back_whole_from_dram_and_ssd(tmp_path: Path) -> None:
    apart(check_tiers, str(tmp_path))
