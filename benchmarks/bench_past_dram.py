"""Prompts between KV tensors and SSD past DRAM, beside the same through a DRAM tier.

A cache of SSD alone and one with DRAM above it take turns on one device. Stores end when they are
durable. A load is of a prompt that only SSD has; its time is what it adds to the time to the first
token. What a bare loop reads and writes of the same bytes is the bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from flexcache.bench.dram import CpuEngine
from flexcache.bench.ssd import BareLoop
from flexcache.bench.suite import Case, Result
from flexcache.storage.block_io import QUEUE_DEPTH, Direction, open_block_io

NUM_LAYERS, RUN_BYTES = 32, 64 << 10  # blocks of 2 MiB, as of a model of 8B parameters
BLOCK_BYTES = NUM_LAYERS * RUN_BYTES
NUM_SLOTS_PER_BLOCK = 4  # stored prompts differ: room for some


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    sizes, rounds = ((16, 64, 256), 10) if thorough else ((64,), 5)
    return [
        Case(f"{16 * n:,} tokens", partial(both_caches, directory / f"{n}", n, rounds, seed))
        for n in sizes
    ]


class OnePrompt:
    """A cache that keeps prompts as long as its engine's KV."""

    def __init__(self, directory: Path, num_blocks: int, seed: int, num_cpu_blocks: int) -> None:
        self.engine = CpuEngine(
            NUM_LAYERS, RUN_BYTES, num_blocks, seed, num_cpu_blocks=num_cpu_blocks,
            num_ssd_blocks=NUM_SLOTS_PER_BLOCK * num_blocks, ssd_cache_dirs=[str(directory)],
            skip_slow_loads=False,
        )  # fmt: skip
        self._order, self._other_order = self.engine.order(), self.engine.order()
        self.store()
        original = self.engine.memory.clone()
        self.engine.memory.zero_()
        self.load()
        self.engine.check_blocks(self._other_order, original, self._order)
        self.engine.memory.copy_(torch.roll(original, 1))

    def store(self) -> float:
        """Store a new prompt durably; return the milliseconds."""
        self._prompt = self.engine.prompt(self.engine.num_blocks)
        return _milliseconds(
            lambda: self.engine.store([self._prompt], self._order, completely=True)
        )

    def load(self) -> float:
        """Load the last prompt from SSD; return the milliseconds."""
        self.engine.manager.clear("CPU")
        return self.load_cached()

    def load_cached(self) -> float:
        """Load the last prompt from wherever it is; return the milliseconds."""
        return _milliseconds(lambda: self.engine.load([self._prompt], self._other_order))


def both_caches(directory: Path, num_blocks: int, rounds: int, seed: int) -> Iterator[Result]:
    directory.mkdir(parents=True, exist_ok=True)
    size = num_blocks * BLOCK_BYTES
    with ExitStack() as stack:
        io = open_block_io("auto", QUEUE_DEPTH)
        stack.callback(io.close)
        bare = BareLoop(directory, size, BLOCK_BYTES, io)
        alone = OnePrompt(directory / "alone", num_blocks, seed, 0)
        stack.callback(alone.engine.close)
        staged = OnePrompt(directory / "staged", num_blocks, seed, 2 * num_blocks)
        stack.callback(staged.engine.close)
        measures: dict[str, Callable[[], float]] = {
            "store, bare loop": lambda: size / bare.run(Direction.WRITE) / 1e6,
            "store past DRAM": alone.store,
            "store through DRAM": staged.store,
            "load, bare loop": lambda: size / bare.run(Direction.READ) / 1e6,
            "load past DRAM": alone.load,
            "load through DRAM": staged.load,
            "load, in DRAM already": staged.load_cached,
        }
        rows = [[measure() for measure in measures.values()] for _ in range(rounds)]
        taken = dict(zip(measures, map(list, zip(*rows, strict=True)), strict=True))
    for name, times in taken.items():
        bound = f"{name.split()[0].rstrip(',')}, bare loop"
        rate = f"{size / statistics.median(times) / 1e6:.2f} GB/s"
        yield Result(name, "ms", times, statistics.median(taken[bound]), bound, note=rate)


def _milliseconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
