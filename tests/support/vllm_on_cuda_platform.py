"""An engine of vLLM's CUDA wheel, see `cuda_on_host`, that serves prompts from each of FlexCache's
tiers. Prints, as JSON, what was seen.

    python cuda_on_host.py vllm_on_cuda_platform '{"flexcache": SETTINGS, "engine": ARGUMENTS}'

FlexCache's settings, null for an engine without it, and further arguments of `vllm.LLM`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from cuda_on_host import RunAgain
from engine_memory import DeviceMemory
from engines import Engine, engine_arguments, make_prompt
from fake_gpu import FakeGpu
from probe_connector import compare_probes
from vllm_on_fake_gpu import FAKE_GPU, LATE_US, MODEL, FakeGpuConnector

LENGTHS = (500, 333, 65)
ALONE = 2  # the prompt of which one token is computed, as in a step that decodes
PROMPTS = [make_prompt(length, seed + 7001) for seed, length in enumerate(LENGTHS)]
_OPERATORS_OF_TORCH: dict[str, Any] = {
    "compilation_config": {
        "custom_ops": ["none"], "backend": "eager", "cudagraph_capture_sizes": [1, 4, 32],
    },
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
}  # fmt: skip


class Rehearsal:
    """An engine, and what it has shown."""

    def __init__(self, engine: Engine, gpu: FakeGpu, has_cache: bool) -> None:
        self._engine = engine
        self._gpu = gpu
        self._has_cache = has_cache

    def serve(self, prompts: Sequence[list[int]] = PROMPTS) -> dict[str, Any]:
        before, replays = self._num_blocks(), RunAgain.num_replays.copy()
        outputs = self._engine.generate_all(list(prompts))
        self._gpu.thaw()
        self._engine.drain()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "moved": {op: n - before[op] for op, n in self._num_blocks().items() if n > before[op]},
            "replays": RunAgain.num_replays - replays,
        }

    def forget(self, *tiers: str) -> None:
        """Forget what the GPU holds, and other tiers."""
        self._engine.settle()
        self._engine.forget_gpu()
        for tensor in FakeGpuConnector.tensors.values():
            tensor.normal_(0, 3)
        for tier in tiers:
            self._engine.manager.clear(tier)

    def _num_blocks(self) -> dict[str, int]:
        if not self._has_cache:
            return {}
        return {name: op["blocks"] for name, op in self._engine.manager.stats()["ops"].items()}


def rehearse(options: dict[str, Any]) -> dict[str, Any]:
    torch_cuda: Any = torch.cuda
    gpu = torch_cuda.gpu
    with tempfile.TemporaryDirectory() as directory:
        os.environ["KV_PROBE_DIR"] = directory
        from vllm import LLM
        from vllm.model_executor.models import registry
        from vllm.v1.worker import gpu_worker

        # In a process of its own vLLM has none of this.
        registry._run_in_subprocess = lambda function: function()
        # There are no kernels to compile.
        gpu_worker.kernel_warmup = gpu_worker.warmup_kernels = lambda *_: None
        FakeGpuConnector.memory = DeviceMemory(gpu, torch_cuda)
        FakeGpuConnector.in_one_piece = False
        gpu.set_speed(start_us=LATE_US, late_us=LATE_US)
        llm = LLM(**_arguments(options, directory))
        seen: dict[str, Any] = {"vllm": _describe(llm)}
        rehearsal = Rehearsal(Engine(llm, Path(directory)), gpu, options["flexcache"] is not None)
        seen["cold"] = rehearsal.serve()
        if options["flexcache"] is not None:
            seen["GPU"] = rehearsal.serve()
            rehearsal.forget()
            seen["DRAM"] = rehearsal.serve()
            rehearsal.forget()
            seen["DRAM, alone"] = rehearsal.serve([PROMPTS[ALONE]])
            rehearsal.forget("CPU")
            seen["SSD"] = rehearsal.serve()
            seen["probes"] = compare_probes(Path(directory))
            rehearsal.forget()
            torch_cuda.Event.wait = lambda *_: None
            gpu.freeze()  # however slow the model is, the copies come too late
            seen["without waiting"] = rehearsal.serve([PROMPTS[ALONE]])
        llm.llm_engine.engine_core.shutdown()
    return seen


def _arguments(options: dict[str, Any], directory: str) -> dict[str, Any]:
    from make_models import make_model
    from paths import MODELS

    make_model(MODELS, MODEL)
    extra = {
        "cpu_cache_gb": 0.05, "ssd_cache_gb": 0.1, "ssd_cache_dirs": [f"{directory}/ssd"],
        **(options["flexcache"] or {}),
    }  # fmt: skip
    arguments = engine_arguments(MODEL, extra, connector=FAKE_GPU) | _OPERATORS_OF_TORCH
    del arguments["block_size"]  # with one that is given FlexCache prefers no layout
    if options["flexcache"] is None:
        del arguments["kv_transfer_config"]
    return arguments | options["engine"]


def _describe(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = config.compilation_config.static_forward_context.values()
    return {
        "version": vllm.__version__,
        "directory": str(Path(vllm.__file__).parent),
        "device": config.device_config.device_type,
        "runner": type(worker.model_runner).__module__,
        "is_asynchronous": config.scheduler_config.async_scheduling,
        "backends": sorted({layer.get_attn_backend().get_name() for layer in layers}),
        "layout": config.cache_config.kv_cache_layout,
        "graphs": config.compilation_config.cudagraph_mode.name,
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(rehearse(json.loads(sys.argv[1]))), flush=True)
