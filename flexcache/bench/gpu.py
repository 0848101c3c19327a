"""KV tensors on a CUDA device: scattered blocks compared with one contiguous pinned copy.

Times are by the host's clock, from submitting an op to observing its completion, since that is what
a request waits for.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flexcache.bench.gpu_pool import (
    KINDS,
    NUM_LAYERS,
    Pool,
    arrangements,
    behind_large_load,
    open_pool,
    pinning_copier,
)
from flexcache.bench.ssd import beside_raw, raw_disks
from flexcache.bench.suite import Case, Result, Unsupported, sample, sample_beside
from flexcache.errors import NoDirectPathError
from flexcache.ids import OpKind
from flexcache.storage.block_io import Direction, open_block_io
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import CopyLane, CopyPermit, Runs
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import KernelTables, split_by_table
from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.ops import Transfer
from flexcache.transfer.hip_driver import load_driver

RUN_BYTES = (8 << 10, 16 << 10, 32 << 10, 64 << 10)
_SINGLE_COPIES_BYTES = 64 << 10


def kernel_programs(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure the kernel with each number of programs against one contiguous copy.

    Raises:
        Unsupported: The kernel cannot be used here.
    """
    for run_bytes in RUN_BYTES:
        with ExitStack() as stack:
            pool = stack.enter_context(open_pool(run_bytes * NUM_LAYERS, op_bytes, seed))
            if CopyWay.KERNEL not in pool.copier.ways:
                raise Unsupported("; ".join(map(str, pool.copier.verdicts)))
            from flexcache.transfer import copy_kernel

            tables = stack.enter_context(closing(KernelTables(load_driver(), pool.device)))
            for kind in KINDS:
                runs = pool.runs(kind)
                for programs in copy_kernel.PROGRAMS:
                    copy = partial(_copy_by_kernel, tables, runs, programs)
                    seconds, bound = sample_beside(
                        copy, pool.contiguous(kind), rounds=rounds, scale=1
                    )
                    yield Result(
                        f"{kind.name} by the kernel, {programs} programs", "GB/s",
                        [op_bytes / s / 1e9 for s in seconds], op_bytes / bound / 1e9,
                        "one contiguous pinned copy", parameter="KiB per copy",
                        at=run_bytes >> 10,
                    )  # fmt: skip


def _copy_by_kernel(tables: KernelTables, runs: Runs, programs: int) -> None:
    from flexcache.transfer import copy_kernel

    for part in split_by_table(runs):
        table = tables.fill(CopyLane.LOADS, part)
        assert table is not None
        copy_kernel.launch(table, tables.scratch[CopyLane.LOADS], programs)
    torch.cuda.current_stream().synchronize()
    tables.clear(CopyLane.LOADS)


def without_batches(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure single copies, as a driver before 12.8 takes them: alone, and beside a thread that
    keeps the interpreter busy."""
    with open_pool(_SINGLE_COPIES_BYTES * NUM_LAYERS, op_bytes, seed) as pool:
        for kind in KINDS:
            copy = partial(pool.copy, pool.runs(kind), kind, CopyWay.SINGLE)
            alone, bound = sample_beside(copy, pool.contiguous(kind), rounds=rounds, scale=1)
            with _busy_interpreter():
                beside = sample(copy, rounds=rounds, scale=1)
            for how, seconds in (("alone", alone), ("beside a busy thread", beside)):
                yield Result(
                    f"{kind.name} by single copies of 64 KiB, {how}", "GB/s",
                    [op_bytes / s / 1e9 for s in seconds], op_bytes / bound / 1e9,
                    "one contiguous pinned copy",
                )  # fmt: skip


@contextmanager
def _busy_interpreter() -> Iterator[None]:
    ending = threading.Event()

    def work() -> None:
        while not ending.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


SSD_BLOCK_BYTES = 2 << 20
_DEPTH = 32


class DirectDisk:
    """All blocks of a pool's tensors, and the same blocks in a file."""

    def __init__(self, pool: Pool, io: CudaDirectIO, fd: int) -> None:
        self._pool = pool
        self._io = io
        self._fd = fd
        self._checksums = [0] * pool.num_blocks

    def run(self, direction: Direction) -> float:
        """Write or read all blocks; return GB/s.

        Raises:
            AssertionError: A block failed.
        """
        left = deque(range(self._pool.num_blocks))
        num_running = 0
        began = time.perf_counter()
        while left or num_running:
            count = min(len(left), self._io.depth - num_running)
            self._io.submit([self._transfer(left.popleft(), direction) for _ in range(count)])
            num_running += count
            for ended in self._io.reap():
                if ended.error is not None:
                    raise AssertionError(ended.error)
                num_running -= 1
                if direction is Direction.WRITE:
                    self._checksums[ended.token] = ended.checksum
        return self._pool.num_blocks * SSD_BLOCK_BYTES / (time.perf_counter() - began) / 1e9

    def check(self) -> None:
        """Raise `AssertionError` unless blocks come back byte for byte."""
        before = [layer.cpu() for layer in self._pool.layers]
        self.run(Direction.WRITE)
        for layer in self._pool.layers:
            layer.fill_(0)
        torch.cuda.synchronize()
        self.run(Direction.READ)
        for layer, expected in zip(self._pool.layers, before, strict=True):
            assert torch.equal(layer.cpu(), expected), "wrong bytes past DRAM"

    def _transfer(self, block: int, direction: Direction) -> Transfer:
        [addresses] = self._pool.layout.gpu_addresses(np.array([block]))
        expected = self._checksums[block] if direction is Direction.READ else 0
        return Transfer(
            block, 2, direction, self._fd, block * SSD_BLOCK_BYTES, SSD_BLOCK_BYTES, addresses,
            self._pool.layout.sizes, expected,
        )  # fmt: skip


def past_dram(path: Path, op_bytes: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure writes and reads of blocks past DRAM.

    Raises:
        Unsupported: There is no such path here.
    """
    with ExitStack() as stack:
        try:
            fd = os.open(path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as refusal:
            raise Unsupported(f"O_DIRECT in {path}: {refusal.strerror}") from None
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, op_bytes)
        pool = stack.enter_context(open_pool(SSD_BLOCK_BYTES, op_bytes, seed))
        try:
            io = CudaDirectIO(pool.device, pool.copier, [fd], SSD_BLOCK_BYTES, _DEPTH, CopyPermit())
        except NoDirectPathError as reason:
            raise Unsupported(str(reason)) from None
        stack.callback(io.close)
        if io.through_host:
            raise Unsupported(io.through_host)
        disk = DirectDisk(pool, io, fd)
        disk.check()
        host_io = open_block_io("auto", _DEPTH)
        stack.callback(host_io.close)
        raw = raw_disks(path, op_bytes, SSD_BLOCK_BYTES, host_io)
        yield from beside_raw({"SSD and GPU past DRAM": disk.run}, raw, rounds)


BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
OP_BYTES = 256 << 20
REACH = 0.9
SLOWDOWN_REACH = 0.97


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    """Return the cases of the section. Raises `Unsupported` without a CUDA device."""
    if not torch.cuda.is_available():
        raise Unsupported("no CUDA device")
    rounds = 50 if thorough else 10
    op_bytes = OP_BYTES * (8 if thorough else 1)
    return [
        *(
            Case(
                f"blocks of {block_bytes >> 10} KiB",
                partial(scattered_blocks, block_bytes, op_bytes, rounds, seed),
            )
            for block_bytes in BLOCK_BYTES
        ),
        Case("layouts", partial(arrangements, op_bytes, rounds, seed)),
        Case("programs of the kernel", partial(kernel_programs, op_bytes, rounds, seed)),
        Case("driver without batches", partial(without_batches, op_bytes, rounds, seed)),
        Case("load by layer behind others", partial(behind_large_load, 4 * OP_BYTES, rounds, seed)),
        Case("SSD past DRAM", partial(past_dram, directory, op_bytes, 3, seed)),
        Case("both directions at once", partial(both_directions, op_bytes, rounds, seed)),
        Case("small ops", partial(small_ops, 4 * rounds, seed)),
        Case("beside the model's work", partial(beside_compute, rounds, seed)),
        Case("pinning", partial(pinning, 4 if thorough else 1)),
    ]


def scattered_blocks(block_bytes: int, op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure each copy method and direction against the contiguous copy, and submission itself."""
    with open_pool(block_bytes, op_bytes, seed) as pool:
        for kind in KINDS:
            runs, contiguous = pool.runs(kind), pool.contiguous(kind)
            chosen = pool.copier.choose(runs, kind).value
            for way in (None, *pool.copier.ways):
                seconds, bound = sample_beside(
                    partial(pool.copy, runs, kind, way), contiguous, rounds=rounds, scale=1
                )
                yield Result(
                    f"{kind.name}, {way.value if way else 'as chosen'}",
                    "GB/s",
                    [op_bytes / s / 1e9 for s in seconds],
                    op_bytes / bound / 1e9,
                    "one contiguous pinned copy",
                    None if way else REACH,
                    note="" if way else f"by the {chosen}",
                    parameter="KiB per block",
                    at=block_bytes >> 10,
                )
            handed_over = sample(
                partial(pool.start, runs, kind),
                lambda landed: landed.synchronize(),
                rounds=rounds,
                scale=1e6 / len(runs[2]),
            )
            yield Result(
                f"{kind.name}, handing over, per copy", "us", handed_over,
                parameter="KiB per block", at=block_bytes >> 10,
            )  # fmt: skip


def both_directions(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure a simultaneous load and store of different blocks against two contiguous copies, as
    chosen and in each way."""
    with open_pool(2 << 20, 2 * op_bytes, seed) as pool:
        half = pool.num_blocks // 2
        ops = [
            (pool.runs(OpKind.H2D, 0, half), OpKind.H2D),
            (pool.runs(OpKind.D2H, half), OpKind.D2H),
        ]
        on_gpu = torch.empty((2, op_bytes), dtype=torch.uint8, device=pool.device)
        on_host = pool.host.view(2, -1)
        streams = [torch.cuda.Stream(pool.device) for _ in KINDS]

        def scattered(way: CopyWay | None) -> None:
            for landed in [pool.start(runs, kind, way) for runs, kind in ops]:
                landed.synchronize()

        def contiguous() -> None:
            with torch.cuda.stream(streams[0]):
                on_gpu[0].copy_(on_host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                on_host[1].copy_(on_gpu[1], non_blocking=True)
            for stream in streams:
                stream.synchronize()

        for way in (None, *pool.copier.ways):
            seconds, bound = sample_beside(
                partial(scattered, way), contiguous, rounds=rounds, scale=1
            )
            name = "as chosen" if way is None else way.value
            yield Result(
                f"H2D and D2H together, blocks of 2 MiB, {name}", "GB/s",
                [2 * op_bytes / s / 1e9 for s in seconds], 2 * op_bytes / bound / 1e9,
                "two contiguous pinned copies together", REACH if way is None else None,
            )  # fmt: skip


def small_ops(rounds: int, seed: int) -> Iterable[Result]:
    """Measure the time from submitting a few blocks to observing their completion."""
    with open_pool(2 << 20, 64 << 20, seed) as pool:
        for kind in KINDS:
            for count in (1, 8):
                runs = pool.runs(kind, 0, count)
                num_bytes = count * pool.block_bytes
                on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)
                on_host = pool.host.view(-1)[:num_bytes]
                target, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
                stream = torch.cuda.current_stream()

                def contiguous(
                    target: torch.Tensor = target,
                    source: torch.Tensor = source,
                    stream: torch.cuda.Stream = stream,
                ) -> None:
                    target.copy_(source, non_blocking=True)
                    stream.synchronize()

                times, bound = sample_beside(
                    partial(pool.copy, runs, kind), contiguous, rounds=rounds
                )
                yield Result(
                    f"{kind.name} of few blocks of 2 MiB, to its landing", "us", times, bound,
                    "one contiguous pinned copy", parameter="blocks", at=count,
                )  # fmt: skip


def beside_compute(rounds: int, seed: int) -> Iterable[Result]:
    """Measure how much speed a loop of the model's kernels keeps while copies run both ways."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    heads = torch.randn(4, 32, 4096, 128, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        torch.matmul(matrix, matrix, out=product)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    for block_bytes in (2 << 20, 256 << 10):
        with open_pool(block_bytes, OP_BYTES, seed) as pool:
            for way in pool.copier.ways:
                for name, work in (("matmul", multiply), ("attention", attend)):
                    alone, beside = _paces(work, pool, way, rounds)
                    yield Result(
                        f"{name} beside the {way.value}, both directions",
                        "1/s",
                        beside,
                        statistics.median(alone),
                        "the same alone",
                        SLOWDOWN_REACH,
                        parameter="KiB per block",
                        at=block_bytes >> 10,
                    )


def _paces(
    work: Callable[[], None], pool: Pool, way: CopyWay, rounds: int
) -> tuple[list[float], list[float]]:
    """Return calls of ``work`` per second alone and beside copies, measured in turns."""
    alone, beside = [], []
    _pace(work)  # warms up
    for _ in range(rounds):
        alone.append(_pace(work))
        with _copying(pool, way):
            beside.append(_pace(work))
    return alone, beside


def _pace(work: Callable[[], None], calls: int = 20) -> float:
    """Return calls per second by the device's clock, which host threads cannot disturb."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # queue all calls before the first may run
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return calls / milliseconds * 1e3


@contextmanager
def _copying(pool: Pool, way: CopyWay) -> Iterator[None]:
    """Keep copies running both ways, each direction driven by its own thread."""
    ending = threading.Event()
    under_way = threading.Barrier(len(KINDS) + 1)
    half = pool.num_blocks // 2
    failures: list[Exception] = []

    def drive(kind: OpKind) -> None:
        # Separate blocks, or each direction would change what the other reads.
        runs = pool.runs(kind, 0, half) if kind is OpKind.H2D else pool.runs(kind, half)
        try:
            landed = pool.copier.start(runs, kind, None, way=way)
            under_way.wait()
            while not ending.is_set():
                following = pool.copier.start(runs, kind, None, way=way)
                landed.synchronize()
                landed = following
            landed.synchronize()
        except Exception as error:
            failures.append(error)
            under_way.abort()

    threads = [threading.Thread(target=drive, args=(kind,)) for kind in KINDS]
    for thread in threads:
        thread.start()
    try:
        under_way.wait()
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def pinning(rounds: int) -> Iterable[Result]:
    """Measure pinning a mapped pool of 4 GiB, as a rank does once."""
    num_bytes = 4 << 30
    with HostSegment.create(2 << 20, num_bytes >> 21) as segment:
        segment.map()
        speeds = []
        for _ in range(rounds):
            device = torch.device("cuda", torch.cuda.current_device())
            started = time.perf_counter()
            copier = pinning_copier(device, segment)
            took = time.perf_counter() - started
            copier.close()
            speeds.append(num_bytes / took / 1e9)
    yield Result("pinning the host pool", "GB/s", speeds, note="includes timing the copy methods")
