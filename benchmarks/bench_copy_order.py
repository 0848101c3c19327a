"""Copies to a GPU beside other work, as they were done and as they are: on a fake GPU, by a model
of its link.

    python benchmarks/bench_copy_order.py [--rounds 9]

Not a measurement of a GPU: its driver (`tests/fakecuda`) makes calls and copies take as long as the
model says. Three questions:

* A driver before 12.8 takes copies one by one. How long does queueing them take the rank's thread,
  alone and beside a busy Python thread, if each call gives the interpreter lock away or keeps it?
* How long does a load by layer take behind a large load, if all of that is queued at once, or at
  most `BESIDE_LAYERS` of it? Everything is `SLOWER` times slower and pieces that much smaller, so
  that the fake's own work is small; times are divided by it again.
* Which share of the link does a large load have beside a busy Python thread, if as much of it is
  queued as where loads by layer come, or as elsewhere? Here sizes and speed are `SMALLER` times
  smaller, and times are as they are: the interpreter's switch interval is.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

import numpy as np
import pytest
import search_path  # noqa: F401
import torch
from engine_memory import DeviceMemory, device_memory

from flexcache.client.rank_ops import EVENT_POLL_S
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import bytes_per_block, describe_kv_caches
from flexcache.transfer import device_worker
from flexcache.transfer.copier import CopyLane, open_copier
from flexcache.transfer.cuda_copier import CudaStreams
from flexcache.transfer.cuda_driver import CudaDriver
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Execute, pack_ids

NUM_COPIES, CALL_US, COPY_BYTES = 1024, 4, 64
SLOWER, GB_PER_S = 25, 50
NUM_LAYERS, LAYER_BYTES = 4, 64 << 10
LARGE, SMALL = 640, 16  # blocks
QUEUE_BYTES = {"all at once": 1 << 60, "pieces": device_worker.BESIDE_LAYERS // SLOWER}
LOAD_BLOCKS, LOAD_LAYER_BYTES, SMALLER = 1024, 1 << 20, 250
IN_FLIGHT = {
    "128 MiB, in pieces of 32": (device_worker.BESIDE_LAYERS, device_worker._PIECE_BYTES),
    "512 MiB, in pieces of 256": (device_worker.MOST_BYTES, device_worker._LARGE_PIECE_BYTES),
}


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run Python code on another thread, as an engine does."""
    is_over = False

    def compute() -> None:
        while not is_over:
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        thread.join()


def time_single_copies(rounds: int) -> None:
    print(f"{NUM_COPIES:,} single copies of pinned memory, {CALL_US} us a call: ms to queue them\n")
    print("| interpreter lock | alone | beside a busy thread |\n| --- | ---: | ---: |")
    size = NUM_COPIES * COPY_BYTES
    with (
        pytest.MonkeyPatch.context() as patch,
        device_memory(patch) as memory,
        HostSegment.create(size, 1) as segment,
    ):
        segment.map()
        driver, there = CudaDriver.load(), memory.gpu.allocate(size)
        streams = CudaStreams(driver, memory.device)
        driver.register(segment.address, segment.size)
        memory.gpu.set_speed(call_us=CALL_US)
        offsets = np.arange(NUM_COPIES, dtype=np.int64) * COPY_BYTES
        runs = there.address + offsets, segment.address + offsets, np.full(NUM_COPIES, COPY_BYTES)
        stream = streams[CopyLane.LOADS].cuda_stream

        def queue(keeps_lock: bool) -> float:
            started = time.perf_counter()
            driver.copy_singly(*runs, stream, is_pinned=keeps_lock)
            taken = time.perf_counter() - started
            memory.gpu.wait_idle()
            return taken

        for text, keeps_lock in (("given away at each call", False), ("kept", True)):
            cells = []
            for beside in (nullcontext, busy_thread):
                with beside():
                    times = [queue(keeps_lock) for _ in range(rounds)]
                cells.append(f"{1e3 * median(times):.1f} ({1e3 * max(times):.0f})")
            print(f"| {text} | {' | '.join(cells)} |", flush=True)
        driver.unregister(segment.address)
        for step in streams.closing_steps():
            step()


@contextmanager
def opened_worker(
    queue_bytes: int, piece_bytes: int, count: int, layer_bytes: int, gb_per_s: float
) -> Iterator[DeviceWorker]:
    with pytest.MonkeyPatch.context() as patch, device_memory(patch) as memory:
        assert isinstance(memory, DeviceMemory)
        for module, names, size in (
            (device_worker, ("MOST_BYTES", "BESIDE_LAYERS"), queue_bytes),
            (device_worker, ("_PIECE_BYTES", "_LARGE_PIECE_BYTES"), piece_bytes),
        ):
            for name in names:
                patch.setattr(module, name, size)
        made = {
            f"layer {i}": torch.zeros((count, layer_bytes), dtype=torch.uint8)
            for i in range(NUM_LAYERS)
        }
        tensors = memory.lend(memory.place(made))
        size = bytes_per_block(tensors, count)
        with HostSegment.create(size, count) as segment:
            segment.map()
            copier = open_copier(memory.device)
            copier.attach(segment, lambda: None)
            memory.gpu.set_speed(bytes_per_us=gb_per_s * 1e3)
            worker = DeviceWorker([describe_kv_caches(tensors, size)], segment, copier)
            yield worker
            worker.close()


def time_layers(worker: DeviceWorker, num_before: int) -> float:
    """Return the seconds that a load by layer takes behind a load of so many blocks."""
    blocks = np.arange(LARGE, LARGE + SMALL)
    if num_before:
        before = pack_ids(np.arange(num_before))
        worker.execute(Execute(1, OpKind.H2D, before, before, 1))
        while worker.has_work and not worker.only_waits:  # queued as far as it may be
            worker.advance()
    started = time.perf_counter()
    watched = worker.gates.load_by_layer(2, SMALL)
    worker.execute(Execute(2, OpKind.H2D, pack_ids(blocks), pack_ids(blocks), 2, True))

    def run() -> None:
        while worker.has_work:
            worker.advance()
            time.sleep(10e-6 * SLOWER)

    copying = threading.Thread(target=run)
    copying.start()
    assert watched.wait_all(60)
    taken = time.perf_counter() - started
    copying.join()
    worker.gates.end_layer_load(2)
    return taken / SLOWER


def time_layer_loads(rounds: int) -> None:
    mib = LARGE * NUM_LAYERS * LAYER_BYTES >> 20
    print(f"\nA load by layer of {SMALL} blocks, {GB_PER_S} GB/s: ms until all layers have come\n")
    print(f"| in flight | alone | behind a load of {mib} MiB |\n| --- | ---: | ---: |")
    for text, queue_bytes in QUEUE_BYTES.items():
        with opened_worker(
            queue_bytes, queue_bytes // 4, LARGE + SMALL, LAYER_BYTES // SLOWER,
            GB_PER_S / SLOWER / SLOWER,
        ) as worker:  # fmt: skip
            alone, behind = (
                median(time_layers(worker, num_before) for _ in range(rounds))
                for num_before in (0, LARGE)
            )
        print(f"| {text} | {1e3 * alone:.1f} | {1e3 * behind:.1f} |", flush=True)


def time_large_load(worker: DeviceWorker) -> float:
    """Return the seconds of a load of all blocks, queued by a thread of its own as a rank's."""
    blocks = pack_ids(np.arange(LOAD_BLOCKS))

    def run() -> None:
        worker.execute(Execute(1, OpKind.H2D, blocks, blocks, 1))
        while worker.has_work:
            worker.advance()
            time.sleep(EVENT_POLL_S if worker.only_waits else 0)  # it looks for messages, too

    started = time.perf_counter()
    copying = threading.Thread(target=run)
    copying.start()
    copying.join()
    return time.perf_counter() - started


def time_large_loads(rounds: int) -> None:
    size = LOAD_BLOCKS * NUM_LAYERS * LOAD_LAYER_BYTES
    print(f"\nA load of {size >> 20} MiB, {GB_PER_S} GB/s: its share of the link\n")
    print("| in flight | alone | beside a busy thread |\n| --- | ---: | ---: |")
    at_best = size / GB_PER_S / 1e9
    shares: dict[str, list[list[float]]] = {text: [[], []] for text in IN_FLIGHT}
    besides: Sequence[Callable[[], AbstractContextManager[None]]] = (nullcontext, busy_thread)
    for _ in range(rounds):
        for text, (queue_bytes, piece_bytes) in IN_FLIGHT.items():
            sizes = (queue_bytes, piece_bytes, LOAD_LAYER_BYTES)
            queued, piece, layer = (each // SMALLER for each in sizes)
            with opened_worker(queued, piece, LOAD_BLOCKS, layer, GB_PER_S / SMALLER) as worker:
                for cell, beside in zip(shares[text], besides, strict=True):
                    time_large_load(worker)
                    with beside():
                        cell.append(at_best / time_large_load(worker))
    for text, cells in shares.items():
        row = " | ".join(f"{median(each):.2f} ({min(each):.2f})" for each in cells)
        print(f"| {text} | {row} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    time_single_copies(rounds)
    time_layer_loads(rounds)
    time_large_loads(rounds)


if __name__ == "__main__":
    main()
