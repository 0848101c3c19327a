"""What the connector reads of ranks: stages, context parallelism, replicas. Needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_identity import stand_in

from flexcache.config import ModelConfig
from flexcache.errors import ConfigError
from flexcache.integration.vllm.engine import describe_layout, read_model_config
from flexcache.integration.vllm.groups import read_keys_per_position, read_position
from flexcache.integration.vllm.step_loads import find_obstacle

pytestmark = pytest.mark.newest


def config(*, use_mla: bool = False, drafts: bool = False, **parallel: int) -> Any:
    made = stand_in(
        use_mla=use_mla,
        get_total_num_hidden_layers=lambda: 6,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 64,
    )
    sizes = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    made.parallel_config = SimpleNamespace(**{**sizes, **parallel})
    if drafts:
        draft = stand_in(model="org/draft").model_config
        made.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    return made


def caches(layers: list[str], block_size: int = 16, hash_block_size: int = 16, **more: Any) -> Any:
    """What vLLM says of a rank's KV caches."""
    spec = SimpleNamespace(
        block_size=block_size, head_size=64, dtype=torch.bfloat16, **more.pop("spec", {})
    )
    return SimpleNamespace(
        hash_block_size=hash_block_size,
        kv_cache_groups=[SimpleNamespace(layer_names=layers, kv_cache_spec=spec)],
        **more,
    )


def test_the_model_does_not_depend_on_whose_layers_the_scheduler_sees() -> None:
    stages = [caches(["a", "b", "c"]), caches(["d"])]
    models = [read_model_config(config(pipeline_parallel_size=2), stage) for stage in stages]
    assert models[0] == models[1]
    assert models[0] == ModelConfig(
        models[0].model_id, 6, 2, 64, torch.bfloat16, pp_size=2, sized_by_ranks=True
    )


@pytest.mark.parametrize(
    ("told", "parallel", "expected"),
    [
        ({}, {"tensor_parallel_size": 4}, 2),  # an older vLLM: as the heads divide
        ({"kv_tp_replicas": 2}, {"tensor_parallel_size": 4}, 2),
        ({"kv_tp_replicas": 1}, {"tensor_parallel_size": 4}, 1),
        ({"kv_tp_replicas": 2}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 2),
        ({}, {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, 1),
    ],
)
def test_replicas_are_those_that_vllm_tells(
    told: dict[str, int], parallel: dict[str, int], expected: int
) -> None:
    dcp_size = parallel.get("decode_context_parallel_size", 1)
    rank = caches(["a"], hash_block_size=16 * dcp_size, **told)
    assert read_model_config(config(**parallel), rank).num_replicas == expected


def test_stages_with_a_draft_model_share_nothing() -> None:
    rank, sizes = caches(["a"], kv_tp_replicas=2), {"tensor_parallel_size": 4}
    assert read_model_config(config(drafts=True, **sizes), rank).num_replicas == 2
    staged = config(drafts=True, pipeline_parallel_size=2, **sizes)
    assert read_model_config(staged, rank).num_replicas == 1


@pytest.mark.parametrize(
    ("spec", "tokens"), [({"dcp_sharded": True}, 32), ({}, 32), ({"dcp_sharded": False}, 16)]
)
def test_a_block_of_context_parallel_ranks_holds_the_tokens_of_all(
    spec: dict[str, bool], tokens: int
) -> None:
    parallel = config(tensor_parallel_size=2, decode_context_parallel_size=2)
    rank = caches(["a"], hash_block_size=tokens, spec=spec, kv_tp_replicas=1)
    assert read_position(parallel, rank) == tokens
    assert read_model_config(parallel, rank).num_shards == 2
    with pytest.raises(ConfigError, match="must agree"):
        read_keys_per_position(parallel, caches(["a"], hash_block_size=8, spec=spec))


def test_prefill_context_ranks_are_ranks_of_the_engine() -> None:
    model = read_model_config(
        config(tensor_parallel_size=2, prefill_context_parallel_size=3), caches(["a"])
    )
    assert model.num_ranks == model.num_shards == 6


def test_ranks_that_deal_tokens_out_differently_have_other_layouts() -> None:
    backend = SimpleNamespace(get_name=lambda: "FLASH")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)

    def layout(dcp_size: int, pieces: int) -> str:
        made = config(decode_context_parallel_size=dcp_size, cp_kv_cache_interleave_size=pieces)
        made.compilation_config = SimpleNamespace(static_forward_context={"a": layer})
        made.device_config = SimpleNamespace(device_type="cuda")
        return describe_layout(made, caches(["a"]))

    assert layout(1, 1) == layout(1, 4) == "cuda FLASH"
    assert len({layout(*sizes) for sizes in ((1, 1), (2, 1), (2, 4), (4, 1))}) == 4


def test_loads_within_a_step_are_not_for_pipeline_stages() -> None:
    assert "stages" in str(find_obstacle(config(pipeline_parallel_size=2)))
