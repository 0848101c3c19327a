"""The KV layout that the connector prefers, as vLLM itself resolves it. Needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32 has no such layouts")

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from flexcache.storage.layout import BlockLayout, bytes_per_block, describe_kv_caches

ANY = [layout.name for layout in KVCacheLayout]
OURS = {
    "kv_connector": "FlexCacheConnectorV1",
    "kv_connector_module_path": "flexcache.integration.vllm",
    "kv_role": "kv_both",
}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_BYTES = 3, 4, 2, 64


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be_a_gpu(monkeypatch, 9)


def be_a_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    for name, value in {
        "is_cuda_alike": True,
        "get_device_capability": SimpleNamespace(major=major, minor=0),
    }.items():
        monkeypatch.setattr(type(current_platform), name, lambda *_, value=value: value)


def config(connector: dict[str, Any], is_hybrid: bool = False, **cache: Any) -> Any:
    defaults = {
        "kv_cache_layout": None, "user_specified_block_size": False, "cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [],
    }  # fmt: skip
    return SimpleNamespace(
        cache_config=SimpleNamespace(**{**defaults, **cache}),
        model_config=SimpleNamespace(is_hybrid=is_hybrid),
        kv_transfer_config=KVTransferConfig(**connector),
    )


def resolve(made: Any, supported: list[str]) -> str:
    return str(resolve_kv_cache_layout(made, [supported]).name)


def test_layers_of_a_block_are_kept_together_where_the_backends_can() -> None:
    assert resolve(config(OURS), ANY) == "BLNHC"
    assert resolve(config(EXAMPLE), ANY) == ANY[0]
    assert resolve(config(OURS), ["LBHNC"]) == "LBHNC"


def test_gpus_whose_kernels_want_heads_first_get_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    be_a_gpu(monkeypatch, 10)
    assert resolve(config(OURS), ["LBHNC", "BLHNC"]) == "BLHNC"


def test_the_users_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in the environment: vLLM reads it once in a process that has had an engine.
    monkeypatch.setitem(vars(envs), "VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert resolve(config(OURS), ANY) == "LBNHC"


@pytest.mark.parametrize(
    "unsafe",
    [
        {"is_hybrid": True},
        {"user_specified_block_size": True},
        {"cache_dtype": "fp8_per_token_head"},
        {"kv_cache_dtype_skip_layers": ["0"]},
    ],
    ids=str,
)
def test_engines_that_the_layout_could_break_keep_vllms_choice(unsafe: dict[str, Any]) -> None:
    assert resolve(config(OURS, **unsafe), ["LBNHC", "BLNHC"]) == "LBNHC"


def test_an_engine_on_a_cpu_keeps_vllms_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: False)
    assert resolve(config(OURS), ["LBNHC", "BLNHC"]) == "LBNHC"


def test_a_sibling_that_needs_another_layout_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ExampleConnector, "get_required_kvcache_layout", classmethod(lambda *_: "LBHNC")
    )
    children = {"connectors": [OURS, EXAMPLE]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    assert resolve(config({**multi, "kv_connector_extra_config": children}), ANY) == "LBHNC"


def described(layout: KVCacheLayout) -> BlockLayout:
    """Describe tensors that vLLM makes for this layout."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=NUM_HEADS, head_size=HEAD_BYTES // 4, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    strides = (page, NUM_LAYERS * page) if layout.is_block_outermost else (NUM_BLOCKS * page, page)
    names = [f"layer {i}" for i in range(NUM_LAYERS)]
    raw = torch.zeros(NUM_LAYERS * NUM_BLOCKS * page, dtype=torch.int8)
    if layout is KVCacheLayout.BHLNC:
        strides = (page // NUM_HEADS, NUM_LAYERS * page)
    tensor = KVCacheTensor(
        size=raw.numel(), layers=names, layer_stride=strides[0], block_stride=strides[1], offset=0
    )
    views = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor)
    tensors = dict(zip(names, views, strict=True))
    return describe_kv_caches(tensors, bytes_per_block(tensors, NUM_BLOCKS), 0, "", NUM_BLOCKS)


@pytest.mark.parametrize(
    ("name", "num_copies"),
    [("LBNHC", NUM_LAYERS), ("LBHNC", NUM_LAYERS), ("BLNHC", 1), ("BLHNC", 1), ("BHLNC", 1)],
)
def test_copies_of_a_block_in_each_of_vllms_layouts(name: str, num_copies: int) -> None:
    assert len(described(KVCacheLayout[name]).sizes) == num_copies


@pytest.mark.parametrize(("default", "preferred"), [("LBNHC", "BLNHC"), ("LBHNC", "BLHNC")])
def test_what_is_stored_stays_valid_with_the_preferred_layout(default: str, preferred: str) -> None:
    one, other = (described(KVCacheLayout[name]) for name in (default, preferred))
    assert one.signature == other.signature
