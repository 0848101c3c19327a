"""Gated tasks of a rank (`RankTasks`): what its thread and its engine's thread share about them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flexcache.errors import InternalError
from flexcache.ids import OpKind, epoch_of, session_of
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.gates import LayerLoad
from flexcache.transfer.messages import Done, Execute, unpack_ids

_NUM_REMEMBERED = 16_384  # ended tasks that the engine's worker has not asked for
Value = TypeVar("Value")


class GatedTasks:
    """Not thread-safe. Task ids tell the server and the session that they are of (`ids.TaskIds`).

    Attributes:
        epoch: The server's, from its task ids; 0 while the rank is not registered. Without a server
            every task is over: no copy can be running.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._ended: OrderedDict[int, int] = OrderedDict()
        self._sessions_over: OrderedDict[int, None] = OrderedDict()
        self._shut: OrderedDict[int, None] = OrderedDict()

    # -- events ----------------------------------------------------------------------------------

    def end(self, task_id: int, num_ok: int) -> None:
        """A task is over on every rank; its first ``num_ok`` blocks have arrived."""
        _remember(self._ended, task_id, num_ok)

    def lose(self) -> None:
        """Nothing of what has ended, and was not taken, is of use any more."""
        for task_id in self._ended:
            self._ended[task_id] = 0

    def end_session(self, session: int) -> None:
        """What has not been reported of a session's tasks never began, and will not."""
        _remember(self._sessions_over, session, None)

    def shut(self, task_ids: Iterable[int]) -> None:
        """Keep gates shut for good that were to be opened while there was no server."""
        for task_id in task_ids:
            _remember(self._shut, task_id, None)

    # -- questions -------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the end of some task was not taken yet."""
        return bool(self._ended)

    def is_shut(self, task_id: int) -> bool:
        """Whether the task's gate will never be opened."""
        return task_id in self._shut

    def not_ended(self, task_ids: Iterable[int]) -> list[int]:
        """The tasks whose end was not reported."""
        return [task_id for task_id in task_ids if task_id not in self._ended]

    def is_over(self, task_id: int) -> bool:
        """Whether no copy of the task is running or will."""
        return (
            task_id in self._ended
            or task_id in self._shut
            or session_of(task_id) in self._sessions_over
            or epoch_of(task_id) != self.epoch
        )

    def take_over(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Those of the tasks that are over, with how many blocks arrived. Each is returned once."""
        return {
            task_id: self._ended.pop(task_id, 0) for task_id in task_ids if self.is_over(task_id)
        }


def _remember(known: OrderedDict[int, Value], key: int, value: Value) -> None:
    """Keep it, and forget the oldest if there are too many."""
    known[key] = value
    if len(known) > _NUM_REMEMBERED:
        known.popitem(last=False)


@dataclass(slots=True)
class _Load:
    num_blocks: int = 0
    """GPU blocks that its ops fill."""
    open_ops: dict[int, int] = field(default_factory=dict)
    """Ops that have not ended, with their numbers of blocks in the pool."""
    is_lost: bool = False


class HeldLoads:
    """The gated loads of one registration whose end the server has not told. Not thread-safe.

    Some engines count on a load as soon as it has begun, and cannot compute what is lost. Their
    ranks finish the loads that they hold even if the server is lost: the ops name the blocks, and
    the pool is mapped. Such a load never reads a block that was given to others:

    * The server keeps an op's blocks pinned until the rank reports the op or leaves: says Goodbye
      or Hello, or dies. A rank that loses its server does neither before its held loads have ended,
      so the pins hold if the server lives after all, stopped or silent.
    * If the server is dead, nothing in its pool is given out any more. Copies that others began
      before write to blocks of their own: a block is pinned or written, never both. The next server
      makes another pool; the rank's mapping is of the old one, and ends before the rank greets that
      server.
    * A server that does not know the rank (`Rejected`) may have dropped its pins: nothing is
      finished.

    So it needs no second server, nor an agreement with one.

        given --all ops--> held --ops moved--> arrived, or lost
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._tasks: dict[int, int] = {}  # by open op

    # -- events ----------------------------------------------------------------------------------

    def given(self, message: Execute) -> None:
        """The rank was given an op of a gated load."""
        load = self._loads.setdefault(message.task_id, _Load())
        load.num_blocks += len(unpack_ids(message.dst))
        load.open_ops[message.op_id] = len(unpack_ids(message.src))
        self._tasks[message.op_id] = message.task_id

    def moved(self, done: Done) -> None:
        """An op has ended on this rank; ops that are not of held loads are ignored."""
        task_id = self._tasks.pop(done.op_id, None)
        if task_id is not None:
            load = self._loads[task_id]
            load.is_lost |= done.num_ok < load.open_ops.pop(done.op_id)

    def forget(self, task_ids: Iterable[int]) -> None:
        """The loads have ended on every rank, or the engine does without them."""
        for task_id in task_ids:
            load = self._loads.pop(task_id, None)
            for op_id in load.open_ops if load is not None else ():
                del self._tasks[op_id]

    # -- questions -------------------------------------------------------------------------------

    def holds(self, task_id: int, num_blocks: int) -> bool:
        """Whether the rank was given all ops of a load that fills so many GPU blocks."""
        load = self._loads.get(task_id)
        return load is not None and load.num_blocks >= num_blocks and not load.is_lost

    @property
    def task_ids(self) -> Collection[int]:
        """All loads, moved on this rank or not."""
        return self._loads.keys()

    @property
    def unfinished(self) -> list[int]:
        """Loads with blocks that have yet to be moved on this rank."""
        return [task_id for task_id, load in self._loads.items() if load.open_ops]

    def num_arrived(self, task_id: int) -> int:
        """How many blocks of a load have arrived: all or none."""
        load = self._loads[task_id]
        return 0 if load.is_lost or load.open_ops else load.num_blocks

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        listed = {op: task for task, load in self._loads.items() for op in load.open_ops}
        if listed != self._tasks:
            raise InternalError("the open ops and the loads that they are of disagree")


_GATE_PATIENCE_S = 3.0  # for the engine to come to a load that it has begun
_LEAVE_POLL_S = 0.002
EVENT_POLL_S = 0.0001
"""Interval between checks whether copies on a GPU have completed."""


class RankTasks:
    """The gates that an engine opens, the loads that the rank holds, and the ends. Thread-safe.

    Args:
        keeps_loads: Whether loads that the rank holds end even if the server is lost.
        wake: Lets the rank's thread look for work.
    """

    def __init__(self, keeps_loads: bool, wake: Callable[[], None]) -> None:
        self.keeps_loads = keeps_loads
        self.advance: Callable[[DeviceWorker], list[Done]]
        """Advances the worker while there is no server."""
        self._wake = wake
        self._changed = threading.Condition()
        self._gates = GatedTasks()
        self._held = HeldLoads()
        self._worker: DeviceWorker | None = None
        self._open: dict[int, None] = {}
        """Gated tasks of which ops were given, and no end reported."""
        self._stale: dict[int, None] = {}
        """Those of them that were planned for weights which have changed since."""
        self._is_cut_off = False
        """Whether the server was lost, so that nothing more will be given."""
        self.promised: deque[Execute] = deque()
        """Promised loads that the worker was not given yet."""

    # -- any thread ------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Nothing that was planned so far is of use any more, also what has arrived already."""
        with self._changed:
            self._gates.lose()
            self._stale |= self._open
            for task_id in self._held.task_ids if self._is_cut_off else ():
                self._end(task_id, 0)
            self._held = HeldLoads()
            self._changed.notify_all()

    # -- the engine's thread ---------------------------------------------------------------------

    def open_gates(self, task_ids: Iterable[int]) -> bool:
        """Let the tasks touch the GPU, behind the work that the calling thread has queued. Returns
        whether a gate has opened, which the rank has to look at."""
        with self._changed:
            worker = self._worker
            to_open = self._gates.not_ended(task_ids)
            if worker is None:  # no server: the gates stay shut, even if one appears later
                self._gates.shut(to_open)
        if worker is None or not to_open:
            return False
        worker.gates.open(to_open)
        return True

    def load_by_layer(self, task_id: int, num_blocks: int) -> LayerLoad:
        """Open the gate of a load that the caller waits for by layer."""
        with self._changed:
            worker = self._worker
            will_come = not self._is_cut_off or task_id in self._held.task_ids
            if worker is not None and will_come and not self._gates.is_over(task_id):
                load = worker.gates.load_by_layer(task_id, num_blocks)
                self._wake()
                return load
            if worker is None:
                self._gates.shut([task_id])
            self._gates.take_over([task_id])
        return _lost(num_blocks)

    def load_promised(self, message: Execute, num_blocks: int) -> LayerLoad:
        """Begin a promised load, which the caller waits for by layer."""
        with self._changed:
            worker, task_id = self._worker, message.task_id
            if worker is None or epoch_of(task_id) != self._gates.epoch:
                return _lost(num_blocks)  # the client was closed, or its thread has failed
            load = worker.gates.load_by_layer(task_id, num_blocks, is_promised=True)
            self.promised.append(message)
            self._wake()
            return load

    def wait_held(self, task_id: int, num_blocks: int, timeout: float | None) -> bool:
        """Wait until the rank holds a load of so many GPU blocks; return whether it does."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._held.holds(task_id, num_blocks)
                    or self._is_cut_off
                    or self._gates.is_over(task_id)
                ),
                timeout,
            )
            return self._held.holds(task_id, num_blocks)

    def forgo(self, task_ids: Iterable[int]) -> None:
        """Let go of loads that the engine does without."""
        with self._changed:
            self._held.forget(task_ids)
        self._wake()

    def wait_ended(self, timeout: float | None, task_ids: Sequence[int] = ()) -> bool:
        """Wait for any gated task to end, or for one of these; return whether one has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    any(map(self._gates.is_over, task_ids)) if task_ids else self._gates.has_ended
                ),
                timeout,
            )

    def take_ended(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Return the tasks that have ended, with how many blocks arrived."""
        with self._changed:
            ended = self._gates.take_over(task_ids)
            worker = self._worker
        if ended and worker is not None:
            worker.gates.forget(ended)
        return ended

    def leave(self) -> None:
        """The engine closes its client: no load is finished without the server any more."""
        with self._changed:
            self._held = HeldLoads()

    # -- the rank's thread -----------------------------------------------------------------------

    def attach(self, worker: DeviceWorker | None, epoch: int) -> None:
        """A registration begins with this worker and the epoch of the server's task ids; None and
        0: it is over, and with it every task."""
        with self._changed:
            self._worker, self._gates.epoch = worker, epoch
            self._held, self._is_cut_off = HeldLoads(), False
            self._open, self._stale = {}, {}
            self.promised.clear()
            self._changed.notify_all()

    def detach(self) -> None:
        """Let no gate open any more: copies are about to end."""
        with self._changed:
            self._worker = None

    def is_shut(self, message: Execute) -> bool:
        """Return whether the gate of an op will never be opened."""
        return message.gated and self._gates.is_shut(message.task_id)

    def can_wait(self, run: RunOp) -> bool:
        """Return whether an op of a server in this process can be taken when its gate opens.
        Thread-safe."""
        worker = self._worker
        if not run.gated or worker is None or self.keeps_loads:
            return False
        return not worker.gates.is_open(run.task_id) and not self._gates.is_shut(run.task_id)

    def given(self, message: Execute) -> None:
        """The worker was given an op."""
        if message.gated:
            with self._changed:
                self._open[message.task_id] = None
        if self.keeps_loads and message.gated and message.kind is OpKind.H2D:
            with self._changed:
                self._held.given(message)
                self._changed.notify_all()

    def moved(self, done: Done) -> None:
        """An op has ended on this rank, which keeps loads."""
        with self._changed:
            self._held.moved(done)

    def ended(self, task_id: int, num_ok: int) -> None:
        """A task has ended on every rank, with its first ``num_ok`` blocks."""
        with self._changed:
            self._held.forget([task_id])
            self._open.pop(task_id, None)
            is_stale = task_id in self._stale
            self._stale.pop(task_id, None)
            self._end(task_id, 0 if is_stale else num_ok)

    def session_over(self, session: int) -> None:
        """The tasks of a session that have not ended never began, and will not."""
        with self._changed:
            self._gates.end_session(session)
            of_session = [task for task in self._held.task_ids if session_of(task) == session]
            self._held.forget(of_session)
            for task_id in [task for task in self._open if session_of(task) == session]:
                del self._open[task_id]
                self._stale.pop(task_id, None)
            if (worker := self._worker) is not None:
                for task_id in worker.gates.layer_loads:
                    if session_of(task_id) == session:
                        worker.gates.end_layer_load(task_id)
            self._changed.notify_all()

    def finish(self, rest: Callable[[float], None]) -> None:
        """Finish the held loads without the server, which was lost; other ops may run meanwhile.

        Waits a moment for gates that are still shut.

        Args:
            rest: Waits for a wake-up, or for some seconds.
        """
        worker = self._worker
        if worker is None or not self.keeps_loads:
            return
        with self._changed:
            self._is_cut_off = True
            self._changed.notify_all()
        give_up_s = time.monotonic() + _GATE_PATIENCE_S
        while True:
            for done in self.advance(worker):
                self.moved(done)
            if self._are_ended(worker, time.monotonic() > give_up_s):
                return
            if worker.only_waits:
                time.sleep(EVENT_POLL_S)
            elif not worker.has_work:
                rest(give_up_s - time.monotonic())

    def serve_steps(self, may_leave: Callable[[], bool], rest: Callable[[float], None]) -> None:
        """Go on with what steps count on until this rank may leave. Other ops may run meanwhile.

        Args:
            rest: As in `finish`.
        """
        worker = self._worker
        while worker is not None and worker.failure is None and not may_leave():
            self.advance(worker)
            if worker.only_waits:
                time.sleep(EVENT_POLL_S)
            elif not worker.has_work:
                rest(_LEAVE_POLL_S)

    def _are_ended(self, worker: DeviceWorker, is_late: bool) -> bool:
        """Return whether no held load will get any further, and then end them all."""
        with self._changed:
            is_idle = is_late and not worker.has_work
            if self._held.unfinished and not is_idle and worker.failure is None:
                return False
            for task_id in self._held.task_ids:
                self._end(task_id, self._held.num_arrived(task_id))
            self._held = HeldLoads()
            return True

    def _end(self, task_id: int, num_ok: int) -> None:
        if self._worker is None or not self._worker.gates.end_layer_load(task_id):
            self._gates.end(task_id, num_ok)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        with self._changed:
            self._held.check()


def _lost(num_blocks: int) -> LayerLoad:
    load = LayerLoad({}, num_blocks)
    load.end()
    return load
