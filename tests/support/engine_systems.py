"""What a driven vLLM engine caches with: FlexCache, vLLM's own offloading, LMCache, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paths import MODELS

LMCACHE_SETTLES_S = 0.3
FLEXCACHE = {
    "kv_connector": "FlexCacheConnectorV1",
    "kv_connector_module_path": "flexcache.integration.vllm",
}
PROBED_GROUPS = {"kv_connector": "GroupProbe", "kv_connector_module_path": "group_probe"}
OFFLOADING = {"kv_connector": "OffloadingConnector"}
PROBED_OFFLOADING = {
    "kv_connector": "ProbeOffloading",
    "kv_connector_module_path": "probe_offloading",
}
IDLE = {"kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector"}
PROBED_FLEXCACHE = {"kv_connector": "ProbeConnector", "kv_connector_module_path": "probe_connector"}


@dataclass(frozen=True)
class Settings:
    """An engine and what it caches with.

    Attributes:
        system: "alone" (vLLM without a KV connector), "idle" (with one that does nothing),
            "FlexCache", "offloading" (vLLM's own) or "LMCache".
        model: One of `make_models`.
        directory: Directory of the SSD tier; None for no such tier.
        dram_gb: Size of the DRAM tier; None where ``more`` has it.
        peer_url: Address of LMCache's server.
        more: Further settings of FlexCache, or of vLLM's own offloading.
        engine: Further arguments of `vllm.LLM`.
        connectors: Configs of the connectors that MultiConnector combines, in this order; an empty
            one stands for FlexCache. If there are none, it is not used.
        role: The connectors' ``kv_role``.
        probe_dir: Directory for digests of the blocks; None to compute none.
        has_groups: Whether the model has several KV cache groups. vLLM then chooses block sizes.
        num_threads: Threads that compute; None for one per processor.
    """

    system: str
    model: str
    directory: str | None = None
    dram_gb: float | None = 1.0
    peer_url: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    probe_dir: str | None = None
    has_groups: bool = False
    num_threads: int | None = None
    connectors: Sequence[Mapping[str, Any]] = ()
    role: str = "kv_both"


def llm_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. Creates the model if it does not exist."""
    from make_models import make_model

    return {
        "model": str(make_model(MODELS, settings.model)),
        "dtype": "bfloat16" if _has_fast_bf16() else "float32",
        "enforce_eager": True,
        "max_model_len": 8192 if settings.model == "mid" else 4096,
        "max_num_seqs": 8,
        "block_size": None if settings.has_groups else 32,
        "kv_cache_memory_bytes": 512 << 20,
        "disable_log_stats": False,
        **settings.engine,
        **_connector(settings),
    }


def _has_fast_bf16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def _connector(settings: Settings) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    directory, dram_bytes = settings.directory, int((settings.dram_gb or 0) * 1e9)
    extra: dict[str, Any]
    match settings.system:
        case "alone":
            return {}
        case "idle":
            names, extra = IDLE, {}
        case "FlexCache":
            extra = {}
            if settings.dram_gb is not None:
                extra["cpu_cache_gb"] = settings.dram_gb
            if directory is not None:
                extra |= {"ssd_cache_gb": 4, "ssd_cache_dirs": [directory]}
            extra |= settings.more
            probed = PROBED_GROUPS if settings.has_groups else PROBED_FLEXCACHE
            connector = FLEXCACHE if settings.probe_dir is None else probed
            names = {**connector, "kv_load_failure_policy": "recompute"}
        case "offloading":
            tiers = [] if directory is None else [{"type": "fs", "root_dir": directory}]
            extra = {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "vllm_offload_cpu",
                "cpu_bytes_to_use": dram_bytes,
                "secondary_tiers": tiers,
                **settings.more,
            }
            names = PROBED_OFFLOADING if settings.probe_dir else OFFLOADING
        case "LMCache":
            hide_numba_from_vllm()
            host, _, port = settings.peer_url.rpartition(":")
            extra = {"lmcache.mp.host": host, "lmcache.mp.port": int(port)}
            names = {"kv_connector": "LMCacheMPConnector"}
        case other:
            raise ValueError(f"no system is called {other!r}")
    names = dict(names)
    policy = {name: names.pop(name) for name in ("kv_load_failure_policy",) if name in names}
    connector = {**names, "kv_role": settings.role, "kv_connector_extra_config": extra}
    if settings.connectors:
        others = [{"kv_role": settings.role, **other} for other in settings.connectors]
        children = [other if "kv_connector" in other else connector for other in others]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": settings.role,
            "kv_connector_extra_config": {"connectors": children},
        }
    return {"kv_transfer_config": KVTransferConfig(**connector, **policy)}


def hide_numba_from_vllm() -> None:
    """Before vLLM's CPU backend looks through all modules for kernels, where numba is loaded, as by
    LMCache: it stumbles over llvmlite's library wrappers, which have every attribute, `__dict__`
    too."""
    from llvmlite.binding import ffi

    wrapper = ffi._lib_wrapper
    answer = wrapper.__getattr__
    wrapper.__getattr__ = lambda self, name: {} if name == "__dict__" else answer(self, name)


def clear_lmcache(settings: Settings) -> None:
    """Empty LMCache's DRAM once it has written its files: it drops blocks, written or not."""
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    assert settings.directory is not None
    directory, sizes = Path(settings.directory), [-1, 0]
    while sizes[-1] != sizes[-2]:
        time.sleep(LMCACHE_SETTLES_S)
        sizes.append(sum(path.stat().st_size for path in directory.rglob("*.data")))
    client = RequestClientFactory.create(settings.peer_url)
    client.clear(False).result(timeout=10)
    client.close()
