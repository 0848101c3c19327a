"""A real vLLM engine on a CPU whose KV is in a fake GPU's memory, as far as FlexCache can see.

FlexCache's rank gets `DeviceTensor`s, so it copies through the fake driver: on streams, late, and
behind events. The model computes with the same bytes on the engine's thread, which therefore waits
where a compute stream would.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_memory import DeviceMemory, Tensors, device_memory
from engines import ENGINE_ENV, Engine, engine_arguments
from probe_connector import ProbeConnector, compare_probes

MODEL = "tiny"
LATE_US = 8_000.0
"""Copies take this long, and land up to this much later. A layer of the model takes a tenth."""
READY_S = 120.0
NUM_LATE_STEPS = 20
FAKE_GPU = {"kv_connector": "FakeGpuConnector", "kv_connector_module_path": __name__}

Prompts = Sequence[list[int]]


class FakeGpuConnector(ProbeConnector):
    """Moves the engine's KV tensors to a fake GPU when they are registered.

    Attributes:
        memory: The GPU's; to be set before the engine starts, like ``in_one_piece``.
        in_one_piece: Whether all layers of a block are neighbours.
        tensors: The engine's, as its model sees them.
    """

    memory: DeviceMemory
    in_one_piece: bool
    tensors: Tensors

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.in_one_piece:
            together = torch.stack(list(kv_caches.values()), dim=1)
            kv_caches = dict(zip(kv_caches, together.unbind(1), strict=True))
        placed = self.memory.place(kv_caches)
        layers = self._worker._vllm_config.compilation_config.static_forward_context
        for name, tensor in placed.items():
            layers[name].bind_kv_cache(tensor)
        super().register_kv_caches(self.memory.lend(placed))
        self._layers = FakeGpuConnector.tensors = placed


def serve_alone(prompts: Prompts) -> list[list[int]]:
    """Return the tokens that vLLM generates without a KV connector."""
    from vllm import LLM

    llm = LLM(**engine_arguments(MODEL, {}) | {"kv_transfer_config": None})
    outputs = Engine(llm, Path()).generate_all(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


def serve_on_fake_gpu(prompts: Prompts, in_one_piece: bool) -> dict[str, Any]:
    """Serve prompts that are not cached, then from DRAM: between steps, by layer, while the engine
    sleeps in between, and by layer while the model waits for no copy. Returns what was seen."""
    from flexcache.integration.adapter import LayerwiseRule
    from flexcache.transfer import device_worker

    FakeGpuConnector.in_one_piece = in_one_piece
    with pytest.MonkeyPatch.context() as patch, _running_engine(patch) as engine:
        gpu, torch_cuda = FakeGpuConnector.memory.gpu, FakeGpuConnector.memory.torch
        gets = engine.scheduler.connector._scheduler.gets
        patch.setattr(device_worker, "_MIN_PART_BYTES", 0)  # a part for each layer

        def serve(layerwise: str) -> dict[str, Any]:
            engine.forget_gpu()
            for tensor in FakeGpuConnector.tensors.values():
                tensor.normal_(0, 3)
            patch.setattr(gets, "layerwise", LayerwiseRule(layerwise, None))
            gpu.forget_copy_calls()
            outputs = engine.generate_all(prompts)
            gpu.thaw()
            engine.drain()
            return {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "num_copies": sum(call.num_runs for call in gpu.copy_calls),
                "num_urgent": sum(call.priority < 0 for call in gpu.copy_calls),
            }

        seen = {"not cached": serve("off"), "between steps": serve("off"), "by layer": serve("on")}
        seen["probes"] = compare_probes(engine.probe_dir)
        patch.setattr(gets, "layerwise", LayerwiseRule("off", None))
        seen["asleep"] = _sleep_during_a_load(engine, prompts[0])
        patch.setattr(torch_cuda.Event, "wait", lambda event, stream=None: None)
        gpu.freeze()  # however slow the model is, the copies come too late
        seen["without waiting"] = serve("on")
        gpu.wait_idle()
    return seen


def serve_late_writes(prompts: Prompts) -> list[dict[str, Any]]:
    """Have a step's KV written late, when its put is launched already; then serve what was stored.
    The second prompt's put waits for no step. Returns tokens, and how many were cached."""
    from flexcache.transfer.cuda_copier import CudaCopier

    FakeGpuConnector.in_one_piece = False
    seen = []
    with pytest.MonkeyPatch.context() as patch, _running_engine(patch) as engine:
        for number, prompt in enumerate(prompts[:2]):
            if number == 1:
                patch.setattr(CudaCopier, "fence", lambda _: FakeGpuConnector.memory.torch.Event())
            with _written_late(engine) as launch:
                engine.generate(prompt, 1)
                launch()
            engine.forget_gpu()
            for tensor in FakeGpuConnector.tensors.values():
                tensor.normal_(0, 3)
            output = engine.generate(prompt)
            tokens = list(output.outputs[0].token_ids)
            seen.append({"tokens": tokens, "cached": output.num_cached_tokens})
    return seen


@contextmanager
def _written_late(engine: Engine) -> Iterator[Callable[[], None]]:
    """Let the compute stream write the KV of the next step when the block ends. Yields a function
    that steps the engine until its put can do no more without that."""
    gpu, tensors = FakeGpuConnector.memory.gpu, FakeGpuConnector.tensors
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    held: list[int] = []
    execute = runner.execute_model

    def execute_late(*arguments: Any, **options: Any) -> Any:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        result = execute(*arguments, **options)
        written = {name: tensor.clone() for name, tensor in tensors.items()}
        if not held and not all(torch.equal(before[name], written[name]) for name in before):
            stream = FakeGpuConnector.memory.torch.current_stream().handle
            held.append(gpu.hold(stream))
            for name, tensor in tensors.items():
                tensor.copy_(before[name])
            gpu.queue(stream, lambda: [tensors[name].copy_(written[name]) for name in written])
        return result

    def launch() -> None:
        for _ in range(NUM_LATE_STEPS):
            engine.llm.llm_engine.step()
            gpu.wait_quiet()
        assert held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", execute_late)
        yield launch
        gpu.fire(held[0])
        engine.drain()


def _sleep_during_a_load(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Take the memory away while copies run, as vLLM does in its sleep, and give it back."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    gpu, tensors = FakeGpuConnector.memory.gpu, FakeGpuConnector.tensors.values()
    worker, llm_engine = get_kv_transfer_group()._worker, engine.llm.llm_engine
    engine.forget_gpu()
    gpu.forget_copy_calls()
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    gpu.set_speed(start_us=1_000_000)  # they run still when the memory is taken away
    llm_engine.add_request("asleep", {"prompt_token_ids": prompt}, sampling)
    _step(llm_engine, lambda _: bool(gpu.copy_calls))
    worker.unregister()
    gpu.set_speed(start_us=LATE_US, late_us=LATE_US)
    for tensor in tensors:
        tensor.zero_()
    gpu.wait_idle()
    written = sum(int(tensor.count_nonzero()) for tensor in tensors)
    worker.restore()
    engine.manager.wait_ready(READY_S)
    [ended] = _step(llm_engine, lambda outputs: any(output.finished for output in outputs))
    return {"tokens": list(ended.outputs[0].token_ids), "written": written}


def _step(llm_engine: Any, is_over: Callable[[list[Any]], bool]) -> list[Any]:
    """Run the engine's steps up to one that ends it; return that step's outputs."""
    give_up = time.monotonic() + READY_S
    while not is_over(outputs := llm_engine.step()):
        assert time.monotonic() < give_up, "the engine does not get there"
    return outputs


@contextmanager
def _running_engine(patch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Run the engine in this process. Fails at the end if the driver was misused."""
    with tempfile.TemporaryDirectory() as directory, device_memory(patch) as memory:
        os.environ.update(ENGINE_ENV, KV_PROBE_DIR=directory)
        from vllm import LLM

        memory.gpu.set_speed(start_us=LATE_US, late_us=LATE_US)
        FakeGpuConnector.memory = memory
        extra = {"cpu_cache_gb": 0.05}
        llm = LLM(**engine_arguments(MODEL, extra, connector=FAKE_GPU))
        try:
            yield Engine(llm, Path(directory))
        finally:
            llm.llm_engine.engine_core.shutdown()
