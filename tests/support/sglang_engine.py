"""Real SGLang on a CPU: its scheduler, radix tree and model in this process, stepped by hand.

SGLang keeps its settings in globals, so a process can have one engine: tests run in processes of
their own (`apart`).
"""

from __future__ import annotations

import array
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import preloaded
from paths import MODELS, SUPPORT

PAGE = 16  # tokens
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # a core per rank
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
STAND_INS = SUPPORT / "sglang_cpu"
"""What SGLang imports and does not need on a CPU."""
_TEST_TIMEOUT_S = 300.0
_STEPS_TIMEOUT_S = 120.0
_IDLE_WAIT_S = 0.001  # lets SGLang's other threads have the interpreter


def options(**more: Any) -> dict[str, Any]:
    """Return the settings of a small engine, as keywords of `sglang.Engine` or of `TinyEngine`."""
    return {
        "model_path": str(MODELS / "tiny"),
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "bfloat16",
        "page_size": PAGE,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "context_length": 2048,
        "disable_overlap_schedule": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "watchdog_timeout": 600,
        **more,
    }


def apart(function: Callable[..., None], *arguments: Any, **environment: str) -> None:
    """Run a module's function in a process of its own that may have an engine.

    Raises:
        AssertionError: It failed; the text is its traceback.
    """
    if str(STAND_INS) not in sys.path:
        sys.path.insert(0, str(STAND_INS))
    variables = {
        **os.environ, **ENVIRONMENT, **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # for processes of SGLang's own
    }  # fmt: skip
    preloaded.call("sglang_imports", variables, _TEST_TIMEOUT_S, _forking, function, arguments)


def _forking(function: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Call the function. Processes that SGLang starts in it are forked: they need no imports."""
    multiprocessing.set_start_method("fork", force=True)
    vars(multiprocessing)["set_start_method"] = lambda *_, **__: None  # it would choose "spawn"
    function(*arguments)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (i * (2 * seed + 7) + seed) % 500 for i in range(num_tokens)]


class TinyEngine:
    """The one engine of this process. Requests are handed to its scheduler without sockets.

    Args:
        config: As for `make_model`; see `sglang_models`.
        path: Directory of the model, if it is there already.
    """

    def __init__(
        self, model: str = "tiny", config: Any = None, path: str = "", **more: Any
    ) -> None:
        from make_models import make_model
        from sglang.srt.managers import scheduler as managers
        from sglang.srt.server_args import PortArgs, ServerArgs

        model_path = path or str(make_model(MODELS, model, config))
        managers.load_plugins()
        settings = ServerArgs(**options(model_path=model_path, skip_tokenizer_init=True, **more))
        settings.resolve_once()
        ports = PortArgs.init_new(settings)
        ranks = managers.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        managers.publish(settings, role="scheduler", ranks=ranks)
        self.scheduler = managers.Scheduler(settings, ports)
        self.tree = self.scheduler.tree_cache
        self.kv_pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._num_requests = 0

    def step(self) -> None:
        """Run one turn of the scheduler's loop."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler._sched_idled = True
            scheduler.on_idle()
            time.sleep(_IDLE_WAIT_S)
        scheduler.last_batch = batch

    def step_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _STEPS_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if condition():
                return
            self.step()
        raise TimeoutError("the engine did not get there")

    def add(
        self, token_ids: Sequence[int], num_new: int = 8, custom_params: Any = None, **fields: Any
    ) -> Any:
        """Queue a request; return SGLang's own object for it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._num_requests += 1
        sampling = SamplingParams(
            temperature=0, max_new_tokens=num_new, ignore_eos=True, custom_params=custom_params
        )
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"request-{self._num_requests}", input_text=None,
            input_ids=array.array("q", token_ids), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False,
            logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
            **fields,
        )  # fmt: skip
        self.scheduler.handle_generate_request(request)
        return self.scheduler.waiting_queue[-1]

    def generate(self, token_ids: Sequence[int], num_new: int = 8, **fields: Any) -> Any:
        request = self.add(token_ids, num_new, **fields)
        self.step_until(request.finished)
        for _ in range(3):  # what it stores
            self.step()
        return request

    def flush(self) -> None:
        """Empty the radix tree, and with it HiCache's host pool. Refused while a request runs."""
        self.step_until(self.scheduler.flush_cache)

    def update_weights(self, path: str, flush: bool = True) -> None:
        """Load another checkpoint's weights, and empty the radix tree or not. Before that requests
        end, unless they are paused."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        if flush and not self.scheduler._engine_paused:
            self.step_until(self.scheduler.is_fully_idle)
        request = UpdateWeightFromDiskReqInput(
            model_path=path, load_format="auto", flush_cache=flush
        )
        answer = self.scheduler.weight_updater.update_weights_from_disk(request)
        assert answer.success, answer.message

    def load_adapter(self, name: str, path: str) -> str:
        """Load a LoRA adapter; return SGLang's number of it."""
        from sglang.srt.lora.lora_registry import LoRARef
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        number = str(LoRARef().lora_id)
        request = LoadLoRAAdapterReqInput(
            lora_name=name, lora_path=path, pinned=False, lora_id=number
        )
        answer = self.scheduler.load_lora_adapter(request)
        assert answer.success, answer.error_message
        return number

    def kv_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return what the GPU's pool has of a prefix that is in the tree, layer by layer."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array.array("q", token_ids))
        node = self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        slots = self.tree.path_device_indices(node)
        assert len(slots) == len(token_ids)
        return [
            layer[slots].view(torch.uint8).numpy().tobytes()
            for layer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer)
        ]


OPEN_STATES = ("created", "ready", "running")
"""What the statistics call tasks that have not ended."""


def linker_options(
    linker: str = "FlexCacheLinker", module: str = "flexcache.integration.sglang", /, **extra: Any
) -> dict[str, Any]:
    """Return SGLang's settings; ``extra`` are FlexCache's."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": linker,
            "linker_module_path": module,
            "linker_extra_config": extra,
        },
    }


def engine_with_linker(ssd: str = "", **extra: Any) -> TinyEngine:
    """Make an engine that loads whatever is cached, though this machine may compute faster."""
    tiers = {"num_ssd_blocks": 400, "ssd_cache_dirs": [ssd]} if ssd else {}
    tiers = {"num_cpu_blocks": 200, "skip_slow_loads": False, **tiers}
    return TinyEngine(**linker_options(**{**tiers, **extra}))


def linker_of(engine: TinyEngine) -> Any:
    return engine.tree.linker.cache_linker


def manager_of(engine: TinyEngine) -> Any:
    return linker_of(engine).cache.manager


def settle(engine: TinyEngine) -> None:
    """Step until all is stored, in every tier."""

    def is_done() -> bool:
        tasks = manager_of(engine).stats()["tasks"]
        return not any(tasks[state] for state in OPEN_STATES)

    engine.step_until(lambda: not engine.tree.linker.pending_offloads)
    engine.step_until(is_done)


def forget_gpu(engine: TinyEngine, *tiers: str) -> None:
    """Empty the radix tree, once all is stored, and these tiers."""
    settle(engine)
    engine.flush()
    for tier in tiers:
        manager_of(engine).clear(tier)


def remember(engine: TinyEngine, tokens: Sequence[int]) -> Any:
    """Generate; return what to compare another time with: outputs and bytes."""
    request = engine.generate(tokens)
    return list(request.output_ids), engine.kv_bytes(tokens[: len(tokens) // PAGE * PAGE])


def check_again(engine: TinyEngine, tokens: Sequence[int], num_cached: int, expected: Any) -> None:
    """Generate, and compare with the outputs and bytes of another time."""
    request = engine.generate(tokens)
    assert request.cached_tokens == num_cached
    assert list(request.output_ids) == expected[0]
    assert engine.kv_bytes(tokens[: len(tokens) // PAGE * PAGE]) == expected[1]
