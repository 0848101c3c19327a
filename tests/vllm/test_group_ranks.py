"""Models with several KV cache groups on several ranks: each stores its part of every group."""

from __future__ import annotations

from typing import Any

import pytest
from test_processes import run

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
]
LENGTHS = [1200, 900, 700]
BLOCK_SIZES = {"gemma3": None, "qwen3next": 256}
"""As vLLM chooses them. In a process of its own, its scheduler forgets the one of qwen3next on a
CPU: chunks then end between states, and none is kept."""
STAGES = {"pipeline_parallel_size": 2, "worker_extension_cls": "pp_eager.EagerStages"}


@pytest.mark.parametrize("engine", [STAGES, {"tensor_parallel_size": 2}], ids=["stages", "tensor"])
@pytest.mark.parametrize(("model", "position"), [("gemma3", 128), ("qwen3next", 256)])
def test_each_rank_gets_back_its_layers_of_every_group(
    model: str, position: int, engine: dict[str, Any]
) -> None:
    options = {
        "model": model,
        "has_groups": True,
        "prompts": LENGTHS,
        "cpu_blocks": {"gemma3": 24, "qwen3next": 10}[model],  # not all of them
        "settle": True,
        "engine": {"kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK_SIZES[model], **engine},
    }
    seen = run(options)
    assert seen["errors"] == []
    assert all(seen["tokens_equal"])
    assert seen["cached"] == [(length - 1) // position * position for length in LENGTHS]
    assert seen["probes"]["ranks"] == 2
    assert seen["probes"]["different"] == []
    assert seen["ssd_hit_tokens"] > 0
