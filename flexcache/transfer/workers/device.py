"""The device worker: executes H2D and D2H for one rank, inside the engine's own process.

The process that owns the memory does the copy, so no other process needs a handle to it. Ops run in
order, loads before stores. A gated op waits until the engine's worker thread opens the gate of its
task; on CUDA it is then ordered after the work queued on the compute stream at that moment, so that
a copy never overtakes queued work on the same slots.

A load that the engine waits for layer by layer (`load_by_layer`) is copied in parts of one or more
layers, before all other ops; concurrent ones take turns, so that all get their first layers first.

An op of a revoked task ends with nothing moved; a copy on the CPU stops between two pieces
(`permit`). On a GPU everything that was started lands, even while the process is stopped.

`DeviceWorker` is driven by one thread (`client.rank`); only methods marked thread-safe may be
called from another. It has no sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexcache.errors import DeviceLostError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.messages import Done, Execute, unpack_ids
from flexcache.transfer.workers.copier import Copier, Fence
from flexcache.transfer.workers.layer_load import LayerLoad
from flexcache.transfer.workers.permit import CopyPermit

Addresses = npt.NDArray[np.int64]

_MIN_PART_BYTES = 4 << 20  # of a load by layer: below this, starting a copy costs what it gains


@dataclass(frozen=True, slots=True)
class _Moving:
    op_id: int
    num_blocks: int
    landed: Fence


@dataclass(slots=True)
class _Copies:
    """An op's addresses: a row for each block, a column for each segment."""

    message: Execute
    destinations: Addresses
    sources: Addresses
    num_units: int
    """Blocks of the host segment."""
    num_started: int = 0
    """Columns whose copies were started."""

    @property
    def num_blocks(self) -> int:
        return len(self.sources)


class DeviceWorker:
    """Executes device ops against one rank's KV tensors and its host segment.

    Every op given to `execute` yields exactly one `Done`, from `advance` or `abandon`.

    Args:
        permit: Set to the task of the current copy; shared with the copier.
        blocks_per_unit: GPU blocks for each block of the host segment, where they are in sequence.
        may_skip: Whether -1 stands for a GPU block that is not to be copied.
    """

    def __init__(
        self,
        layout: BlockLayout,
        segment: HostSegment,
        copier: Copier,
        permit: CopyPermit | None = None,
        blocks_per_unit: int = 1,
        may_skip: bool = False,
    ) -> None:
        self._layout = layout
        self._blocks_per_unit = blocks_per_unit
        self._lowest_gpu_block = -1 if may_skip else 0
        self._segment = segment
        self._copier = copier
        self._permit = permit or CopyPermit()
        self.failure: str | None = None
        """Why it is unknown what has landed. After that, only `close` and `abandon` may follow."""
        self._loads_by_layer: deque[Execute] = deque()
        self._loads: deque[Execute] = deque()
        self._stores: deque[Execute] = deque()
        self._parked: dict[int, list[Execute]] = {}  # task id -> ops behind its gate
        self._in_parts: list[_Copies] = []
        self._moving: list[_Moving] = []
        self._dropped: dict[int, None] = {}
        self._gates: dict[int, Fence | None] = {}
        self._layer_loads: dict[int, LayerLoad] = {}
        self._is_closed = False
        self._gate_lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do or to wait for now."""
        return self._has_to_start or bool(self._moving)

    @property
    def only_waits(self) -> bool:
        """Whether the only work left is waiting for copies to land."""
        return bool(self._moving) and not self._has_to_start

    @property
    def _has_to_start(self) -> bool:
        return bool(
            self._loads_by_layer or self._in_parts or self._loads or self._stores or self._dropped
        )

    def open_gates(self, task_ids: Iterable[int]) -> None:
        """Let ops of these tasks start, after the work the engine has queued. Thread-safe."""
        fence = self._copier.fence()
        with self._gate_lock:
            for task_id in task_ids:
                self._gates[task_id] = fence

    def load_by_layer(self, task_id: int, num_blocks: int) -> LayerLoad:
        """Let a load start; the caller will wait for its layers. Thread-safe.

        The task must have a single op, over all ``num_blocks``.
        """
        fence = self._copier.fence()
        load = LayerLoad(self._layout.layer_ends, num_blocks)
        with self._gate_lock:
            if not self._is_closed:
                self._gates[task_id] = fence
                self._layer_loads[task_id] = load
                return load
        load.end()
        return load

    def close_gates(self, task_ids: Iterable[int]) -> None:
        """Forget gates of tasks that have ended. Thread-safe."""
        with self._gate_lock:
            for task_id in task_ids:
                self._gates.pop(task_id, None)

    def end_layer_load(self, task_id: int) -> bool:
        """End a load by layer: layers not loaded yet are lost. Returns whether it was one."""
        with self._gate_lock:
            load = self._layer_loads.pop(task_id, None)
            if load is not None:
                self._gates.pop(task_id, None)
        if load is None:
            return False
        load.end()
        return True

    @property
    def layer_loads(self) -> list[int]:
        """Tasks of loads by layer that have not ended."""
        with self._gate_lock:
            return list(self._layer_loads)

    def execute(self, message: Execute) -> None:
        with self._gate_lock:
            is_open = not message.gated or message.task_id in self._gates
        if not is_open:
            self._parked.setdefault(message.task_id, []).append(message)
        elif self._layer_load(message) is not None:
            self._loads_by_layer.append(message)
        else:
            (self._loads if message.kind is OpKind.H2D else self._stores).append(message)

    def drop(self, op_id: int) -> None:
        """Drop an op: if it has not started, it ends with nothing moved."""
        self._dropped[op_id] = None

    def advance(self) -> list[Done]:
        """Start ops that may start and return those that ended. Blocks only to copy on the CPU."""
        self._release_parked()
        done = self._end_dropped()
        # On the CPU a start is the whole copy: one per turn, so that messages get through.
        if self._loads_by_layer:
            done.extend(self._start(self._loads_by_layer.popleft()))
        elif self._in_parts:
            copies = min(self._in_parts, key=lambda copies: copies.num_started)
            done.extend(self._start_part(copies, self._layer_load(copies.message)))
        elif queue := self._loads or self._stores:
            done.extend(self._start(queue.popleft()))
        still_moving = []
        for moving in self._moving:
            if self._has_landed(moving):
                done.append(Done(moving.op_id, moving.num_blocks))
            else:
                still_moving.append(moving)
        self._moving = still_moving
        return done

    def _has_landed(self, moving: _Moving) -> bool:
        try:
            return moving.landed.query()
        except Exception as error:  # the driver or its wrapper may raise any class
            self.failure = f"{type(error).__name__}: {error}"
            return False

    def _release_parked(self) -> None:
        if not self._parked:
            return
        with self._gate_lock:
            opened = [task_id for task_id in self._parked if task_id in self._gates]
        for task_id in opened:
            for message in self._parked.pop(task_id):
                self.execute(message)

    def _end_dropped(self) -> list[Done]:
        if not self._dropped:
            return []
        ended = []
        queues = (self._loads_by_layer, self._loads, self._stores, *self._parked.values())
        for queue in queues:
            for message in [m for m in queue if m.op_id in self._dropped]:
                queue.remove(message)
                ended.append(self._failed(message, "dropped before it started"))
        self._parked = {task: ops for task, ops in self._parked.items() if ops}
        self._dropped = {}
        return ended

    def _start(self, message: Execute) -> list[Done]:
        is_load = message.kind is OpKind.H2D
        src, dst = unpack_ids(message.src), unpack_ids(message.dst)
        gpu, host = (dst, src) if is_load else (src, dst)
        layout, segment = self._layout, self._segment
        by_layer = self._layer_load(message)
        per_unit = self._blocks_per_unit
        problem = (
            _unpaired(gpu, host, per_unit)
            or _out_of_range("GPU", gpu, layout.num_blocks, self._lowest_gpu_block)
            or _out_of_range("host", host, segment.num_blocks)
            or (_not_whole(len(gpu), by_layer.num_blocks) if by_layer is not None else None)
        )
        if problem:
            return [self._failed(message, problem)]
        num_units, in_unit = len(host), None
        if self._lowest_gpu_block < 0:
            wanted = np.flatnonzero(gpu >= 0)
            if not len(wanted):
                return [Done(message.op_id, num_units)]
            in_unit = wanted % per_unit * layout.block_bytes
            gpu, host = gpu[wanted], host[wanted // per_unit]
        on_gpu = layout.gpu_addresses(gpu)
        on_host = layout.host_addresses(segment.address, segment.stride, host)
        if in_unit is not None:
            on_host += in_unit[:, None]
        ends = (on_gpu, on_host) if is_load else (on_host, on_gpu)
        copies = _Copies(message, *ends, num_units)
        if by_layer is not None:
            self._in_parts.append(copies)
            return self._start_part(copies, by_layer)
        try:
            landed = self._start_columns(copies, len(layout.sizes))
        except Exception as error:  # the driver or a compiler may raise any class
            return [self._not_started(message, error)]
        return self._started(copies, landed)

    def _start_part(self, copies: _Copies, load: LayerLoad | None) -> list[Done]:
        """Start the next layers of a load by layer."""
        message, stop = copies.message, self._part_end(copies)
        if load is None or not load.begin_part():
            self._in_parts.remove(copies)
            return [self._failed(message, "the engine no longer waits for it")]
        try:
            landed = self._start_columns(copies, stop)
        except Exception as error:
            self._in_parts.remove(copies)
            return [self._not_started(message, error)]
        load.part_started(stop, landed)
        if stop < len(self._layout.sizes):
            return []
        self._in_parts.remove(copies)
        return self._started(copies, landed)

    def _part_end(self, copies: _Copies) -> int:
        """Return the first end of a layer that makes the next part large enough, or the last."""
        offsets, ends = self._layout.offsets, sorted(set(self._layout.layer_ends.values()))
        enough = offsets[copies.num_started] + _MIN_PART_BYTES / max(1, copies.num_blocks)
        inner = (end for end in ends[:-1] if end > copies.num_started and offsets[end] >= enough)
        return next(inner, ends[-1])

    def _start_columns(self, copies: _Copies, stop: int) -> Fence | None:
        """Start copies of the next segments of all blocks, up to ``stop``."""
        message, columns = copies.message, slice(copies.num_started, stop)
        copies.num_started = stop
        self._permit.task_id = message.task_id
        self._permit.check()
        with self._gate_lock:
            after = self._gates.get(message.task_id)
        if after is None:  # not gated: ordered after the work on the default stream so far
            after = self._copier.fence()
        return self._copier.start(
            copies.destinations[:, columns].ravel(),
            copies.sources[:, columns].ravel(),
            np.tile(self._layout.sizes[columns], copies.num_blocks),
            message.kind,
            after,
        )

    def _started(self, copies: _Copies, landed: Fence | None) -> list[Done]:
        """Record that all copies of an op were started; the last of them land with ``landed``."""
        if landed is None:
            return [Done(copies.message.op_id, copies.num_units)]
        self._moving.append(_Moving(copies.message.op_id, copies.num_units, landed))
        return []

    def _not_started(self, message: Execute, error: Exception) -> Done:
        if isinstance(error, DeviceLostError):
            self.failure = str(error)
        return self._failed(message, str(error))

    def _failed(self, message: Execute, reason: str) -> Done:
        load = self._layer_load(message)
        if load is not None:
            load.end()
        return Done(message.op_id, 0, error=reason)

    def _layer_load(self, message: Execute) -> LayerLoad | None:
        if message.kind is not OpKind.H2D:
            return None
        with self._gate_lock:
            return self._layer_loads.get(message.task_id)

    def close(self) -> None:
        """Wait for copies in flight; no more will start."""
        with self._gate_lock:
            self._is_closed = True
        for task_id in self.layer_loads:
            self.end_layer_load(task_id)
        self._copier.close()

    def abandon(self, reason: str) -> list[Done]:
        """End all unfinished ops. The worker must be closed."""
        queues = (self._loads_by_layer, self._loads, self._stores, *self._parked.values())
        op_ids = [message.op_id for queue in queues for message in queue]
        op_ids += [copies.message.op_id for copies in self._in_parts]
        op_ids += [moving.op_id for moving in self._moving]
        return [Done(op_id, 0, error=reason) for op_id in op_ids]


def _unpaired(gpu: npt.NDArray[np.int64], host: npt.NDArray[np.int64], per_unit: int) -> str | None:
    if len(gpu) != len(host) * per_unit:
        return f"{len(gpu)} GPU blocks do not pair with {len(host)} host blocks"
    return None


def _out_of_range(
    place: str, blocks: npt.NDArray[np.int64], count: int, lowest: int = 0
) -> str | None:
    if len(blocks) and (int(blocks.min()) < lowest or int(blocks.max()) >= count):
        return f"a {place} block lies outside of [0, {count})"
    return None


def _not_whole(num_blocks: int, wanted: int) -> str | None:
    if num_blocks != wanted:
        return f"{num_blocks} of {wanted} blocks cannot be loaded layer by layer"
    return None
