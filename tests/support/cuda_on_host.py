"""CUDA platform of vLLM on a fake GPU: streams, graphs, compiled operators.

    python cuda_on_host.py MODULE [ARGUMENT...]     runs a module with it

vLLM's tensors on the device "cuda" are host memory, and its operators are torch's own. What
FlexCache allocates on the device is memory of the fake GPU, where tests move the KV, too. All of
vLLM's streams compute on the thread that calls; so what waits on one of them waits on the thread.
No graph is captured, nothing is compiled for a GPU, and no time says anything.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from engines import ENGINE_ENV
from fake_gpu import FakeDigests, FakeKernel, FakeStream, FakeTorchCuda, fake_gpu
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
CAPABILITY = (9, 0)  # an H100's
TOTAL_BYTES = 80 * GIB
_ENVIRONMENT = {
    "CUDA_ON_HOST": "1",  # for `second_runner`
    "TORCH_COMPILE_DISABLE": "0",  # only compiled models have graphs of pieces
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


class EngineTorchCuda(FakeTorchCuda):
    """`torch.cuda` as vLLM and FlexCache use it in one process."""

    def __init__(self, gpu: Any) -> None:
        super().__init__(gpu, computes_on_host=True)
        self.CUDAGraph = RunAgain
        self.graph = Capture
        self.device = nullcontext
        self.Stream = type("Stream", (HostStream,), {"owner": self})

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host_empty = torch.empty
        super().install(monkeypatch)
        device_empty = torch.empty

        def empty(*size: Any, **options: Any) -> torch.Tensor:
            # Compiled code, which has no name, is vLLM's model.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] in ("flexcache", "fake_gpu"):
                return device_empty(*size, **options)
            return host_empty(*size, **options)

        monkeypatch.setattr(torch, "empty", empty)
        for name in ("Event", "Stream"):
            monkeypatch.setattr(torch, name, getattr(self, name))
        for name, module in {
            "copy_kernel": FakeKernel(self),
            "direct.digest_kernel": FakeDigests(self),
        }.items():
            monkeypatch.setitem(sys.modules, f"flexcache.transfer.{name}", module)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, answer in _ACCELERATOR.items():
            monkeypatch.setattr(torch.accelerator, name, _always(answer))
        # vLLM sets nothing of an allocator that it does not know.
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", _always("none"))
        run = threading.Thread.run

        def run_in_mode(thread: threading.Thread) -> None:
            with HostForCuda():
                run(thread)

        monkeypatch.setattr(threading.Thread, "run", run_in_mode)
        HostForCuda().__enter__()
        self.set_device(DEVICE)
        _install_operators()

    def __getattr__(self, name: str) -> Any:
        if name in _CUDA:
            return _always(_CUDA[name])
        return super().__getattr__(name)


class HostStream(FakeStream):
    """A stream of vLLM's."""

    owner: EngineTorchCuda

    def __init__(self, *_: Any, **__: Any) -> None:
        handle = FakeTorchCuda.Stream(self.owner, DEVICE).cuda_stream
        super().__init__(self.owner, handle, DEVICE.index)
        self.computes_on_host = True


class RunAgain:
    """In place of a CUDA graph: its replay calls again what was captured. As on a GPU, the
    connector hears nothing of it.

    Attributes:
        num_replays: Number of all replays of the whole model, and of pieces.
    """

    num_replays: ClassVar[Counter[str]] = Counter()
    kind: str
    run: Callable[[], None]

    def replay(self) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        connector = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.run()
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        self.num_replays[self.kind] += 1


class Capture:
    """In place of `torch.cuda.graph`, around one of two places where vLLM captures: the whole model
    by a call of ``forward_fn``, or a piece of it, whose ``output`` stays where it is."""

    def __init__(self, graph: RunAgain, *_: Any, **__: Any) -> None:
        self._graph, self._frame = graph, sys._getframe(1)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None:
        from vllm.config import CUDAGraphMode

        graph, there = self._graph, dict(self._frame.f_locals)
        if "forward_fn" in there:
            graph.kind, graph.run = "whole", partial(there["forward_fn"], CUDAGraphMode.NONE)
            return
        piece, output = partial(there["self"].runnable, *there["args"]), there["output"]

        def run() -> None:
            for kept, made in zip(_tensors(output), _tensors(piece()), strict=True):
                kept.copy_(made)

        graph.kind, graph.run = "piece", run


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


class HostForCuda(TorchFunctionMode):
    """Has torch use host memory wherever the device "cuda" is asked for."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("pin_memory", "cuda"):
            return arguments[0]
        if function is torch.device:
            return function(*arguments, **(options or {}))
        options = {name: _on_host(value) for name, value in (options or {}).items()}
        options.pop("pin_memory", None)
        return function(*map(_on_host, arguments), **options)


def _on_host(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if is_device else value


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


_MEMORY_STATS: dict[str, int] = {}
_CUDA = {
    "is_available": True,
    "device_count": 1,
    "get_device_capability": CAPABILITY,
    "get_device_name": "Fake GPU",
    "get_device_properties": SimpleNamespace(
        name="Fake GPU", total_memory=TOTAL_BYTES, multi_processor_count=132, is_integrated=False,
        major=9, minor=0,
    ),
    "mem_get_info": (TOTAL_BYTES - GIB, TOTAL_BYTES),
    "manual_seed_all": None,
    "get_rng_state": None,
    "set_rng_state": None,
    "is_current_stream_capturing": False,
    "graph_pool_handle": (0, 0),
    "memory_stats": _MEMORY_STATS,
    "reset_peak_memory_stats": None,
    "max_memory_allocated": GIB,
    "synchronize": None,
    "empty_cache": None,
}  # fmt: skip
# It is not available, so that `torch.compile` asks for no stream of it.
_ACCELERATOR = {
    "device_count": 1,
    "set_device_index": None,
    "current_device_index": 0,
    "synchronize": None,
    "empty_cache": None,
    "empty_host_cache": None,
    "get_memory_info": (TOTAL_BYTES - GIB, TOTAL_BYTES),
    "memory_stats": _MEMORY_STATS,
    "memory_reserved": GIB,
    "max_memory_allocated": GIB,
    "reset_peak_memory_stats": None,
}  # fmt: skip


class NoPasses:
    """In place of vLLM's passes over a compiled model, which look for compiled operators."""

    def configure(self, config: Any) -> None: ...

    def uuid(self) -> str:
        return ""


def _install_operators() -> None:
    """Stand in for vLLM's compiled libraries: with what a Llama calls that uses torch's operators
    where vLLM lets it choose."""
    for name in _COMPILED:
        sys.modules[name] = ModuleType(name)
    passes = ModuleType("vllm.compilation.passes.pass_manager")
    vars(passes)["PostGradPassManager"] = NoPasses
    sys.modules[passes.__name__] = passes
    for namespace, operators in _OPERATORS.items():
        setattr(torch.ops, namespace, SimpleNamespace(**operators))


def _write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, *_: Any,
) -> None:  # fmt: skip
    is_used = slots >= 0
    used, size = slots[is_used], key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[used // size, used % size] = new[: len(slots)][is_used]


def _attend(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, ...]:
    """FlashAttention 3 over paged KV. Rows that pad a graph's batch have no queries."""
    out, starts, lengths, table, scale, causal = (more[i] for i in (3, 4, 8, 11, 20, 21))
    size, share = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    for length, pages, first, stop in zip(
        lengths.tolist(), table.long(), starts.tolist(), starts.tolist()[1:], strict=False
    ):
        if first == stop:
            continue
        keys, values = (
            cache[pages[: -(-length // size)]].flatten(0, 1)[:length].transpose(0, 1)
            .repeat_interleave(share, 0)
            for cache in (key_cache, value_cache)
        )  # fmt: skip
        new = stop - first
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if causal else None
        found = torch.nn.functional.scaled_dot_product_attention(
            query[first:stop].transpose(0, 1), keys, values, attn_mask=mask, scale=scale
        )
        out[first:stop] = found.transpose(0, 1)
    return out, out, out, out


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "_C_cache_ops": {"reshape_and_cache_flash": _write_kv},
    "_C": {
        "get_cuda_view_from_cpu_tensor": _same,
        "weak_ref_tensor": _same,
        "silu_and_mul": _always(None),  # looked up, not called
        "cutlass_scaled_mm_supports_block_fp8": _always(False),
        "cutlass_scaled_mm_supports_fp8": _always(False),
        "cutlass_scaled_mm_supports_fp4": _always(False),
        "cutlass_group_gemm_supported": _always(False),
    },
    "_vllm_fa3_C": {
        "fwd": _attend,
        "get_scheduler_metadata": lambda *_: torch.zeros(64, dtype=torch.int32),
    },
}


def main() -> None:
    """Run a module on the stand-ins. Fails at the end if the driver was misused."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    os.environ.update(ENGINE_ENV | _ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch, fake_gpu(patch) as gpu:
        EngineTorchCuda(gpu).install(patch)
        runpy.run_module(module, run_name="__main__")
    os._exit(0)  # some engines' threads do not end by themselves


if __name__ == "__main__":
    from cuda_on_host import main  # one of this module, for all

    main()
