"""Setup of a real vLLM engine on a CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine_systems import PROBED_FLEXCACHE
from paths import MODELS

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
