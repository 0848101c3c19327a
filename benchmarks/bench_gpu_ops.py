"""Ops of a rank on a CUDA device, as their developers tune them.

Layouts of the engine's memory, numbers of programs of the kernel, drivers before 12.8, which take
copies one by one, and loads by layer. A `DeviceWorker` runs on a thread of its own, as in an
engine; this thread is the engine's.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from flexcache.bench.gpu import (
    KINDS,
    NUM_LAYERS,
    OP_BYTES,
    Arrangement,
    Pool,
    open_pool,
)
from flexcache.bench.suite import (
    Case,
    Result,
    Unsupported,
    rates,
    sample,
    sample_beside,
)
from flexcache.ids import OpKind
from flexcache.transfer.copier import CopyLane, Runs
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import KernelTables, split_by_table
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.gates import LayerLoad
from flexcache.transfer.hip_driver import load_driver
from flexcache.transfer.messages import Execute, pack_ids

RUN_BYTES = (8 << 10, 16 << 10, 32 << 10, 64 << 10)
_SINGLE_COPIES_BYTES = 64 << 10
PAGE_BYTES = (16 << 10, 64 << 10)
"""KV of 16 tokens in a layer: a rank of four of an 8B model, and all of it."""
_FEW_BLOCKS = 4
_PATIENCE_S = 60.0
_PAUSE_S = 0.0001


SLOWDOWN_REACH = 0.97


def cases(thorough: bool, seed: int) -> list[Case]:
    """Return the cases of the section. Raises `Unsupported` without a CUDA device."""
    if not torch.cuda.is_available():
        raise Unsupported("no CUDA device")
    rounds, op_bytes = (50, 8 * OP_BYTES) if thorough else (10, OP_BYTES)
    return [
        Case("layouts", partial(arrangements, op_bytes, rounds, seed)),
        Case("programs of the kernel", partial(kernel_programs, op_bytes, rounds, seed)),
        Case("driver without batches", partial(without_batches, op_bytes, rounds, seed)),
        Case("load by layer behind others", partial(behind_large_load, 4 * OP_BYTES, rounds, seed)),
        Case("small ops", partial(small_ops, 4 * rounds, seed)),
        Case("beside the model's work", partial(beside_compute, rounds, seed)),
    ]


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
                    yield rates(
                        f"{kind.name} by the kernel, {programs} programs", op_bytes,
                        sample_beside(copy, pool.contiguous(kind), rounds=rounds, scale=1),
                        parameter="KiB per copy", at=run_bytes >> 10,
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
            name = f"{kind.name} by single copies of 64 KiB"
            sampled = sample_beside(copy, pool.contiguous(kind), rounds=rounds, scale=1)
            alone = rates(f"{name}, alone", op_bytes, sampled)
            yield alone
            with beside_threads([lambda: sum(range(1000))]):
                seconds = sample(copy, rounds=rounds, scale=1)
            yield replace(
                alone, name=f"{name}, beside a busy thread",
                samples=[op_bytes / s / 1e9 for s in seconds],
            )  # fmt: skip


class Rank:
    """A rank's worker. Its thread is the only one that drives it."""

    def __init__(self, pool: Pool) -> None:
        self.worker = DeviceWorker([pool.layout], pool.segment, pool.copier)
        self._orders: SimpleQueue[Execute] = SimpleQueue()
        self._ended: SimpleQueue[str | None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def order(self, kind: OpKind, blocks: range) -> None:
        """Order an op on blocks that have the same numbers on both sides; see `wait`."""
        number = next(self._numbers)
        self._orders.put(Execute(number, kind, _packed(blocks), _packed(blocks), number))

    def load_by_layer(self, blocks: range) -> LayerLoad:
        number = next(self._numbers)
        load = self.worker.gates.load_by_layer(number, len(blocks))
        packed = _packed(blocks)
        self._orders.put(Execute(number, OpKind.H2D, packed, packed, number, gated=True))
        return load

    def wait(self) -> None:
        """Wait for the end of an op.

        Raises:
            RuntimeError: It failed.
        """
        error = self._ended.get(timeout=_PATIENCE_S)
        if error is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_ending.is_set():
            is_busy = self.worker.has_work and not self.worker.only_waits
            with suppress(Empty):
                self.worker.execute(self._orders.get(timeout=0 if is_busy else _PAUSE_S))
            for done in self.worker.advance():
                self._ended.put(done.error)


def _packed(blocks: range) -> bytes:
    return pack_ids(np.array(blocks, np.int64))


@contextmanager
def serving(pool: Pool) -> Iterator[Rank]:
    rank = Rank(pool)
    try:
        yield rank
    finally:
        rank.close()


def arrangements(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure ops between steps and loads by layer with each arrangement of the memory."""
    for page_bytes in PAGE_BYTES:
        for arrangement in Arrangement:
            with (
                open_pool(page_bytes * NUM_LAYERS, op_bytes, seed, arrangement) as pool,
                serving(pool) as rank,
            ):
                yield from _arranged(pool, rank, arrangement.value, page_bytes, rounds)


def _arranged(pool: Pool, rank: Rank, name: str, page_bytes: int, rounds: int) -> Iterator[Result]:
    blocks = range(pool.num_blocks)
    num_bytes = pool.num_blocks * pool.block_bytes
    for kind in KINDS:

        def copy(kind: OpKind = kind) -> None:
            rank.order(kind, blocks)
            rank.wait()

        yield rates(
            f"{kind.name}, {name}", num_bytes,
            sample_beside(copy, pool.contiguous(kind), rounds=rounds, scale=1),
            parameter="KiB per page", at=page_bytes >> 10,
        )  # fmt: skip
    for name_of, layer in (("first", "layer 0"), ("last", f"layer {NUM_LAYERS - 1}")):
        times = sample(
            partial(_load_until, rank, blocks, layer), partial(_let_end, rank),
            rounds=rounds, scale=1e3,
        )  # fmt: skip
        yield Result(
            f"load by layer of {num_bytes >> 20} MiB until its {name_of} layer, {name}", "ms",
            times, parameter="KiB per page", at=page_bytes >> 10,
        )  # fmt: skip


def behind_large_load(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure a load by layer of a few blocks: alone, and right after a load of many."""
    with open_pool(2 << 20, op_bytes, seed) as pool, serving(pool) as rank:
        few, many = range(_FEW_BLOCKS), range(_FEW_BLOCKS, pool.num_blocks)
        last = f"layer {NUM_LAYERS - 1}"

        def alone() -> None:
            _let_end(rank, _load_until(rank, few, last))

        def behind() -> LayerLoad:
            rank.order(OpKind.H2D, many)
            return _load_until(rank, few, last)

        def let_both_end(load: LayerLoad) -> None:
            _let_end(rank, load)
            rank.wait()

        times, bound = sample_beside(behind, alone, let_both_end, rounds=rounds, scale=1e3)
        yield Result(
            f"load by layer of {_FEW_BLOCKS} blocks behind one of {len(many)}", "ms", times, bound,
            "the same alone",
        )  # fmt: skip


def _load_until(rank: Rank, blocks: range, layer: str) -> LayerLoad:
    """Begin a load by layer, and wait until a layer is on the device."""
    load = rank.load_by_layer(blocks)
    assert load.wait_layer(layer, _PATIENCE_S)
    torch.cuda.current_stream().synchronize()
    return load


def _let_end(rank: Rank, load: LayerLoad) -> None:
    assert load.wait_all(_PATIENCE_S)
    torch.cuda.current_stream().synchronize()
    rank.wait()


def small_ops(rounds: int, seed: int) -> Iterable[Result]:
    """Measure the time from submitting a few blocks to observing their completion."""
    with open_pool(2 << 20, 64 << 20, seed) as pool:
        for kind in KINDS:
            for count in (1, 8):
                runs = pool.runs(kind, 0, count)
                contiguous = pool.contiguous(kind, count)
                copy = partial(pool.copy, runs, kind)
                times, bound = sample_beside(copy, contiguous, rounds=rounds)
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
                        f"{name} beside the {way.value}, both directions", "1/s", beside,
                        statistics.median(alone), "the same alone", SLOWDOWN_REACH,
                        parameter="KiB per block", at=block_bytes >> 10,
                    )  # fmt: skip


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
    half = pool.num_blocks // 2

    def copies(kind: OpKind) -> Callable[[], None]:
        # Separate blocks, or each direction would change what the other reads.
        runs = pool.runs(kind, 0, half) if kind is OpKind.H2D else pool.runs(kind, half)
        under_way: deque[Any] = deque()

        def copy() -> None:  # one is always waiting while another runs
            under_way.append(pool.copier.start(runs, kind, None, way=way))
            if len(under_way) > 1:
                under_way.popleft().synchronize()

        return copy

    try:
        with beside_threads([copies(kind) for kind in KINDS]):
            yield
    finally:
        torch.cuda.synchronize(pool.device)  # the last copies


@contextmanager
def beside_threads(works: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Call each of these over and over on a thread of its own, once it was called.

    Raises:
        Exception: What one of them raised.
    """
    ending = threading.Event()
    under_way = threading.Barrier(len(works) + 1)
    failures: list[Exception] = []

    def drive(work: Callable[[], object]) -> None:
        try:
            work()
            under_way.wait()
            while not ending.is_set():
                work()
        except Exception as error:
            failures.append(error)
            under_way.abort()

    threads = [threading.Thread(target=drive, args=(work,)) for work in works]
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
