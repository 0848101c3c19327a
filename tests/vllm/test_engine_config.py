"""What the connector reads of vLLM's configuration, groups and requests. Needs no engine."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from connector_hooks import TABLE, read_hooks
from hypothesis import example, given
from hypothesis import strategies as st
from test_identity import stand_in
from vllm.distributed.kv_transfer.kv_connector.v1 import base
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

from flexcache.config import ModelConfig
from flexcache.config.model import KVGroup
from flexcache.errors import ConfigError
from flexcache.integration import adapter
from flexcache.integration.adapter import VLLM_COUNTERS
from flexcache.integration.vllm import groups
from flexcache.integration.vllm.calls import CacheCalls, Hints, read_hints
from flexcache.integration.vllm.engine import describe_layout, read_model_config
from flexcache.integration.vllm.groups import (
    read_groups,
    read_keys_per_position,
    read_layers,
    read_position,
)
from flexcache.integration.vllm.scheduler import FlexCacheStats
from flexcache.integration.vllm.step_loads import find_obstacle
from flexcache.router.fleet import EventSource
from flexcache.router.listing import Listing, WorkerEntry


def with_groups(test: Any) -> Any:
    """A test of a vLLM that tells connectors of several groups."""
    one = pytest.mark.skipif(not groups.TELLS_GROUPS, reason="this vLLM tells of one group only")
    return one(pytest.mark.newest(test))


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


def rank_caches(
    layers: list[str], block_size: int = 16, hash_block_size: int = 16, **more: Any
) -> Any:
    """What vLLM says of a rank's KV caches."""
    spec = SimpleNamespace(
        block_size=block_size, head_size=64, dtype=torch.bfloat16, **more.pop("spec", {})
    )
    return SimpleNamespace(
        hash_block_size=hash_block_size,
        kv_cache_groups=[SimpleNamespace(layer_names=layers, kv_cache_spec=spec)],
        **more,
    )


def test_heads_are_told_apart_where_vllms_tensors_have_as_many_as_its_spec() -> None:
    caches = rank_caches(["a"], spec={"num_kv_heads": 4})
    assert groups.read_head_dim({"a": torch.zeros(8, 4, 16, 8)}, caches) == 1
    for shape in ((8, 8, 16, 8), (8, 16, 4, 8), (8, 4, 128), (2, 8, 4, 16, 8)):
        assert groups.read_head_dim({"a": torch.zeros(shape)}, caches) is None


@pytest.mark.newest
def test_the_model_does_not_depend_on_whose_layers_the_scheduler_sees() -> None:
    stages = [rank_caches(["a", "b", "c"]), rank_caches(["d"])]
    models = [read_model_config(config(pipeline_parallel_size=2), stage) for stage in stages]
    assert models[0] == models[1]
    assert models[0] == ModelConfig(
        models[0].model_id, 6, 2, 64, torch.bfloat16, pp_size=2, sized_by_ranks=True
    )


@pytest.mark.newest
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
    rank = rank_caches(["a"], hash_block_size=16 * dcp_size, **told)
    assert read_model_config(config(**parallel), rank).num_replicas == expected


@pytest.mark.newest
def test_stages_with_a_draft_model_share_nothing() -> None:
    rank, sizes = rank_caches(["a"], kv_tp_replicas=2), {"tensor_parallel_size": 4}
    assert read_model_config(config(drafts=True, **sizes), rank).num_replicas == 2
    staged = config(drafts=True, pipeline_parallel_size=2, **sizes)
    assert read_model_config(staged, rank).num_replicas == 1


@pytest.mark.newest
@pytest.mark.parametrize(
    ("spec", "tokens"), [({"dcp_sharded": True}, 32), ({}, 32), ({"dcp_sharded": False}, 16)]
)
def test_a_block_of_context_parallel_ranks_holds_the_tokens_of_all(
    spec: dict[str, bool], tokens: int
) -> None:
    parallel = config(tensor_parallel_size=2, decode_context_parallel_size=2)
    rank = rank_caches(["a"], hash_block_size=tokens, spec=spec, kv_tp_replicas=1)
    assert read_position(parallel, rank) == tokens
    assert read_model_config(parallel, rank).num_shards == 2
    with pytest.raises(ConfigError, match="must agree"):
        read_keys_per_position(parallel, rank_caches(["a"], hash_block_size=8, spec=spec))


@pytest.mark.newest
def test_prefill_context_ranks_are_ranks_of_the_engine() -> None:
    model = read_model_config(
        config(tensor_parallel_size=2, prefill_context_parallel_size=3), rank_caches(["a"])
    )
    assert model.num_ranks == model.num_shards == 6


@pytest.mark.newest
def test_ranks_that_deal_tokens_out_differently_have_other_layouts() -> None:
    backend = SimpleNamespace(get_name=lambda: "FLASH")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)

    def layout(dcp_size: int, pieces: int) -> str:
        made = config(decode_context_parallel_size=dcp_size, cp_kv_cache_interleave_size=pieces)
        made.compilation_config = SimpleNamespace(static_forward_context={"a": layer})
        made.device_config = SimpleNamespace(device_type="cuda")
        return describe_layout(made, rank_caches(["a"]))

    assert layout(1, 1) == layout(1, 4) == "cuda FLASH"
    assert len({layout(*sizes) for sizes in ((1, 1), (2, 1), (2, 4), (4, 1))}) == 4


@pytest.mark.newest
def test_loads_within_a_step_are_not_for_pipeline_stages() -> None:
    assert "stages" in str(find_obstacle(config(pipeline_parallel_size=2)))


# -- groups ----------------------------------------------------------------------------------------


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


@with_groups
def test_one_group_of_full_attention_needs_no_groups() -> None:
    assert read_groups(engine(), caches(FULL)) == ()


@with_groups
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


@with_groups
@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, STATE])
def test_a_single_group_that_forgets_is_a_group(spec: KVCacheSpec) -> None:
    [group] = read_groups(engine(), caches(spec))
    assert not group.is_dense


@with_groups
def test_tokens_that_a_draft_computes_again_belong_to_the_window() -> None:
    spec = SlidingWindowSpec(
        block_size=128, sliding_window=512, extra_retained_tokens=3, **ATTENTION
    )
    assert read_groups(engine(), caches(spec, FULL))[0].window == 515


@with_groups
def test_positions_are_whole_blocks_of_all_groups_and_keys_are_taken_at_their_ends() -> None:
    rank = caches(WINDOW, FULL, hash_block_size=128)
    assert read_position(engine(), rank) == 256
    assert read_keys_per_position(engine(), rank) == 2
    calls = CacheCalls(None, 256, (), 2)
    hashed = SimpleNamespace(lora_request=None, block_hashes=[b"a", b"b", b"c", b"d", b"e"])
    assert calls.keys(hashed) == [b"b", b"d"]


@with_groups
def test_hashes_that_make_up_no_position_are_refused() -> None:
    with pytest.raises(ConfigError, match="must agree"):
        read_keys_per_position(engine(), caches(WINDOW, FULL, hash_block_size=96))


@with_groups
def test_states_need_vllms_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        read_groups(engine(prefix_caching=False), caches(STATE, FULL))
    assert read_groups(engine(prefix_caching=False), caches(WINDOW, FULL))


@with_groups
def test_other_kinds_are_refused_by_name() -> None:
    cross = CrossAttentionSpec(block_size=128, **ATTENTION)
    with pytest.raises(ConfigError, match="CrossAttentionSpec"):
        read_groups(engine(), caches(cross, FULL))


@with_groups
def test_hisparse_is_refused_by_name() -> None:
    made = engine()
    made.attention_config = SimpleNamespace(hisparse_config=None)
    assert read_groups(made, caches(FULL)) == ()
    made.attention_config.hisparse_config = object()
    with pytest.raises(ConfigError, match=r"HiSparseConnector.*leave it out"):
        read_groups(made, caches(FULL))


@with_groups
def test_an_older_vllm_is_asked_for_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TELLS_GROUPS", False)
    assert read_groups(engine(), caches(FULL)) == ()
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager"):
        read_groups(engine(), caches(WINDOW, FULL))
    with pytest.raises(ConfigError, match="needs vLLM"):
        read_groups(engine(), caches(WINDOW))


@with_groups
def test_a_rank_names_its_own_layers_of_each_group() -> None:
    assert read_layers(caches(FULL)) is None
    several = caches(WINDOW, FULL)
    several.kv_cache_groups[0].layer_names = []  # all of them are on another stage
    assert read_layers(several) == [[], ["layer.1"]]


@with_groups
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


# -- hints of requests -----------------------------------------------------------------------------


OVER = {"over": True, "returns_in_s": None}


def request_with(**hints: Any) -> SimpleNamespace:
    params = {f"flexcache_{name}": hint for name, hint in hints.items()}
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


def test_a_request_without_hints_says_nothing() -> None:
    for request in (SimpleNamespace(request_id="r"), request_with()):
        assert read_hints(request) == Hints()


@pytest.mark.parametrize(
    ("hints", "retention"),
    [({"priority": 2, "ttl_s": 1}, {"priority": 2, "ttl_s": 1.0}),
     ({"priority": "3"}, {"priority": 3}),
     ({"priority": 1000}, {}), ({"priority": "high", "ttl_s": 5}, {"ttl_s": 5.0}),
     ({"ttl_s": float("nan")}, {}), ({"priority": [1]}, {})],
)  # fmt: skip
def test_retention(hints: dict[str, Any], retention: dict[str, Any]) -> None:
    assert read_hints(request_with(**hints)).retention == retention


@pytest.mark.parametrize(
    ("hints", "vllms", "limit"),
    [({}, None, sys.maxsize), ({"store": True}, None, sys.maxsize), ({"store": False}, None, 0),
     ({"max_store_tokens": 40}, None, 40), ({"max_store_tokens": 0}, None, 0),
     ({"store": False, "max_store_tokens": 40}, 50, 0), ({}, 50, 50),
     ({"max_store_tokens": 40}, 50, 40), ({"max_store_tokens": 40}, 30, 30),
     ({"store": "false"}, "30", sys.maxsize), ({"max_store_tokens": -1}, -1, sys.maxsize),
     ({"max_store_tokens": True}, False, sys.maxsize),
     ({"max_store_tokens": 1.5}, 1.5, sys.maxsize)],
)  # fmt: skip
def test_how_much_is_stored(hints: dict[str, Any], vllms: Any, limit: int) -> None:
    request = request_with(**hints)
    if vllms is not None:
        request.kv_transfer_params["max_offload_tokens"] = vllms
    assert read_hints(request).max_store_tokens == limit


@pytest.mark.parametrize(
    ("hint", "seconds"),
    [(300, 300.0), ("0.5", 0.5), (0, None), (-1, None), (float("nan"), None), (604_801, None),
     ("soon", None), (True, None)],
)  # fmt: skip
def test_how_long_a_prompt_is_pinned(hint: object, seconds: float | None) -> None:
    assert read_hints(request_with(pin_ttl_s=hint)).pin_ttl_s == seconds


@pytest.mark.parametrize(
    ("hints", "end"),
    [({"session_id": "a"}, {}), ({"session_over": True}, {}),
     ({"session_id": "a", "session_over": False}, {}),
     ({"session_id": "a", "session_over": True}, OVER),
     ({"session_id": "a", "session_over": "false"}, {}),
     ({"session_id": "a", "returns_in_s": 3}, {"over": False, "returns_in_s": 3.0}),
     ({"session_id": "a", "returns_in_s": -3}, {}),
     ({"session_id": "a", "returns_in_s": "soon"}, {}),
     ({"session_id": "x" * 300, "session_over": True}, {}),
     ({"session_id": "a", "returns_in_s": 86_401}, {}),
     ({"session_id": "a", "session_over": True, "returns_in_s": 3}, {}),
     ({"session_id": "\ud800", "session_over": True}, {}),
     ({"session_id": 7, "session_over": True}, {})],
)  # fmt: skip
def test_the_end_of_a_session(hints: dict[str, Any], end: dict[str, Any]) -> None:
    read = read_hints(request_with(**hints))
    assert read.session_end == end
    assert read.session_id == "a" or not end


@pytest.mark.parametrize(
    ("hint", "namespace"),
    [
        (None, ()),
        ("team-a", ("team-a",)),
        (["team-a"], ("team-a",)),
        (["team-a", "an adapter"], ("team-a", "an adapter")),
        ("", None),
        ("x" * 257, None),
        (7, None),
        ([], None),
        (["a"] * 9, None),
        (["a", 7], None),
        ("\ud800", None),
    ],
)
def test_a_namespace_that_cannot_be_is_no_reason_to_store_it_where_all_do(
    hint: object, namespace: tuple[str, ...] | None
) -> None:
    hints = read_hints(request_with(namespace=hint))
    assert hints.namespace == (namespace or ())
    assert hints.max_store_tokens == (0 if namespace is None else sys.maxsize)


def test_what_is_ignored_is_logged_once_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    adapter._warned.clear()
    for seconds in (-3, "soon"):
        read_hints(request_with(session_id="a", returns_in_s=seconds))
    read_hints(request_with(session_id="a", session_over=True, returns_in_s=3))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "hint=flexcache_returns_in_s" in warnings[0]
    assert "0 to 86,400 s" in warnings[0]
    assert "hint=flexcache_session_over" in warnings[1]


# -- statistics ------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(sorted(VLLM_COUNTERS)), st.integers(1, 1 << 50)))
@example({"load_seconds": 1, "failed_loads": 1})  # all loads of the interval failed
def test_any_counters_of_an_interval_can_be_reduced(gains: dict[str, int]) -> None:
    reduced = FlexCacheStats(dict(gains)).reduce()
    assert all(math.isfinite(value) and value >= 0 for value in reduced.values())
    found = sum(count for name, count in gains.items() if "hit_tokens" in name)
    asked = found + gains.get("missed_tokens", 0)
    assert reduced["external_hit_rate"] == (round(found / asked, 4) if asked else 0.0)


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.newest
def test_the_table_has_the_hooks_of_its_release() -> None:
    table = json.loads(TABLE.read_text())
    if vllm.__version__.partition("+")[0] != table["vllm"]:
        pytest.skip(f"the table is of vLLM {table['vllm']} (scripts/test.sh all tests with it)")
    assert read_hooks(Path(base.__file__).read_text()) == table["hooks"]


# -- ports of ranks --------------------------------------------------------------------------------


kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")


@pytest.mark.whole
@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:5557", "tcp://[::1]:5557"])
def test_ports_of_ranks_are_those_of_vllm(endpoint: str) -> None:
    entry = WorkerEntry(url="http://h:1", data_parallel_size=4, events=(f"{endpoint},{endpoint}",))
    for rank, spec in enumerate(Listing((entry,)).specs()):
        expected = kv_events.ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
        assert spec.sources == (EventSource(expected, expected),)
