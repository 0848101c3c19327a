"""Linkers over real pools of SGLang, without an engine: one process may have several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang_engine import PAGE, options

NUM_SLOTS = 20 * PAGE
WINDOW = 3 * PAGE
_COMMON = {
    "size": NUM_SLOTS, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu",
    "enable_memory_saver": False,
}  # fmt: skip


def mla_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=8, layer_num=3, **_COMMON)


def mha_pool(num_layers: int = 2) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(head_num=2, head_dim=8, layer_num=num_layers, **_COMMON)


def dsa_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    with _rank(0, 1):
        return DSATokenToKVPool(
        kv_lora_rank=512, qk_rope_head_dim=64, layer_num=2, index_head_dim=128,
        kv_cache_dim=576, **{**_COMMON, "page_size": 64, "size": 20 * 64},
    )  # fmt: skip


def fill(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Fill tensors with random bytes."""
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, generator=random))


def make_params(pool: Any, req_to_token_pool: Any = None, **more: Any) -> Any:
    """Return what SGLang tells a linker of its pools."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    allocator = SimpleNamespace(get_kvcache=lambda: pool, **more)
    return CacheInitParams(
        disable=False, req_to_token_pool=req_to_token_pool, token_to_kv_pool_allocator=allocator,
        page_size=pool.page_size, sliding_window_size=WINDOW,
    )  # fmt: skip


def make_linker(
    params: Any, components: str = "FULL", tp_rank: int = 0, tp_size: int = 1, **extra: Any
) -> Any:
    """Make the linker of one rank.

    Args:
        components: SGLang's names of what its tree keeps, with spaces between.
        extra: FlexCache's settings.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from flexcache.integration.sglang import FlexCacheLinker

    if tp_size > 1 and not torch.distributed.is_initialized():  # each rank votes alone here
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with _rank(tp_rank, tp_size) as settings:
        return FlexCacheLinker(
            settings,
            params,
            components={ComponentType[name] for name in components.split()},
            extra_config={"num_cpu_blocks": 100, **extra},
        )


@contextmanager
def _rank(tp_rank: int, tp_size: int) -> Iterator[Any]:
    """Be a rank of an SGLang engine; yields its settings."""
    from make_models import make_model
    from paths import MODELS
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    make_model(MODELS, "tiny")
    settings = ServerArgs(**options(skip_tokenizer_init=True, tp_size=tp_size))
    settings.resolve_once()
    ranks = SpawnRanks(world_rank=tp_rank, dp_rank=None, gpu_id=0)
    with use_context(create_context(settings, role="scheduler", ranks=ranks)):
        yield settings
