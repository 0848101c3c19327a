"""Scattered copies between the host pool and KV tensors on a CUDA device.

An op is three arrays of addresses and sizes, made by numpy and passed in one call: to the copy
engines (`copy_driver`), which take no multiprocessor from the model, or to a kernel (`copy_kernel`)
if that is clearly quicker, as for many small copies (`copy_choice`). Only ways that passed a
self-test (`copy_check`) are used. They run on streams of our own (`cuda_streams`); each op is
ordered after an event of the compute stream, and another event fires when it has landed. The
engine's thread never waits.

Figures of an H200 are in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from flexcache.errors import DeviceLostError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage import numa
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_check import (
    Scratch,
    Verdict,
    check_way,
    describe,
    open_scratch,
    passed_ways,
)
from flexcache.transfer.workers.copy_choice import CopyChoice, CopyWay, measure_costs
from flexcache.transfer.workers.copy_driver import SourceOrder
from flexcache.transfer.workers.copy_pin import PinnedSegment, Runs
from flexcache.transfer.workers.copy_runs import merge_runs
from flexcache.transfer.workers.cuda_streams import CudaStreams
from flexcache.transfer.workers.hip_driver import load_driver
from flexcache.transfer.workers.lane import Lane
from flexcache.transfer.workers.life import show_life_during

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]

_PIN_STEP = 1 << 30
_ENGINE_WAYS = (CopyWay.BATCH, CopyWay.SINGLE)

# The source of a load was complete before the load was queued; the source of a store may still be
# written by the model, up to the event that the store is ordered after.
_SOURCE_ORDER = {OpKind.H2D: SourceOrder.ANY, OpKind.D2H: SourceOrder.STREAM}


class CudaCopier:
    """A `Copier` for one device. From `attach` on, all methods but `fence` belong to one thread.

    Args:
        engine_stream: What the engine computes on, which copies without a gate come behind; None
            for the device's default stream.

    Attributes:
        verdicts: Results of the self-test, once attached.

    Raises:
        MissingDependencyError: There is no driver.
    """

    def __init__(self, device: torch.device, engine_stream: torch.Stream | None = None) -> None:
        self.device = device
        self._engine_stream = engine_stream
        self.verdicts: Sequence[Verdict] = ()
        self.wakes = False
        self._driver = load_driver()
        self._streams: CudaStreams | None = None
        self._pinned: PinnedSegment | None = None
        self._engine: CopyWay | None = None
        self._pageable_way: CopyWay | None = None  # for what of the segment is not pinned
        self._kernel: ModuleType | None = None
        self._choices: dict[OpKind, CopyChoice] = {}
        self._programs: dict[OpKind, int] = {}
        if not self._driver.has_batch_copy:
            log_event(
                logger, logging.INFO, "batch_copy_missing", effect="copies are queued one by one",
                remedy="install a CUDA driver of 12.8 or later",
            )  # fmt: skip

    @property
    def numa_node(self) -> int | None:
        """The NUMA node next to the device; None if it is unknown, or there is only one."""
        if numa.count_nodes() == 1:
            return None
        try:
            return numa.node_of_pci(self._driver.pci_address(self.device.index))
        except RuntimeError:  # the driver does not say
            return None

    def attach(
        self, segment: HostSegment, after_each_step: Callable[[], None] = lambda: None
    ) -> None:
        """Pin the segment, test the ways of copying, and time them if there is a choice.

        Takes about a second per few GB. Missing capabilities are logged and not used. If it
        raises, nothing stays pinned.

        Raises:
            StorageError: No way of copying passed the self-test; the message has all results.
            DeviceLostError: The device no longer works.
        """
        try:
            self._streams = CudaStreams(self._driver, self.device)
            if self._engine_stream is not None:  # where this thread's fences are
                torch.cuda.set_stream(self._engine_stream)
            self._pinned = PinnedSegment(self._driver, segment, _PIN_STEP, after_each_step)
            show_life_during(self._find_ways, after_each_step)
        except BaseException:
            self.close()
            raise

    def fence(self) -> torch.cuda.Event:
        """Record an event after all work queued so far on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: object, urgent: bool = False, alone: bool = False, way: CopyWay | None = None,
    ) -> torch.cuda.Event:  # fmt: skip
        """Queue the copies after ``after``; the returned event fires when they have landed.

        Args:
            urgent: A load by layer, which does not queue behind other loads.
            alone: Makes no difference here.
            way: One that passed the self-test; None for the one that should be quickest.

        Raises:
            DeviceLostError: The device no longer works: all other copies will fail too.
            RuntimeError: These copies failed, and none is in flight. Others may succeed.
        """
        assert self._pinned is not None and self._streams is not None
        lane = Lane.of(kind, urgent)
        stream = self._streams[lane]
        try:
            self._streams.bind()
            runs = merge_runs(destinations, sources, sizes, self._pinned.starts)
            if after is not None:
                stream.wait_event(after)
            runs, pageable = self._pinned.split(runs, on_host=1 if kind is OpKind.H2D else 0)
            if way is not None:
                self._queue(runs, kind, way, lane)
            else:
                self._queue_as_chosen(runs, kind, lane)
            if len(pageable[2]):
                assert self._pageable_way is not None
                self._queue(pageable, kind, self._pageable_way, lane, is_pinned=False)
            landed = torch.cuda.Event()
            landed.record(stream)
        except Exception as error:
            self._streams.settle(lane)  # slots of a failed op are reused at once
            if isinstance(error, RuntimeError):
                raise
            raise RuntimeError(describe(error)) from error
        return landed

    @property
    def streams(self) -> CudaStreams:
        """Streams of the copies, once attached."""
        assert self._streams is not None
        return self._streams

    @property
    def is_pinned(self) -> bool:
        """Whether the attached segment is page-locked, at least in part; copies of what is not are
        correct but slow."""
        return self._pinned is not None and self._pinned.starts.size > 0

    @property
    def ways(self) -> Sequence[CopyWay]:
        """Ways of copying that ops may use; the kernel copies only whole words of 16 bytes."""
        kernel = None if self._kernel is None else CopyWay.KERNEL
        return tuple(way for way in (self._engine, kernel) if way is not None)

    def choose(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind
    ) -> CopyWay:
        """Choose the way of copying for these copies.

        Raises:
            RuntimeError: No way supports them.
        """
        engine, kernel = self._engine, self._kernel
        if engine is not None and (kernel is None or len(sizes) < kernel.MIN_RUNS):
            return engine
        assert kernel is not None
        if not kernel.takes(destinations, sources, sizes):
            if engine is None:
                raise RuntimeError("only the kernel can copy here, and it needs whole words")
            return engine
        if engine is None or self._choices[kind].prefers_kernel(len(sizes), int(sizes.sum())):
            return CopyWay.KERNEL
        return engine

    def may_start(self, kind: OpKind, after: torch.cuda.Event | None) -> bool:
        """Whether `start` would not wait: a store to unpinned memory ends before it returns."""
        assert self._pinned is not None
        return kind is OpKind.H2D or self._pinned.is_whole or after is None or after.query()

    def queue(self, kind: OpKind) -> None:
        return None

    def close(self) -> None:
        """Wait for copies in flight, and unpin. Never raises: errors are logged. Idempotent."""
        pinned, self._pinned = self._pinned, None
        streams, self._streams = self._streams, None
        steps: list[Callable[[], None]] = []
        if streams is not None:
            steps += [streams.bind, *streams.synchronizing_steps()]
        if pinned is not None:
            steps.append(pinned.close)
        steps += [] if streams is None else streams.closing_steps()
        for step in steps:
            try:
                step()
            except Exception as error:  # a lost device, say; the remaining steps still run
                log_event(
                    logger, logging.WARNING, "copier_not_closed_cleanly", error=describe(error)
                )

    def _queue_as_chosen(self, runs: Runs, kind: OpKind, lane: Lane) -> None:
        """Queue the copies in the way that `choose` returns. If the kernel fails it is abandoned
        for good, and the copy engine takes over.

        This includes a lack of memory for its table: on every retry torch's allocator would
        first empty its cache, which stalls the model.
        """
        way = self.choose(*runs, kind)
        try:
            self._queue(runs, kind, way, lane)
        except Exception as error:
            if way is not CopyWay.KERNEL or self._engine is None:
                raise
            assert self._streams is not None
            self._streams.settle(lane)
            self._kernel = None
            log_event(
                logger, logging.WARNING, "copy_way_given_up", way=way.value,
                error=describe(error), effect=f"all copies use {self._engine.value}",
            )  # fmt: skip
            self._queue(runs, kind, self._engine, lane)

    def _queue(
        self, runs: Runs, kind: OpKind, way: CopyWay, lane: Lane, is_pinned: bool | None = None
    ) -> None:
        """Queue copies in one way. By default memory is pinned if the segment is."""
        assert self._streams is not None
        is_pinned = self.is_pinned if is_pinned is None else is_pinned
        stream = self._streams[lane]
        match way:
            case CopyWay.BATCH:
                self._driver.copy_batch(*runs, _SOURCE_ORDER[kind], stream.cuda_stream)
            case CopyWay.SINGLE:
                self._driver.copy_singly(*runs, stream.cuda_stream, is_pinned=is_pinned)
            case CopyWay.KERNEL:
                assert self._kernel is not None
                with torch.cuda.stream(stream):
                    programs = self._programs.get(kind, self._kernel.PROGRAMS[0])
                    self._kernel.copy_runs(*runs, self.device, programs)

    def _find_ways(self) -> None:
        """Test all ways and keep those that pass."""
        assert self._streams is not None and self._pinned is not None
        self._streams.bind()
        with torch.cuda.stream(self._streams[Lane.LOADS]):
            with open_scratch(self._driver, self.device, pinned=self.is_pinned) as scratch:
                self.verdicts = [self._test(way, scratch, self.is_pinned) for way in CopyWay]
                passed = passed_ways(self.verdicts, self.device)
                self._engine = passed[0] if passed[0] is not CopyWay.KERNEL else None
                if CopyWay.KERNEL not in passed:
                    self._kernel = None
                elif self._engine is not None:
                    self._time(self._engine, scratch)
            if self._pinned.is_partial:
                with open_scratch(self._driver, self.device, pinned=False) as scratch:
                    verdicts = [self._test(way, scratch, False) for way in _ENGINE_WAYS]
                    self._pageable_way = passed_ways(verdicts, self.device)[0]

    def _test(self, way: CopyWay, scratch: Scratch, is_pinned: bool) -> Verdict:
        missing = self._missing(way, scratch)
        if missing:
            if way is CopyWay.KERNEL:
                log_event(logger, logging.INFO, "copy_kernel_missing", reason=missing)
            return Verdict(way, missing)
        verdict = check_way(
            way, lambda runs, kind: self._copy_now(runs, kind, way, is_pinned), scratch
        )
        for kind, failure in verdict.failures.items():
            log_event(
                logger, logging.WARNING, "copy_way_failed", way=way.value, op=kind.name,
                error=failure, effect="it is not used",
            )  # fmt: skip
        return verdict

    def _missing(self, way: CopyWay, scratch: Scratch) -> str:
        """Return why a way cannot be tested here; "" if it can. Loads the kernel."""
        if way is CopyWay.BATCH and not self._driver.has_batch_copy:
            return "it needs a CUDA driver of 12.8 or later"
        if way is not CopyWay.KERNEL:
            return ""
        if not (self._pinned and self._pinned.is_reachable and scratch.is_reachable):
            return "the device cannot map the host pool"
        try:
            from flexcache.transfer.workers import copy_kernel
        except Exception as error:  # Triton is missing or does not start
            return describe(error)
        self._kernel = copy_kernel
        return ""

    def _time(self, engine: CopyWay, scratch: Scratch) -> None:
        """Time the kernel and the engine; if that fails, the kernel is not used."""
        assert self._kernel is not None
        programs = self._kernel.PROGRAMS

        def copy(kind: OpKind, number: int, count: int, size: int) -> None:
            """Copy by the kernel with this number of programs, or by the engine with 0."""
            self._programs[kind] = number
            offsets = np.arange(count, dtype=np.int64) * size
            runs = scratch.runs(kind, offsets, offsets, np.full(count, size, np.int64))
            self._copy_now(runs, kind, CopyWay.KERNEL if number else engine)

        for kind in _SOURCE_ORDER:
            try:
                costs = measure_costs({n: partial(copy, kind, n) for n in (0, *programs)})
                choice = CopyChoice.of(costs.pop(0), costs)
            except DeviceLostError:
                raise
            except Exception as error:
                log_event(
                    logger, logging.WARNING, "copies_not_timed", op=kind.name,
                    error=describe(error), effect="the kernel is not used",
                )  # fmt: skip
                self._kernel = None
                return
            self._choices[kind], self._programs[kind] = choice, choice.programs
            log_event(logger, logging.INFO, "copy_way_chosen", op=kind.name, choice=choice)

    def _copy_now(self, runs: Runs, kind: OpKind, way: CopyWay, is_pinned: bool = True) -> None:
        """Copy, and wait until nothing is in flight, even after an error."""
        assert self._streams is not None
        lane = Lane.of(kind, urgent=False)
        try:
            self._queue(runs, kind, way, lane, is_pinned)
        finally:
            self._streams.settle(lane)
