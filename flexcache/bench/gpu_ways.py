"""Choices of a copy method on a CUDA device: the kernel's programs, and drivers before 12.8."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch

from flexcache.bench.gpu_pool import KINDS, NUM_LAYERS, Runs, open_pool
from flexcache.bench.results import Result, Unsupported, sample, sample_beside
from flexcache.transfer.copier import Lane
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import KernelTables, split_by_table
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
        table = tables.fill(Lane.LOADS, part)
        assert table is not None
        copy_kernel.launch(table, tables.scratch[Lane.LOADS], programs)
    torch.cuda.current_stream().synchronize()
    tables.clear(Lane.LOADS)


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
