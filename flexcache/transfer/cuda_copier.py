"""Scattered copies between the host pool and KV tensors on a CUDA device.

An op is three arrays of addresses and sizes, made by numpy and passed in one call: to the copy
engines (`cuda_driver`), which take no multiprocessor from the model, or to a kernel (`copy_kernel`)
if that is clearly quicker, as for many small copies (`copy_ways`). Only ways that passed a
self-test are used. They run on streams of our own (`CudaStreams`); each op is
ordered after an event of the compute stream, and another event fires when it has landed. The
engine's thread never waits.

Figures of an H200 are in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch

from flexcache.errors import DeviceLostError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage import machine as numa
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.copier import PIECE_RUNS, CopyLane, Runs
from flexcache.transfer.copy_ways import (
    CopyChoice,
    CopyWay,
    ScratchMemory,
    Verdict,
    check_way,
    describe,
    measure_costs,
    open_scratch,
    passed_ways,
)
from flexcache.transfer.cuda_driver import CudaDriver, PinnedSegment, SourceOrder
from flexcache.transfer.hip_driver import load_driver

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# A rank's context on its GPU, and streams of its own there.
#
# torch hands out 32 streams in turn: one of those would sooner or later be the engine's too, and
# our copies would wait for its work, or be captured into its graph.
#
# Each direction has a stream, so that both directions of the link are used at once, and loads by
# layer have one, so that they do not come behind loads between steps. Its priority helps kernels
# only: copy engines take the copies of all streams in turn.


class CudaStreams:
    """Streams of one device, one per lane. Used by one thread at a time, after `bind`.

    Raises:
        RuntimeError: The driver refused; nothing is left.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self.device = device
        self._driver = driver
        self._handles: list[int] = []
        self._lanes: dict[CopyLane, torch.cuda.ExternalStream] = {}
        self._context = driver.open_context(device.index)
        try:
            self.bind()
            for lane in CopyLane:
                handle = driver.make_stream(is_urgent=lane is CopyLane.LAYERS)
                self._handles.append(handle)
                self._lanes[lane] = torch.cuda.ExternalStream(handle, device)
        except BaseException:
            for step in self.closing_steps():
                step()
            raise

    def __getitem__(self, lane: CopyLane) -> torch.cuda.ExternalStream:
        return self._lanes[lane]

    def bind(self) -> None:
        """Set the calling thread's device for torch, and its context for the driver.

        A thread starts on device 0, and torch returns to it after each use of another device: that
        would make a context there, of some hundred MB, in which later calls would run.
        """
        torch.cuda.set_device(self.device)
        self._driver.bind(self._context)

    def settle(self, lane: CopyLane) -> None:
        """Wait until no copy of a lane is in flight.

        Raises:
            DeviceLostError: The device no longer works.
        """
        try:
            self._lanes[lane].synchronize()
        except Exception as error:
            raise DeviceLostError(f"{self.device} no longer works: {error}") from error

    def synchronizing_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the calls that wait for all copies; each may raise."""
        for stream in self._lanes.values():
            yield stream.synchronize

    def closing_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the calls that give everything back once copies have ended; each may raise."""
        for handle in self._handles:
            yield partial(self._driver.destroy_stream, handle)
        yield partial(self._driver.close_context, self.device.index)


T = TypeVar("T")

_INTERVAL_S = 0.2


def show_life_during(work: Callable[[], T], show_life: Callable[[], None]) -> T:
    """Run work on another thread and show life, since it may outlast the server's patience."""
    with ThreadPoolExecutor(1, "flexcache-setup") as threads:
        done = threads.submit(work)
        while not wait([done], _INTERVAL_S).done:
            show_life()
        return done.result()


_PIN_STEP = 1 << 30
_ENGINE_WAYS = (CopyWay.BATCH, CopyWay.SINGLE)
_MOST_RUNS = 3 * PIECE_RUNS  # in a lane's tables, 9 MiB: all that is in flight, in copies of 2 KiB
_RUNS_PER_TABLE = 14_336  # three lanes' fill 1 MiB on the device; torch would take 20 MiB for more

# The source of a load was complete before the load was queued; the source of a store may still be
# written by the model, up to the event that the store is ordered after.
_SOURCE_ORDER = {OpKind.H2D: SourceOrder.ANY, OpKind.D2H: SourceOrder.STREAM}


@dataclass(slots=True)
class _Table:
    """Words of a lane's memory, from ``start`` to ``stop``, that a kernel may still read."""

    start: int
    stop: int
    landed: torch.cuda.Event | None = None
    """Set when the op's last copy was queued."""


class KernelTables:
    """Pinned memory for the kernel's tables of copies, which the device reads there.

    It is kept from attach on: to allocate pinned memory may wait for all of the device's work, and
    to allocate device memory may empty torch's cache.

        | read by the device | free ... |     for each lane, whose ops land in their order

    Attributes:
        scratch: Of each lane, on the device.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        words = torch.empty((len(CopyLane), 3 * _RUNS_PER_TABLE), dtype=torch.int64, device=device)
        self.scratch = dict(zip(CopyLane, words, strict=True))
        size = 3 * _MOST_RUNS * 8
        self._segment = HostSegment.create(size, len(CopyLane))
        self._segment.map()
        self._pin = PinnedSegment(driver, self._segment, self._segment.size)
        self.is_reachable = self._pin.is_reachable
        starts = (self._segment.address + i * self._segment.stride for i in range(len(CopyLane)))
        memory = ((c_int64 * (size // 8)).from_address(start) for start in starts)
        self._words = dict(zip(CopyLane, map(np.ctypeslib.as_array, memory), strict=True))
        self._used: dict[CopyLane, deque[_Table]] = {lane: deque() for lane in CopyLane}

    def has_room(self, lane: CopyLane, num_runs: int) -> bool:
        """Whether an op's table fits now, beside those that may still be read."""
        return self._find(lane, num_runs) is not None

    def fill(self, lane: CopyLane, runs: Runs) -> torch.Tensor | None:
        """Write a table ``(3, n)`` of copies; return None if there is no room for it. It is left
        alone until the event of its `landed` has fired, or until `clear`."""
        num_runs = len(runs.sizes)
        start = self._find(lane, num_runs)
        if start is None:
            return None
        table = self._words[lane][start : start + 3 * num_runs].reshape(3, num_runs)
        np.stack(runs, out=table)
        self._used[lane].append(_Table(start, start + _words_for(num_runs)))
        return torch.from_numpy(table)

    def landed(self, lane: CopyLane, event: torch.cuda.Event) -> None:
        """Note the event after which the lane's tables are no longer read."""
        for table in self._used[lane]:
            table.landed = table.landed or event

    def clear(self, lane: CopyLane) -> None:
        """Forget a lane's tables: nothing of it is in flight."""
        self._used[lane].clear()

    def close(self) -> None:
        """Unpin. Copies must have ended."""
        self._pin.close()
        self._words.clear()
        self._segment.close()

    def _find(self, lane: CopyLane, num_runs: int) -> int | None:
        """Return where the next table begins; None if there is no room for it."""
        used, size, room = self._used[lane], _words_for(num_runs), len(self._words[lane])
        while used and used[0].landed is not None and used[0].landed.query():
            used.popleft()
        start = used[-1].stop if used else 0
        if start + size > room:
            start = 0
        is_free = not any(start < each.stop and each.start < start + size for each in used)
        return start if is_free and size <= room else None


def split_by_table(runs: Runs) -> Iterator[Runs]:
    """Yield copies in parts, each of which fits in a lane's memory on the device."""
    for first in range(0, len(runs.sizes), _RUNS_PER_TABLE):
        yield runs.part(slice(first, first + _RUNS_PER_TABLE))


def _words_for(num_runs: int) -> int:
    """Return a table's words: whole 16 bytes, or Triton would compile for each alignment."""
    return 3 * num_runs + num_runs % 2


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
        self._tables: KernelTables | None = None
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
        self, runs: Runs, kind: OpKind, after: object, urgent: bool = False, alone: bool = False,
        way: CopyWay | None = None,
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
        lane = CopyLane.of(kind, urgent)
        stream = self._streams[lane]
        try:
            self._streams.bind()
            runs = runs.joined(self._pinned.starts)
            if after is not None:
                stream.wait_event(after)
            runs, pageable = self._pinned.split(runs, kind)
            if way is not None:
                self._queue(runs, kind, way, lane)
            else:
                self._queue_as_chosen(runs, kind, lane)
            if len(pageable.sizes):
                assert self._pageable_way is not None
                self._queue(pageable, kind, self._pageable_way, lane, is_pinned=False)
            landed = torch.cuda.Event()
            landed.record(stream)
            if self._tables is not None:
                self._tables.landed(lane, landed)
        except Exception as error:
            self._settle(lane)  # slots of a failed op are reused at once
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

    def choose(self, runs: Runs, kind: OpKind) -> CopyWay:
        """Choose the way of copying for these copies.

        Raises:
            RuntimeError: No way supports them.
        """
        engine, kernel = self._engine, self._kernel
        if kernel is None or (engine is not None and len(runs.sizes) < kernel.MIN_RUNS):
            assert engine is not None
            return engine
        if not kernel.takes(*runs):
            if engine is None:
                raise RuntimeError("only the kernel can copy here, and it needs whole words")
            return engine
        if engine is None:
            return CopyWay.KERNEL
        by_kernel = self._choices[kind].prefers_kernel(len(runs.sizes), runs.num_bytes)
        return CopyWay.KERNEL if by_kernel else engine

    def may_start(self, kind: OpKind, after: torch.cuda.Event | None) -> bool:
        """Whether `start` would not wait: a store to unpinned memory ends before it returns. Nor
        would it make as many small copies as a piece may have by a copy engine."""
        # That call would wait for the step that the store comes after, and all other ops and signs
        # of life of the rank with it.
        assert self._pinned is not None
        lane, tables = CopyLane.of(kind, urgent=False), self._kernel and self._tables
        if tables is not None and not tables.has_room(lane, PIECE_RUNS):
            return False
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
        tables, self._tables = self._tables, None
        steps += [each.close for each in (pinned, tables) if each is not None]
        steps += [] if streams is None else streams.closing_steps()
        for step in steps:
            try:
                step()
            except Exception as error:  # a lost device, say; the remaining steps still run
                log_event(
                    logger, logging.WARNING, "copier_not_closed_cleanly", error=describe(error)
                )

    def _queue_as_chosen(self, runs: Runs, kind: OpKind, lane: CopyLane) -> None:
        """Queue the copies in the way that should be quickest.

        If the kernel fails it is abandoned for good, and the copy engine takes over.
        """
        way = self.choose(runs, kind)
        if self._engine is None or way is not CopyWay.KERNEL:
            self._queue(runs, kind, way, lane)
            return
        assert self._tables is not None
        if not self._tables.has_room(lane, len(runs.sizes)):  # the model must not wait for a table
            self._queue(runs, kind, self._engine, lane)
            return
        try:
            self._queue(runs, kind, way, lane)
        except Exception as error:
            self._settle(lane)
            # For good: at each retry torch's allocator would empty its cache and stall the model.
            self._kernel = None
            log_event(
                logger, logging.WARNING, "copy_way_given_up", way=way.value,
                error=describe(error), effect=f"all copies use {self._engine.value}",
            )  # fmt: skip
            self._queue(runs, kind, self._engine, lane)

    def _queue(
        self, runs: Runs, kind: OpKind, way: CopyWay, lane: CopyLane, is_pinned: bool | None = None
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
                with torch.cuda.stream(stream):
                    self._launch(runs, lane, self._programs.get(kind))

    def _launch(self, runs: Runs, lane: CopyLane, programs: int | None) -> None:
        """Launch the kernel on the current stream, with as many tables as are needed."""
        assert self._kernel is not None and self._tables is not None
        programs = programs or self._kernel.PROGRAMS[0]
        for part in split_by_table(runs):
            table = self._tables.fill(lane, part)
            if table is None:  # and no engine makes these copies
                self._settle(lane)
                table = self._tables.fill(lane, part)
                assert table is not None
            self._kernel.launch(table, self._tables.scratch[lane], programs)

    def _find_ways(self) -> None:
        """Test all ways and keep those that pass."""
        assert self._streams is not None and self._pinned is not None
        self._streams.bind()
        with torch.cuda.stream(self._streams[CopyLane.LOADS]):
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

    def _test(self, way: CopyWay, scratch: ScratchMemory, is_pinned: bool) -> Verdict:
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

    def _missing(self, way: CopyWay, scratch: ScratchMemory) -> str:
        """Return why a way cannot be tested here; "" if it can. Loads the kernel."""
        if way is CopyWay.BATCH and not self._driver.has_batch_copy:
            return "it needs a CUDA driver of 12.8 or later"
        if way is not CopyWay.KERNEL:
            return ""
        if not (self._pinned and self._pinned.is_reachable and scratch.is_reachable):
            return "the device cannot map the host pool"
        try:
            from flexcache.transfer import copy_kernel
        except Exception as error:  # Triton is missing or does not start
            return describe(error)
        try:
            self._tables = self._tables or KernelTables(self._driver, self.device)
        except RuntimeError as error:  # the device has no memory left
            return describe(error)
        if not self._tables.is_reachable:
            return "the device cannot map the memory of its tables"
        self._kernel = copy_kernel
        return ""

    def _time(self, engine: CopyWay, scratch: ScratchMemory) -> None:
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
        lane = CopyLane.of(kind, urgent=False)
        try:
            self._queue(runs, kind, way, lane, is_pinned)
        finally:
            self._settle(lane)

    def _settle(self, lane: CopyLane) -> None:
        """Wait until no copy of a lane is in flight.

        Raises:
            DeviceLostError: The device no longer works.
        """
        assert self._streams is not None
        self._streams.settle(lane)
        if self._tables is not None:
            self._tables.clear(lane)
