"""A model with sliding windows in a real SGLang engine, with FlexCache behind its tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import (
    PAGE,
    TinyEngine,
    apart,
    forget_gpu,
    linker_options,
    manager_of,
    prompt,
    settle,
)

pytestmark = pytest.mark.whole


def engine_with_windows(ssd: str = "", **extra: Any) -> TinyEngine:
    from sglang_models import windows

    tiers = {"num_ssd_blocks": 400, "ssd_cache_dirs": [ssd]} if ssd else {}
    extra = {"num_cpu_blocks": 300, "skip_slow_loads": False, **tiers, **extra}
    return TinyEngine(**windows(), **linker_options(**extra))


def kv_bytes(engine: TinyEngine, tokens: Sequence[int]) -> list[bytes]:
    """Return what the GPU has of a prefix in the tree: of full attention all of it, of the sliding
    windows the last pages."""
    import array

    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang_models import WINDOW

    key = RadixKey(array.array("q", tokens))
    node = engine.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    slots = engine.tree.path_device_indices(node)
    assert len(slots) == len(tokens)
    pool = engine.kv_pool
    in_window = pool.translate_loc_from_full_to_swa(slots[-WINDOW:])
    assert bool((in_window > 0).all())
    return [
        layer[chosen].view(torch.uint8).numpy().tobytes()
        for each, chosen in ((pool.full_kv_pool, slots), (pool.swa_kv_pool, in_window))
        for layer in (*each.k_buffer, *each.v_buffer)
    ]


def check_tiers(ssd: str) -> None:
    engine = engine_with_windows(ssd)
    short, longer = prompt(200), prompt(550)
    cold = engine.generate(short)
    assert cold.cached_tokens == 0
    expected = list(cold.output_ids), kv_bytes(engine, short[:192])

    def check(tokens: list[int], num_cached: int, expected: object) -> None:
        request = engine.generate(tokens)
        assert request.cached_tokens == num_cached
        whole = len(tokens) // PAGE * PAGE
        assert (list(request.output_ids), kv_bytes(engine, tokens[:whole])) == expected

    forget_gpu(engine)
    check(short, 192, expected)  # from DRAM
    cold_longer = engine.generate(longer)  # its end is stored behind what is there
    assert cold_longer.cached_tokens == 192
    expected_longer = list(cold_longer.output_ids), kv_bytes(engine, longer[:544])
    forget_gpu(engine)
    check(longer, 544, expected_longer)
    forget_gpu(engine, "CPU")
    check(longer, 544, expected_longer)  # parked: blocks and tail come from SSD
    forget_gpu(engine)
    # It resumes where a window was stored, not where it leaves what is stored.
    diverging = [*longer[:300], *prompt(100, seed=5)]
    other = engine.generate(diverging)
    assert other.cached_tokens == 192
    settle(engine)
    assert manager_of(engine).stats()["tiers"]["CPU"]["leased"] == 0
    manager_of(engine).check()


def test_windows_come_back_whole_from_dram_and_ssd(tmp_path: Path) -> None:
    apart(check_tiers, str(tmp_path))
