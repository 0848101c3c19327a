"""A get with half of its blocks in DRAM and half on SSD, beside the slower half alone.

The halves go to the engine at the same time, so the get should take as long as its SSD half, and
the DRAM half should be there as early as if it had been asked for alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flexcache.bench.dram import TOKENS_PER_BLOCK, CpuEngine, Order, copy_at_once
from flexcache.bench.suite import Case, Result

NUM_LAYERS, RUN_BYTES, NUM_BLOCKS = 32, 64 << 10, 256
CHUNKS_MB = (2, 4, 8, 16, 32, 64)
DEFAULT_MB = 16
TO_REACH = 1.05
_LOOK_S = 0.0002


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    chunks, rounds = (CHUNKS_MB, 20) if thorough else ((DEFAULT_MB,), 5)
    return [
        Case(f"chunks of {mb} MB", partial(halves, mb, rounds, directory / f"{mb}", seed))
        for mb in chunks
    ]


class HalfAndHalf:
    """One prompt, all of which is on SSD, and as much of it in DRAM as a measurement asks for."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._prompt = engine.prompt(NUM_BLOCKS)
        self._half = self._prompt[: NUM_BLOCKS // 2 * TOKENS_PER_BLOCK]
        self.order, self._stored_order = engine.order(), engine.order()
        engine.store([self._prompt], self._stored_order, completely=True)
        self._copy = torch.ones_like(engine.memory)
        copy_at_once(self._copy, engine.memory)

    def check(self) -> None:
        self._engine.memory.zero_()
        self.both()
        self._engine.check_blocks(self.order, self._copy, self._stored_order)

    def dram_alone(self) -> float:
        self._stage_half()
        return _seconds(lambda: self._engine.load([self._half], self.order))

    def ssd_alone(self) -> float:
        self._stage_half()  # as for the others, so that the device is as busy before
        skipped = NUM_BLOCKS // 2
        rest = self.order[skipped:]
        return _seconds(lambda: self._engine.load([self._prompt], rest, num_skipped=skipped))

    def both(self) -> float:
        self._stage_half()
        return _seconds(lambda: self._engine.load([self._prompt], self.order))

    def dram_half_of_both(self) -> float:
        """Seconds until the last block that DRAM had is there."""
        self._stage_half()
        with _Arrival(self._engine, self.order[: NUM_BLOCKS // 2]) as arrival:
            self._engine.load([self._prompt], self.order)
        return arrival.took_s()

    def _stage_half(self) -> None:
        manager = self._engine.manager
        manager.clear("CPU")
        task = manager.prefetch_async(self._half)
        answer = manager.wait([task])[task]
        if int(answer.mask.sum()) != len(self._half):
            raise AssertionError(f"half of the prompt is not in DRAM: {answer.status.value}")


class _Arrival:
    """Looks for the bytes of some blocks from now on, on a thread of its own."""

    def __init__(self, engine: CpuEngine, blocks: Order) -> None:
        self._ends = [layer.view(engine.num_blocks, -1)[:, -8:] for layer in engine.layers[-1:]]
        self._blocks = torch.from_numpy(blocks)
        for ends in self._ends:
            ends[self._blocks] = 0
        self._started_s = time.perf_counter()
        self._arrived_s: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Arrival:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._has_arrived():
            if self._is_over.wait(_LOOK_S) and not self._has_arrived():
                return
        self._arrived_s = time.perf_counter()

    def _has_arrived(self) -> bool:
        return all(bool(ends[self._blocks].any(dim=1).all()) for ends in self._ends)

    def took_s(self) -> float:
        if self._arrived_s is None:
            raise AssertionError("the load is over and its blocks have not come")
        return self._arrived_s - self._started_s


def halves(chunk_mb: int, rounds: int, directory: Path, seed: int) -> Iterator[Result]:
    settings = {
        "num_cpu_blocks": 2 * NUM_BLOCKS,
        "num_ssd_blocks": NUM_BLOCKS,
        "ssd_cache_dirs": [str(directory)],
        "transfer_chunk_mb": chunk_mb,
        "skip_slow_loads": False,
    }
    with CpuEngine(NUM_LAYERS, RUN_BYTES, NUM_BLOCKS, seed, **settings) as engine:
        bench = HalfAndHalf(engine)
        bench.check()
        measures: list[Callable[[], float]] = [
            bench.dram_alone, bench.ssd_alone, bench.both, bench.dram_half_of_both
        ]  # fmt: skip
        taken = np.array([[measure() * 1e3 for measure in measures] for _ in range(rounds)])
    dram, ssd, both, early = taken.T.tolist()
    dram_ms, ssd_ms = statistics.median(dram), statistics.median(ssd)
    slower, name = (ssd_ms, "SSD") if ssd_ms > dram_ms else (dram_ms, "DRAM")
    yield Result("both halves", "ms", both, slower, f"{name} half alone", reach=TO_REACH)
    yield Result("DRAM half of both", "ms", early, dram_ms, "DRAM half alone")


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
