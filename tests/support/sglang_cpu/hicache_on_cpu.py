"""Plugin of SGLang that lets HiCache run where the "device" is a CPU too.

SGLang finds `install` by its entry point (the ``.dist-info`` beside this file) in every process.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    import sgl_kernel.kvcacheio as kvcacheio
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    copies = (
        kvcacheio.transfer_kv_direct,
        kvcacheio.transfer_kv_per_layer_direct_pf_lf,
        kvcacheio.transfer_kv_all_layer_direct_lf_pf,
    )
    for module in (mha, mla):  # which import them only where there is a GPU
        for copy in copies:
            setattr(module, copy.__name__, copy)


def _allocate(
    dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, **options: object
) -> Any:
    """Allocate host memory without registering it with CUDA."""
    return allocator.allocate(dims, dtype=dtype, device=device)
