"""Setup of a real vLLM engine on a CPU."""

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
        "dtype": fast_dtype(),
        "enforce_eager": True,
        "max_model_len": 8192 if settings.model == "mid" else 4096,
        "max_num_seqs": 8,
        "block_size": None if settings.has_groups else 32,
        "kv_cache_memory_bytes": 512 << 20,
        "disable_log_stats": False,
        **settings.engine,
        **_connector(settings),
    }


def fast_dtype() -> str:
    """Return bfloat16 where the processor computes with it fast, and else float32."""
    return "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"


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


REST_S = 120.0
ENGINE_ENV = {
    "FLEXCACHE_SKIP_SLOW_LOADS": "false",  # tiny models compute faster than a busy disk reads
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_arguments(model: str, extra_config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, with the connector that computes digests of blocks, by
    default `PROBED_FLEXCACHE`."""
    from vllm.config import KVTransferConfig

    connector = overrides.pop("connector", PROBED_FLEXCACHE)
    policy = overrides.pop("kv_load_failure_policy", "recompute")
    return {
        "model": str(MODELS / model),
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 32 << 20,
        "seed": 0,
        "disable_log_stats": False,
        "kv_transfer_config": KVTransferConfig(
            **connector,
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra_config,
        ),
        **overrides,
    }


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    return [3 + (i * (2 * seed + 7) + seed) % 500 for i in range(num_tokens)]


def wait_until_open(llm: Any) -> None:
    """Wait until FlexCache has hashed the model's files, where it runs in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = None if core is None else core.scheduler.connector
    give_up = time.monotonic() + REST_S
    for child in getattr(connector, "sub_connectors", [connector]):
        if hasattr(child, "_scheduler") and hasattr(child._scheduler, "_cache"):
            while not child._scheduler._cache.is_open:
                assert time.monotonic() < give_up, "the cache did not open"
                time.sleep(0.01)


class Engine:
    """An engine in this process, with the operations that tests need."""

    def __init__(self, llm: Any, probe_dir: Path) -> None:
        wait_until_open(llm)
        self.llm = llm
        self.probe_dir = probe_dir
        self.adapter: str | None = None
        """Directory of the LoRA adapter that requests use."""
        self.reloads = False
        """Whether requests have it loaded again."""
        self._adapters: dict[str, int] = {}

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """FlexCache's connector, scheduler side; it may be one of several."""
        connector = self.scheduler.connector
        children = getattr(connector, "sub_connectors", [connector])
        return next(child for child in children if hasattr(child, "_scheduler"))

    @property
    def manager(self) -> Any:
        return self.connector._scheduler.manager

    @property
    def server(self) -> Any:
        """The cache server inside the engine's scheduler."""
        return self.manager._transport.server

    def generate(self, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Any:
        return self.generate_all([prompt], max_tokens, **extra)[0]

    def generate_all(self, prompts: list[list[int]], max_tokens: int = 8, **extra: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
        return self.llm.generate(
            requests, sampling, use_tqdm=False, lora_request=self._lora_request()
        )

    def _lora_request(self) -> Any:
        from vllm.lora.request import LoRARequest

        if self.adapter is None:
            return None
        number = self._adapters.setdefault(self.adapter, len(self._adapters) + 1)
        name = Path(self.adapter).name
        return LoRARequest(name, number, self.adapter, load_inplace=self.reloads)

    def drain(self) -> None:
        """Let puts end: in one process nothing else steps an idle engine."""
        give_up = time.monotonic() + REST_S
        while self.scheduler.has_requests():
            assert time.monotonic() < give_up, "the engine did not come to rest"
            self.llm.llm_engine.step()

    def settle(self) -> None:
        """Wait until what was stored is on SSD too."""
        self.drain()
        server = self.server
        with server.lock, server.session() as tasks:
            while tasks.sessions.num_open:
                server.state.changed.wait(0.002)

    def forget_gpu(self) -> None:
        self.drain()
        assert self.llm.reset_prefix_cache()

    def forget_all(self) -> None:
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)
