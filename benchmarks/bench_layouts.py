"""vLLM's KV layouts, as one load of a prompt's blocks sees them: on a fake GPU, by a model of its
link.

    python benchmarks/bench_layouts.py [--blocks 256] [--rounds 3]

Not a measurement of a GPU: its driver (`tests/fakecuda`) makes a copy wait as long as the model
says, per call, per run and per byte. The link and the model's layers are `SLOWER` times slower than
modelled and blocks `SMALLER` times smaller, so that the fake's own work is small; times are divided
by it again. What FlexCache itself does per copy is therefore not in the figures.

* between steps: the load, then the model's layers.
* by layer: the model runs each layer as soon as its KV has come.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import pytest
import search_path  # noqa: F401
import torch
from engine_memory import DeviceMemory, device_memory
from fake_gpu import FakeGpu

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import bytes_per_block, describe_kv_caches
from flexcache.transfer import device_worker
from flexcache.transfer.copier import open_copier
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Execute, pack_ids

SLOWER, SMALLER = 20, 64
GB_PER_S, START_US, RUN_US, CALL_US = 55, 10, 0.5, 4
NUM_LAYERS, NUM_TOKENS, HEAD_BYTES = 32, 16, 512  # a head's K and V of a token, of 128 bf16 each
LAYERS_MS = 20  # of the model, for what is left to compute

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    layout: str
    heads: int
    driver: int

    def tensors(self, num_blocks: int) -> Tensors:
        """Make the layers' tensors, as views of one buffer in the layout's order."""
        sizes = {"L": NUM_LAYERS, "B": num_blocks, "H": self.heads, "N": NUM_TOKENS,
                 "C": HEAD_BYTES // SMALLER}  # fmt: skip
        buffer = torch.zeros([sizes[dim] for dim in self.layout], dtype=torch.uint8)
        in_order = buffer.permute([self.layout.index(dim) for dim in "LBHNC"])
        return {f"layer {i}": layer for i, layer in enumerate(in_order.unbind(0))}


@contextmanager
def opened(case: Case, num_blocks: int) -> Iterator[tuple[DeviceWorker, FakeGpu]]:
    with pytest.MonkeyPatch.context() as patch, device_memory(patch) as memory:
        assert isinstance(memory, DeviceMemory)
        memory.gpu.set_version(case.driver)
        sizes = "_PIECE_BYTES _LARGE_PIECE_BYTES _MIN_PART_BYTES MOST_BYTES BESIDE_LAYERS"
        for name in sizes.split():
            patch.setattr(device_worker, name, getattr(device_worker, name) // SMALLER)
        tensors = memory.lend(memory.place(case.tensors(num_blocks)))
        size = bytes_per_block(tensors, num_blocks)
        with HostSegment.create(size, num_blocks) as segment:
            segment.map()
            copier = open_copier(memory.device)
            copier.attach(segment, lambda: None)
            memory.gpu.set_speed(
                call_us=CALL_US * SLOWER,
                start_us=(START_US if case.driver >= 12_080 else RUN_US) * SLOWER,
                run_us=RUN_US * SLOWER,
                bytes_per_us=GB_PER_S * 1e3 / SLOWER / SMALLER,
            )
            worker = DeviceWorker([describe_kv_caches(tensors, size)], segment, copier)
            yield worker, memory.gpu
            worker.close()


def run_until_done(worker: DeviceWorker) -> None:
    while worker.has_work:
        worker.advance()
        if worker.only_waits:
            time.sleep(50e-6 * SLOWER)


def load(worker: DeviceWorker, num_blocks: int, gated: bool) -> None:
    """Order a load of all blocks, scattered in the pool and in the engine."""
    random = np.random.default_rng(1)
    source, target = (pack_ids(random.permutation(num_blocks)) for _ in range(2))
    worker.execute(Execute(1, OpKind.H2D, source, target, 1, gated))


def between_steps(worker: DeviceWorker, num_blocks: int) -> list[float]:
    started = time.perf_counter()
    load(worker, num_blocks, gated=False)
    run_until_done(worker)
    loaded = time.perf_counter() - started
    time.sleep(LAYERS_MS * 1e-3 * SLOWER)
    return [loaded, loaded, time.perf_counter() - started]


def by_layer(worker: DeviceWorker, num_blocks: int) -> list[float]:
    started = time.perf_counter()
    watched = worker.gates.load_by_layer(1, num_blocks)
    load(worker, num_blocks, gated=True)
    copying = threading.Thread(target=run_until_done, args=(worker,))
    copying.start()
    seen = []
    for i in range(NUM_LAYERS):
        assert watched.wait_layer(f"layer {i}", 60)
        seen.append(time.perf_counter() - started)
        time.sleep(LAYERS_MS * 1e-3 * SLOWER / NUM_LAYERS)
    copying.join()
    worker.gates.end_layer_load(1)
    return [seen[0], seen[-1], time.perf_counter() - started]


WAYS: dict[str, Callable[[DeviceWorker, int], list[float]]] = {
    "between steps": between_steps,
    "by layer": by_layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{asked.blocks} blocks of {NUM_LAYERS} layers; ms until the first and the last layer")
    print(f"has come, and until the model ({LAYERS_MS} ms) is through\n")
    print("| layout | heads | driver | copies | | first | last | model |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for heads in (8, 1):
        for driver in (13_000, 12_000):
            for layout in ("LBNHC", "BLNHC", "BLHNC", "BHLNC"):
                case = Case(layout, heads, driver)
                with opened(case, asked.blocks) as (worker, gpu):
                    for way in WAYS:
                        show(case, way, worker, gpu, asked.blocks, asked.rounds)


def show(
    case: Case, way: str, worker: DeviceWorker, gpu: FakeGpu, num_blocks: int, rounds: int
) -> None:
    gpu.forget_copy_calls()
    rows = [WAYS[way](worker, num_blocks) for _ in range(rounds)]
    copies = sum(call.num_runs for call in gpu.copy_calls) // rounds
    first, last, model = (1e3 * median(column) / SLOWER for column in zip(*rows, strict=True))
    driver = f"{case.driver // 1000}.{case.driver % 1000 // 10}"
    print(f"| {case.layout} | {case.heads} | {driver} | {copies:,} | {way} "
          f"| {first:.1f} | {last:.1f} | {model:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
