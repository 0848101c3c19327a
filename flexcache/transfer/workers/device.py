"""The device worker: executes H2D and D2H for one rank, inside the engine's own process.

The process that owns the memory does the copy, so no other process needs a handle to it. Ops are
taken in turn, loads before stores. An op that is gated waits until the engine's worker thread opens
the gate of its task; on CUDA it is then ordered after the compute stream as it was at that moment,
so that a copy never overtakes work that was queued on the same slots.

`DeviceWorker` is driven by one thread (`server.tp_client`); only `open_gates` may be called from
another. It has no sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.messages import Done, Execute, unpack_ids
from flexcache.transfer.workers.copier import Copier, Fence


@dataclass(frozen=True, slots=True)
class _Moving:
    op_id: int
    num_blocks: int
    landed: Fence


class DeviceWorker:
    """Executes device ops against one rank's KV tensors and its host segment.

    Every op given to `execute` yields exactly one `Done` from `advance`.
    """

    def __init__(self, layout: BlockLayout, segment: HostSegment, copier: Copier) -> None:
        self._layout = layout
        self._segment = segment
        self._copier = copier
        self._loads: deque[Execute] = deque()
        self._stores: deque[Execute] = deque()
        self._parked: dict[int, list[Execute]] = {}  # task id -> ops behind its gate
        self._moving: list[_Moving] = []
        self._dropped: dict[int, None] = {}
        self._gates: dict[int, Fence | None] = {}
        self._gate_lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do or to wait for right now."""
        return bool(self._loads or self._stores or self._moving or self._dropped)

    @property
    def only_waits(self) -> bool:
        """Whether nothing is left to do but to see copies land."""
        return bool(self._moving) and not (self._loads or self._stores or self._dropped)

    def open_gates(self, task_ids: Iterable[int]) -> None:
        """Let ops of these tasks go, behind what the engine has queued up to now. Thread-safe."""
        fence = self._copier.fence()
        with self._gate_lock:
            for task_id in task_ids:
                self._gates[task_id] = fence

    def close_gates(self, task_ids: Iterable[int]) -> None:
        """Forget gates of tasks that have ended. Thread-safe."""
        with self._gate_lock:
            for task_id in task_ids:
                self._gates.pop(task_id, None)

    def execute(self, message: Execute) -> None:
        with self._gate_lock:
            is_open = not message.gated or message.task_id in self._gates
        if is_open:
            (self._loads if message.kind is OpKind.H2D else self._stores).append(message)
        else:
            self._parked.setdefault(message.task_id, []).append(message)

    def drop(self, op_id: int) -> None:
        """The op is not wanted any more; if it has not started, it ends with nothing moved."""
        self._dropped[op_id] = None

    def advance(self) -> list[Done]:
        """Start what may start and return what has ended. Blocks only for a copy on the CPU."""
        self._release_parked()
        done = self._end_dropped()
        # On the CPU a start is the whole copy: one op a turn, so that messages get through.
        queue = self._loads or self._stores
        if queue:
            done.extend(self._start(queue.popleft()))
        still_moving = []
        for moving in self._moving:
            if moving.landed.query():
                done.append(Done(moving.op_id, moving.num_blocks))
            else:
                still_moving.append(moving)
        self._moving = still_moving
        return done

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
        for queue in (self._loads, self._stores, *self._parked.values()):
            for message in [m for m in queue if m.op_id in self._dropped]:
                queue.remove(message)
                ended.append(Done(message.op_id, 0, error="dropped before it started"))
        self._parked = {task: ops for task, ops in self._parked.items() if ops}
        self._dropped = {}
        return ended

    def _start(self, message: Execute) -> list[Done]:
        is_load = message.kind is OpKind.H2D
        src, dst = unpack_ids(message.src), unpack_ids(message.dst)
        gpu, host = (dst, src) if is_load else (src, dst)
        problem = (
            _unpaired(gpu, host)
            or _out_of_range("GPU", gpu, self._layout.num_blocks)
            or _out_of_range("host", host, self._segment.num_blocks)
        )
        if problem:
            return [Done(message.op_id, 0, error=problem)]
        layout, segment = self._layout, self._segment
        on_gpu = layout.gpu_addresses(gpu).ravel()
        on_host = layout.host_addresses(segment.address, segment.stride, host).ravel()
        sizes = np.tile(layout.sizes, len(gpu))
        with self._gate_lock:
            after = self._gates.get(message.task_id)
        if after is None:  # not gated: behind the default stream as it is now
            after = self._copier.fence()
        try:
            landed = self._copier.start(
                on_gpu if is_load else on_host, on_host if is_load else on_gpu, sizes,
                message.kind, after,
            )  # fmt: skip
        except RuntimeError as error:
            return [Done(message.op_id, 0, error=str(error))]
        if landed is None:
            return [Done(message.op_id, len(gpu))]
        self._moving.append(_Moving(message.op_id, len(gpu), landed))
        return []

    def close(self) -> None:
        self._copier.close()


def _unpaired(gpu: npt.NDArray[np.int64], host: npt.NDArray[np.int64]) -> str | None:
    if len(gpu) != len(host):
        return f"{len(gpu)} GPU blocks do not pair with {len(host)} host blocks"
    return None


def _out_of_range(place: str, blocks: npt.NDArray[np.int64], count: int) -> str | None:
    if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= count):
        return f"a {place} block lies outside of [0, {count})"
    return None
