"""Scattered copies between the host pool and KV tensors on a CUDA device.

An op is three arrays of addresses and sizes, made by numpy and handed over in one call: to the copy
engines (`copy_driver`), which take no multiprocessor from the model, or to a kernel (`copy_kernel`)
where many small copies make that clearly quicker (`copy_choice`). Loads and stores have a stream
each, so that both directions of the link are used at once; each op is ordered behind an event of
the compute stream, and another event says when it has landed. The engine's thread never waits.

Not measured yet, and never run on a GPU: see ``docs/benchmarks.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_choice import (
    PROBE_BYTES,
    CopyChoice,
    CopyCost,
    CopyWay,
    measure_cost,
)
from flexcache.transfer.workers.copy_driver import CudaDriver, SourceOrder
from flexcache.transfer.workers.copy_pin import PinnedSegment
from flexcache.transfer.workers.copy_runs import merge_runs

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
Runs = tuple[Addresses, Addresses, Addresses]

_PIN_STEP = 1 << 30

# What a load reads was complete before it was ordered; what a store reads the model may still be
# writing, up to the event it is ordered behind.
_SOURCE_ORDER = {OpKind.H2D: SourceOrder.ANY, OpKind.D2H: SourceOrder.STREAM}


class CudaCopier:
    """A `Copier` for one device. All but `fence` belongs to one thread, which it sets up for CUDA.

    Raises:
        MissingDependencyError: There is no driver by NVIDIA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver = CudaDriver.load()
        self._streams = {kind: torch.cuda.Stream(device) for kind in _SOURCE_ORDER}
        self._context = self._driver.context_of(self._streams[OpKind.H2D].cuda_stream)
        self._pinned: PinnedSegment | None = None
        self._kernel: ModuleType | None = None
        self._choices: dict[OpKind, CopyChoice] = {}
        if not self._driver.has_batch_copy:
            log_event(
                logger, logging.INFO, "batch_copy_missing", effect="copies go one by one",
                remedy="a CUDA driver of 12.8 or later",
            )  # fmt: skip

    def attach(
        self, segment: HostSegment, after_each_step: Callable[[], None] = lambda: None
    ) -> None:
        """Pin the segment and find out when the kernel is quicker than the copy engine.

        Takes a second per some GB. What is missing is logged and done without.
        """
        self._driver.bind(self._context)
        self._pinned = PinnedSegment(self._driver, segment, _PIN_STEP, after_each_step)
        if not self._pinned.is_reachable:
            return
        try:
            from flexcache.transfer.workers import copy_kernel

            self._kernel = copy_kernel
            self._choices = {kind: self._measure(kind) for kind in _SOURCE_ORDER}
        except Exception as error:  # a compiler's: of Triton, of C, of the driver
            log_event(
                logger,
                logging.INFO,
                "copy_kernel_missing",
                error=f"{type(error).__name__}: {error}",
            )
            self._kernel = None
        for kind, choice in self._choices.items():
            log_event(logger, logging.INFO, "copy_way_chosen", op=kind.name, choice=choice)

    def fence(self) -> torch.cuda.Event:
        """What the calling thread's current stream has been given up to now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: object, way: CopyWay | None = None,
    ) -> torch.cuda.Event:  # fmt: skip
        """Queue the copies behind ``after``; the event returned fires when they have landed.

        Args:
            way: One of `ways`; None for the one that should be quickest.

        Raises:
            RuntimeError: The driver refused them. None is under way any more.
        """
        self._driver.bind(self._context)
        assert self._pinned is not None
        runs = merge_runs(destinations, sources, sizes, self._pinned.starts)
        stream = self._streams[kind]
        if after is not None:
            stream.wait_event(after)
        try:
            self._queue(runs, kind, way or self.choose(*runs, kind))
            landed = torch.cuda.Event()
            landed.record(stream)
        except RuntimeError:
            stream.synchronize()  # slots of an op that failed are used again at once
            raise
        return landed

    @property
    def is_pinned(self) -> bool:
        """Whether the attached segment is page-locked; if not, copies are right but slow."""
        return self._pinned is not None and self._pinned.starts.size > 0

    @property
    def ways(self) -> Sequence[CopyWay]:
        """What can carry out copies here, of whole words of 16 bytes at least."""
        return (CopyWay.ENGINE,) if self._kernel is None else (CopyWay.ENGINE, CopyWay.KERNEL)

    def choose(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind
    ) -> CopyWay:
        """The way that such copies go."""
        if self._kernel is None or len(sizes) < self._kernel.MIN_RUNS:
            return CopyWay.ENGINE
        if not self._kernel.takes(destinations, sources, sizes):
            return CopyWay.ENGINE
        return self._choices[kind].way(len(sizes), int(sizes.sum()))

    def close(self) -> None:
        """Wait for what is under way, and unpin. Idempotent."""
        if self._pinned is None:
            return
        self._driver.bind(self._context)
        for stream in self._streams.values():
            stream.synchronize()
        self._pinned.close()
        self._pinned = None

    def _queue(self, runs: Runs, kind: OpKind, way: CopyWay) -> None:
        stream = self._streams[kind]
        if way is CopyWay.ENGINE:
            self._driver.copy_runs(*runs, _SOURCE_ORDER[kind], stream.cuda_stream)
            return
        assert self._kernel is not None
        with torch.cuda.stream(stream):
            self._kernel.copy_runs(*runs, self.device)

    def _measure(self, kind: OpKind) -> CopyChoice:
        """Time both on memory of our own: the pool may hold blocks of another engine's life."""
        on_host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.device)
        target, source = (on_device, on_host) if kind is OpKind.H2D else (on_host, on_device)
        stream = self._streams[kind]
        stream.wait_event(self.fence())  # behind what the device memory served before

        def cost(way: CopyWay) -> CopyCost:
            def copy(count: int, size: int) -> None:
                offsets = np.arange(count, dtype=np.int64) * size
                sizes = np.full(count, size, np.int64)
                runs = (target.data_ptr() + offsets, source.data_ptr() + offsets, sizes)
                self._queue(runs, kind, way)
                stream.synchronize()

            return measure_cost(copy)

        return CopyChoice(engine=cost(CopyWay.ENGINE), kernel=cost(CopyWay.KERNEL))
