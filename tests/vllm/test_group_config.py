"""What the connector reads of KV cache groups, from vLLM's own specs. Needs no engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rank_config import config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from flexcache.config.model import KVGroup
from flexcache.errors import ConfigError
from flexcache.integration.vllm import groups
from flexcache.integration.vllm.calls import CacheCalls
from flexcache.integration.vllm.engine import describe_layout, read_model_config
from flexcache.integration.vllm.groups import (
    read_groups,
    read_keys_per_position,
    read_layers,
    read_position,
)

pytestmark = [
    pytest.mark.skipif(
        not groups.TELLS_GROUPS, reason="this vLLM tells connectors of one group only"
    ),
    pytest.mark.newest,
]
ATTENTION = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=128, **ATTENTION)
WINDOW = SlidingWindowSpec(block_size=256, sliding_window=512, **ATTENTION)
CHUNKED = ChunkedLocalAttentionSpec(block_size=128, attention_chunk_size=512, **ATTENTION)
STATE = MambaSpec(
    block_size=256, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


def caches(*specs: KVCacheSpec, hash_block_size: int | None = None) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(16, [], groups, hash_block_size=hash_block_size)


def engine(prefix_caching: bool = True) -> Any:
    made = config()
    made.cache_config.enable_prefix_caching = prefix_caching
    return made


def test_one_group_of_full_attention_needs_no_groups() -> None:
    assert read_groups(engine(), caches(FULL)) == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FULL, KVGroup("full", 128, 0, ("layer.0",))),
        (WINDOW, KVGroup("window", 256, 512, ("layer.0",))),
        (CHUNKED, KVGroup("chunked", 128, 512, ("layer.0",))),
        (STATE, KVGroup("state", 256, 0, ("layer.0",))),
    ],
)
def test_groups_of_each_kind(spec: KVCacheSpec, expected: KVGroup) -> None:
    read = read_groups(engine(), caches(spec, FULL))
    assert read == (expected, KVGroup("full", 128, 0, ("layer.1",)))
    assert read_model_config(engine(), caches(spec, FULL)).groups == read


@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, STATE])
def test_a_single_group_that_forgets_is_a_group(spec: KVCacheSpec) -> None:
    [group] = read_groups(engine(), caches(spec))
    assert not group.is_dense


def test_tokens_that_a_draft_computes_again_belong_to_the_window() -> None:
    spec = SlidingWindowSpec(
        block_size=128, sliding_window=512, extra_retained_tokens=3, **ATTENTION
    )
    assert read_groups(engine(), caches(spec, FULL))[0].window == 515


def test_positions_are_whole_blocks_of_all_groups_and_keys_are_taken_at_their_ends() -> None:
    rank = caches(WINDOW, FULL, hash_block_size=128)
    assert read_position(engine(), rank) == 256
    assert read_keys_per_position(engine(), rank) == 2
    calls = CacheCalls(None, 256, (), 2)
    hashed = SimpleNamespace(lora_request=None, block_hashes=[b"a", b"b", b"c", b"d", b"e"])
    assert calls.keys(hashed) == [b"b", b"d"]


def test_hashes_that_make_up_no_position_are_refused() -> None:
    with pytest.raises(ConfigError, match="must agree"):
        read_keys_per_position(engine(), caches(WINDOW, FULL, hash_block_size=96))


def test_states_need_vllms_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        read_groups(engine(prefix_caching=False), caches(STATE, FULL))
    assert read_groups(engine(prefix_caching=False), caches(WINDOW, FULL))


def test_other_kinds_are_refused_by_name() -> None:
    cross = CrossAttentionSpec(block_size=128, **ATTENTION)
    with pytest.raises(ConfigError, match="CrossAttentionSpec"):
        read_groups(engine(), caches(cross, FULL))


def test_hisparse_is_refused_by_name() -> None:
    made = engine()
    made.attention_config = SimpleNamespace(hisparse_config=None)
    assert read_groups(made, caches(FULL)) == ()
    made.attention_config.hisparse_config = object()
    with pytest.raises(ConfigError, match=r"HiSparseConnector.*leave it out"):
        read_groups(made, caches(FULL))


def test_an_older_vllm_is_asked_for_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TELLS_GROUPS", False)
    assert read_groups(engine(), caches(FULL)) == ()
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager"):
        read_groups(engine(), caches(WINDOW, FULL))
    with pytest.raises(ConfigError, match="needs vLLM"):
        read_groups(engine(), caches(WINDOW))


def test_a_rank_names_its_own_layers_of_each_group() -> None:
    assert read_layers(caches(FULL)) is None
    several = caches(WINDOW, FULL)
    several.kv_cache_groups[0].layer_names = []  # all of them are on another stage
    assert read_layers(several) == [[], ["layer.1"]]


def test_what_a_state_consists_of_is_part_of_the_layout() -> None:
    def describe(**changes: Any) -> str:
        backend = SimpleNamespace(get_name=lambda: "B")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        made = engine()
        layers = {"layer.0": layer, "layer.1": layer}
        made.compilation_config = SimpleNamespace(static_forward_context=layers)
        made.device_config = SimpleNamespace(device_type="cuda")
        return describe_layout(made, caches(FULL, replace(STATE, **changes)))

    assert describe() == "cuda B float32[4x4]"
    assert describe(shapes=((2, 8),)) == "cuda B float32[2x8]"
    halves = {"shapes": ((8,), (2, 8)), "dtypes": (torch.float32, torch.bfloat16)}
    assert describe(**halves) == "cuda B float32[8]+bfloat16[2x8]"
