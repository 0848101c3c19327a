"""A real SGLang engine with FlexCache behind its radix tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_engine import PAGE, TinyEngine

OPEN_STATES = ("created", "ready", "running")
"""What the statistics call tasks that have not ended."""


def linker_options(
    linker: str = "FlexCacheLinker", module: str = "flexcache.integration.sglang", /, **extra: Any
) -> dict[str, Any]:
    """Return SGLang's settings; ``extra`` are FlexCache's."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": linker,
            "linker_module_path": module,
            "linker_extra_config": extra,
        },
    }


def engine_with_linker(ssd: str = "", **extra: Any) -> TinyEngine:
    """Make an engine that loads whatever is cached, though this machine may compute faster."""
    tiers = {"num_ssd_blocks": 400, "ssd_cache_dirs": [ssd]} if ssd else {}
    tiers = {"num_cpu_blocks": 200, "skip_slow_loads": False, **tiers}
    return TinyEngine(**linker_options(**{**tiers, **extra}))


def linker_of(engine: TinyEngine) -> Any:
    return engine.tree.linker.cache_linker


def manager_of(engine: TinyEngine) -> Any:
    return linker_of(engine).cache.manager


def settle(engine: TinyEngine) -> None:
    """Step until all is stored, in every tier."""

    def is_done() -> bool:
        tasks = manager_of(engine).stats()["tasks"]
        return not any(tasks[state] for state in OPEN_STATES)

    engine.step_until(lambda: not engine.tree.linker.pending_offloads)
    engine.step_until(is_done)


def forget_gpu(engine: TinyEngine, *tiers: str) -> None:
    """Empty the radix tree, once all is stored, and these tiers."""
    settle(engine)
    engine.flush()
    for tier in tiers:
        manager_of(engine).clear(tier)


def remember(engine: TinyEngine, tokens: Sequence[int]) -> Any:
    """Generate; return what to compare another time with: outputs and bytes."""
    request = engine.generate(tokens)
    return list(request.output_ids), engine.kv_bytes(tokens[: len(tokens) // PAGE * PAGE])


def check_again(engine: TinyEngine, tokens: Sequence[int], num_cached: int, expected: Any) -> None:
    """Generate, and compare with the outputs and bytes of another time."""
    request = engine.generate(tokens)
    assert request.cached_tokens == num_cached
    assert list(request.output_ids) == expected[0]
    assert engine.kv_bytes(tokens[: len(tokens) // PAGE * PAGE]) == expected[1]
