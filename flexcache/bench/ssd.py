"""SSD tier compared with fio: the whole way from KV tensors and back.

All use O_DIRECT, the same directory and the same number of I/Os in flight, and take turns. Writes
end when they are durable, those of fio with one sync; reads when their checksums were compared.
Without fio, a bare loop over FlexCache's own block I/O engine replaces it, and the results name it.

A device's speed depends on how scattered a block's pages are in the machine's memory. So fio's
buffers get huge pages, as the host pool does; where the kernel grants none, each side has its own
ordinary pages, and ratios differ from run to run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import shutil
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from flexcache.bench.dram import CpuEngine
from flexcache.bench.suite import Case, Result, Unsupported
from flexcache.storage.block_io import QUEUE_DEPTH, BlockIO, Direction, Request, open_block_io

logger = logging.getLogger(__name__)


class RawDisk(ABC):
    """Writes and reads ``size`` bytes of one file past the page cache, in blocks."""

    name: str

    @abstractmethod
    def run(self, direction: Direction) -> float:
        """Write or read everything once; return GB/s."""


_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
"""Gives fio's buffers huge pages, as blocks in the host pool have: a disk may be twice as fast with
them. fio's own way needs reserved ones."""


class Fio(RawDisk):
    """fio, overwriting an existing file."""

    def __init__(self, path: Path, size: int, block_bytes: int, engine: str, *options: str) -> None:
        self.name = f"fio, {engine}"
        self._command = [
            "fio", "--name=bound", f"--filename={path / 'fio'}", f"--bs={block_bytes}",
            f"--size={size}", "--direct=1", f"--ioengine={engine}", f"--iodepth={QUEUE_DEPTH}",
            "--overwrite=1", "--output-format=json", *options,
        ]  # fmt: skip
        self.run(Direction.WRITE)  # lays the file out

    def run(self, direction: Direction) -> float:
        command = [*self._command, f"--rw={direction.value}"]
        own = os.environ.get(_TUNABLES)
        environment = {**os.environ, _TUNABLES: f"{own}:{_HUGE_PAGES}" if own else _HUGE_PAGES}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise Unsupported(f"{self.name}: {done.stderr.strip() or done.stdout.strip()}"[:500])
        answer = done.stdout[done.stdout.index("{") :]  # warnings may come before
        job = json.loads(answer)["jobs"][0][direction.value]
        return float(job["io_bytes"] / job["runtime"] / 1e6)


class BareLoop(RawDisk):
    """FlexCache's own block I/O engine with no cache around it."""

    def __init__(
        self, path: Path, size: int, block_bytes: int, io: BlockIO, syncs: bool = False
    ) -> None:
        self.name = f"bare {io.name} loop"
        self._io = io
        self._syncs = syncs
        self._offsets = range(0, size, block_bytes)
        self._fd = os.open(path / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        mapping = mmap.mmap(-1, QUEUE_DEPTH * block_bytes, flags=mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(mapping)
        self._buffers = [
            memory[i * block_bytes : (i + 1) * block_bytes] for i in range(QUEUE_DEPTH)
        ]
        for buffer in self._buffers:  # else all pages are the kernel's one shared zero page
            buffer[:] = os.urandom(block_bytes)
        self._size = size
        self.run(Direction.WRITE)

    def run(self, direction: Direction) -> float:
        left, free, busy = list(self._offsets)[::-1], list(range(QUEUE_DEPTH)), 0
        started = time.perf_counter()
        while left or busy:
            requests = []
            while left and free:
                buffer, offset = free.pop(), left.pop()
                requests.append(
                    Request(buffer, direction, self._fd, offset, [self._buffers[buffer]])
                )
            self._io.submit(requests)
            busy += len(requests)
            select.select([self._io.fileno()], [], [])
            for completion in self._io.reap():
                if completion.result != len(self._buffers[0]):
                    raise OSError(f"{direction.value}: {completion.result}")
                free.append(completion.token)
                busy -= 1
        if self._syncs and direction is Direction.WRITE:
            os.fdatasync(self._fd)
        return self._size / (time.perf_counter() - started) / 1e9


def raw_disks(
    path: Path, size: int, block_bytes: int, io: BlockIO, syncs: bool = False
) -> list[RawDisk]:
    """Return the bounds to measure: fio with each asynchronous engine that runs, or a bare loop.

    Args:
        syncs: A run that writes ends with a sync of the file.
    """
    disks: list[RawDisk] = []
    options = ("--end_fsync=1",) if syncs else ()
    for engine in ("libaio", "io_uring") if shutil.which("fio") else ():
        try:
            disks.append(Fio(path, size, block_bytes, engine, *options))
        except Unsupported as reason:  # containers often forbid io_uring
            logger.warning("%s", reason)
    return disks or [BareLoop(path, size, block_bytes, io, syncs)]


BLOCK_BYTES = 2 << 20
NUM_LAYERS = 32
TO_REACH = 0.95


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    size, rounds = (2 << 30, 10) if thorough else (3 << 28, 3)
    return [Case("2 MiB blocks", partial(both_ways, directory, size, rounds, seed))]


def both_ways(path: Path, size: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure the whole path of a request."""
    with ExitStack() as stack:
        io = open_block_io("auto", QUEUE_DEPTH)
        stack.callback(io.close)
        engine = stack.enter_context(
            CpuEngine(
                NUM_LAYERS, BLOCK_BYTES // NUM_LAYERS, size // BLOCK_BYTES, seed,
                num_cpu_blocks=size // BLOCK_BYTES * 5 // 4,
                num_ssd_blocks=size // BLOCK_BYTES * 2,
                ssd_cache_dirs=[str(path / "cache")],
                skip_slow_loads=False,
            )
        )  # fmt: skip
        raw = raw_disks(path, size, BLOCK_BYTES, io, syncs=True)
        yield from beside_raw({"whole way": WholeWay(engine).run}, raw, rounds)


class WholeWay:
    """KV tensors to SSD until they are durable, and back to KV tensors with DRAM emptied."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._prompt = engine.prompt(engine.num_blocks)
        self._order, self._other_order = engine.order(), engine.order()
        original = engine.memory.clone()
        self.run(Direction.WRITE)
        engine.memory.zero_()
        self.run(Direction.READ)
        engine.check_blocks(self._other_order, original, self._order)

    def run(self, direction: Direction) -> float:
        """Put a new prompt of all blocks, or get the last one; return GB/s."""
        engine = self._engine
        if direction is Direction.WRITE:
            self._prompt = engine.prompt(engine.num_blocks)
        engine.manager.clear("CPU")
        started = time.perf_counter()
        if direction is Direction.WRITE:
            engine.store([self._prompt], self._order, completely=True)
        else:
            engine.load([self._prompt], self._other_order)
        return engine.num_bytes / (time.perf_counter() - started) / 1e9


def beside_raw(
    ways: Mapping[str, Callable[[Direction], float]], raw: Sequence[RawDisk], rounds: int
) -> Iterator[Result]:
    """Measure GB/s of each way and each raw disk, in turns; the best raw disk is the bound."""
    everything = {**ways, **{disk.name: disk.run for disk in raw}}
    for direction in (Direction.WRITE, Direction.READ):
        found: dict[str, list[float]] = {name: [] for name in everything}
        for _ in range(rounds):
            for name, run in everything.items():
                found[name].append(run(direction))
        bounds = {disk.name: statistics.median(found[disk.name]) for disk in raw}
        best = max(bounds, key=lambda name: bounds[name])
        others = ", ".join(f"{name} {rate:.2f}" for name, rate in bounds.items() if name != best)
        for name in ways:
            yield Result(
                f"{name}, {direction.value}", "GB/s", found[name], bounds[best], best,
                reach=TO_REACH, note=others,
            )  # fmt: skip
