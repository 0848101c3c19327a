"""Stands in for SGLang's compiled kernels, which have no build for plain CPUs.

SGLang imports names from here; a model with torch's own attention calls none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel.speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return absent
