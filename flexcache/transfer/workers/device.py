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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexcache.errors import DeviceLostError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.messages import Done, Execute
from flexcache.transfer.workers.copier import Copier, Fence
from flexcache.transfer.workers.layer_load import LayerLoad
from flexcache.transfer.workers.op_copies import Copies, OpAddresses, OpCopies
from flexcache.transfer.workers.permit import CopyPermit

_MIN_PART_BYTES = 4 << 20  # of a load by layer: below this, starting a copy costs what it gains


@dataclass(frozen=True, slots=True)
class _Moving:
    op_id: int
    num_blocks: int
    landed: Fence
    kind: OpKind


class DeviceWorker:
    """Executes device ops against one rank's KV tensors and its host segment.

    Every op given to `execute` yields exactly one `Done`, from `advance` or `abandon`.

    Args:
        layouts: Of each group of the model; of all layers if it has no groups.
        permit: Set to the task of the current copy; shared with the copier.
        blocks_per_unit: As in `OpAddresses`, like ``may_skip``.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        segment: HostSegment,
        copier: Copier,
        permit: CopyPermit | None = None,
        blocks_per_unit: int = 1,
        may_skip: bool = False,
    ) -> None:
        self._layouts = layouts
        self._addresses = OpAddresses(layouts, segment, blocks_per_unit, may_skip)
        self._copier = copier
        self._permit = permit or CopyPermit()
        self.failure: str | None = None
        """Why it is unknown what has landed. After that, only `close` and `abandon` may follow."""
        self._loads_by_layer: deque[Execute] = deque()
        self._loads: deque[Execute] = deque()
        self._stores: deque[Execute] = deque()
        self._parked: dict[int, list[Execute]] = {}  # task id -> ops behind its gate
        self._in_parts: list[OpCopies] = []
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

        Raises:
            ValueError: The model has several groups.
        """
        if len(self._layouts) > 1:
            raise ValueError("a model with several groups is not loaded layer by layer")
        [layout] = self._layouts
        fence = self._copier.fence()
        load = LayerLoad(layout.layer_ends, num_blocks)
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
        still_moving: list[_Moving] = []
        late: set[OpKind] = set()
        for moving in self._moving:  # ops are reported in the order in which they were started
            if moving.kind not in late and self._has_landed(moving):
                done.append(Done(moving.op_id, moving.num_blocks))
            else:
                late.add(moving.kind)
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
        by_layer = self._layer_load(message)
        try:
            copies = self._addresses.copies_of(message)
            if by_layer is not None:
                copies.require_whole(by_layer.num_blocks)
        except ValueError as error:
            return [self._failed(message, str(error))]
        if by_layer is not None:
            self._in_parts.append(copies)
            return self._start_part(copies, by_layer)
        if copies.is_empty:
            return [Done(message.op_id, copies.num_units)]
        try:
            landed = self._start_copies(message, copies.take_all())
        except Exception as error:  # the driver or a compiler may raise any class
            return [self._not_started(message, error)]
        return self._started(copies, landed)

    def _start_part(self, copies: OpCopies, load: LayerLoad | None) -> list[Done]:
        """Start the next layers of a load by layer."""
        message, stop = copies.message, self._part_end(copies)
        if load is None or not load.begin_part():
            self._in_parts.remove(copies)
            return [self._failed(message, "the engine no longer waits for it")]
        try:
            landed = self._start_copies(message, copies.take_until(stop))
        except Exception as error:
            self._in_parts.remove(copies)
            return [self._not_started(message, error)]
        load.part_started(stop, landed)
        if stop < len(self._layouts[0].sizes):
            return []
        self._in_parts.remove(copies)
        return self._started(copies, landed)

    def _part_end(self, copies: OpCopies) -> int:
        """Return the first end of a layer that makes the next part large enough, or the last."""
        [layout] = self._layouts
        offsets, ends = layout.offsets, sorted(set(layout.layer_ends.values()))
        enough = offsets[copies.num_started] + _MIN_PART_BYTES / max(1, copies.num_blocks)
        inner = (end for end in ends[:-1] if end > copies.num_started and offsets[end] >= enough)
        return next(inner, ends[-1])

    def _start_copies(self, message: Execute, copies: Copies) -> Fence | None:
        self._permit.task_id = message.task_id
        self._permit.check()
        with self._gate_lock:
            after = self._gates.get(message.task_id)
        if after is None:  # not gated: ordered after the work on the default stream so far
            after = self._copier.fence()
        return self._copier.start(*copies, message.kind, after)

    def _started(self, copies: OpCopies, landed: Fence | None) -> list[Done]:
        """Record that all copies of an op were started; the last of them land with ``landed``."""
        if landed is None:
            return [Done(copies.message.op_id, copies.num_units)]
        message = copies.message
        self._moving.append(_Moving(message.op_id, copies.num_units, landed, message.kind))
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
