"""Ops of a rank (`RankOps`): what a server has it do, and how it reports that. Gated tasks
(`RankTasks`) are what its thread and its engine's thread share of them.

server --socket, or a line if it is in this process--> RankTasks, DeviceWorker
   ^                                                              |
   +------------------- reports, the same way --------------------+

The rank's thread drives the worker. While it does not, a thread that launches an op by the line may
have the worker queue its copies, and the engine's thread may drive it (`drive`): it spares itself
the wait for the interpreter, which the rank's thread would take from it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flexcache.client.lent_tensors import Attachment
from flexcache.client.link import ServerLink
from flexcache.errors import DeviceLostError, InternalError, ServerLostError
from flexcache.ids import OpKind, epoch_of, session_of
from flexcache.protocol.messages import UNKNOWN_WEIGHTS, Ended, SessionOver, WeightsChanged
from flexcache.server.outbox import LocalLine, make_execute, open_line
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.gates import LayerLoad
from flexcache.transfer.messages import Done, Drop, Execute, unpack_ids

_NUM_REMEMBERED = 16_384  # ended tasks that the engine's worker has not asked for
Value = TypeVar("Value")


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
        self._epoch = 0
        """The server's, from its task ids; 0 while the rank is not registered."""
        self._ended: OrderedDict[int, int] = OrderedDict()
        """How many blocks have arrived of tasks that are over on every rank, and were not taken."""
        self._sessions_over: OrderedDict[int, None] = OrderedDict()
        """What has not been reported of their tasks never began, and will not."""
        self._shut: OrderedDict[int, None] = OrderedDict()
        """Tasks whose gates were to be opened while there was no server: they never will be."""
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
            self._ended = OrderedDict.fromkeys(self._ended, 0)
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
            to_open = [task_id for task_id in task_ids if task_id not in self._ended]
            if worker is None:  # no server: the gates stay shut, even if one appears later
                for task_id in to_open:
                    _remember(self._shut, task_id, None)
        if worker is None or not to_open:
            return False
        worker.gates.open(to_open)
        return True

    def load_by_layer(self, task_id: int, num_blocks: int) -> LayerLoad:
        """Open the gate of a load that the caller waits for by layer."""
        with self._changed:
            worker = self._worker
            will_come = not self._is_cut_off or task_id in self._held.task_ids
            if worker is not None and will_come and not self._is_over(task_id):
                load = worker.gates.load_by_layer(task_id, num_blocks)
                self._wake()
                return load
            if worker is None:
                _remember(self._shut, task_id, None)
            self._ended.pop(task_id, None)
        return _lost(num_blocks)

    def load_promised(self, message: Execute, num_blocks: int) -> LayerLoad:
        """Begin a promised load, which the caller waits for by layer."""
        with self._changed:
            worker, task_id = self._worker, message.task_id
            if worker is None or epoch_of(task_id) != self._epoch:
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
                    or self._is_over(task_id)
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
                lambda: any(map(self._is_over, task_ids)) if task_ids else bool(self._ended),
                timeout,
            )

    def take_ended(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Return the tasks that are over, with how many blocks arrived. Each is returned once."""
        with self._changed:
            over = [task_id for task_id in task_ids if self._is_over(task_id)]
            ended = {task_id: self._ended.pop(task_id, 0) for task_id in over}
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
            self._worker, self._epoch = worker, epoch
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
        return message.gated and message.task_id in self._shut

    def can_wait(self, run: RunOp) -> bool:
        """Return whether an op of a server in this process can be taken when its gate opens.
        Thread-safe."""
        worker = self._worker
        if not run.gated or worker is None or self.keeps_loads:
            return False
        return not worker.gates.is_open(run.task_id) and run.task_id not in self._shut

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
            _remember(self._sessions_over, session, None)
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

    def _is_over(self, task_id: int) -> bool:
        """Return whether no copy of a task is running or will: without its server none is."""
        return (
            task_id in self._ended
            or task_id in self._shut
            or session_of(task_id) in self._sessions_over
            or epoch_of(task_id) != self._epoch
        )

    def _end(self, task_id: int, num_ok: int) -> None:
        if self._worker is None or not self._worker.gates.end_layer_load(task_id):
            _remember(self._ended, task_id, num_ok)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        with self._changed:
            self._held.check()


def _lost(num_blocks: int) -> LayerLoad:
    load = LayerLoad({}, num_blocks)
    load.end()
    return load


_LAND_PATIENCE_S = 5.0  # for copies that were queued before the weights changed
_NEXT_DRIVE_S = 0.2  # within this time the engine's thread is expected to drive again


class RankOps:
    """The ops of one rank. Used on the rank's thread, but for the methods of any thread below.

    Args:
        tasks: What of them concerns the engine's thread.
        engine_polls: Whether the engine's thread will drive again and again.
        holds_adapter: Whether the rank has loaded the adapter of a digest.

    Attributes:
        weights: Number of the rank's weights; ops of another one are refused.
    """

    def __init__(
        self, link: ServerLink, tasks: RankTasks, engine_polls: bool = False,
        holds_adapter: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        self.weights = 0
        self._holds_adapter = holds_adapter or (lambda adapter: False)
        self._adapters: dict[int, str] = {}
        """Adapters of the ops that need one and have not ended."""
        self._num_reporting = 0
        """How many threads have ops in hand that have ended, and are to be reported."""
        self._ended_early: list[Done] = []
        """Ops that have ended since their weights have changed, to be reported."""
        tasks.advance = self._advance
        self._link = link
        self._tasks = tasks
        self._may_be_driven = engine_polls and not tasks.keeps_loads  # else `finish` may drive it
        self._worker: DeviceWorker | None = None
        self._is_woken = False
        """Whether the rank's thread is woken when copies have landed."""
        self._line: LocalLine | None = None
        self._turn = threading.RLock()
        """Held by the thread that takes ops or advances the worker. It may be taken under the
        server's lock; who holds it must not take that one."""
        self._is_advancing = False
        """Whether the rank's thread has its turn for long: it may copy itself."""
        self._rests_until_s = 0.0
        """Until when the rank's thread leaves what lands to the engine's; 0: it does not."""
        self._is_torn = False
        """Whether `drive` was interrupted, so that ops may be lost."""

    def begin(self, attachment: Attachment, server_pid: int, epoch: int) -> None:
        """A registration begins, at the server that has greeted the rank."""
        self._worker = worker = attachment.worker
        self._is_woken = attachment.wakes
        self._tasks.attach(worker, epoch)
        # By the sockets an op wakes the event loop twice and this rank's thread twice.
        self._line = open_line(self._link.endpoint, server_pid, self._link.identity, self)
        self._is_torn, self._num_reporting = False, 0
        if self._line is not None:
            self._link.ping_rarely()

    # -- any thread ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the rank's thread look for messages."""
        self._rests_until_s = 0.0
        self._link.wake()

    def set_weights(self, number: int) -> None:
        """The rank has other weights: refuse and end what was planned before. When it returns,
        nothing of that moves any more, or a copy hangs."""
        reason = "the weights have changed meanwhile"
        with self._turn:
            self.weights = number
            self._tasks.weights_changed()
            worker = self._worker
            ended = [] if worker is None else worker.fail_all(reason)
            self._ended_early += ended
            self._adapters.clear()
        self.wake()
        give_up_s = time.monotonic() + _LAND_PATIENCE_S
        while worker is not None and worker is self._worker:
            with self._turn:
                if not worker.is_failing and not self._num_reporting:
                    break
            if time.monotonic() > give_up_s:
                break  # its op is lost all the same, and its slots stay taken until it ends
            time.sleep(EVENT_POLL_S)

    def tell(self, message: WeightsChanged) -> bool:
        """Tell a server in this process, which has heard it then; return whether it is there."""
        line = self._line
        if line is None or line.is_closed:
            return False
        line.tell(message)
        return True

    def look(self) -> None:
        """Do what there is to do on this thread, or have the rank's do it."""
        if not self.drive():
            self.wake()

    def hand_back(self) -> None:
        """Do what there is to do, and let the rank's thread rest no more: this one is to wait."""
        self.drive()
        if self._rests_until_s:
            self.wake()

    def drive(self) -> bool:
        """Do what the rank's thread would be woken for, if this one may; return whether it has.

        If nothing is left but copies that have to land, the rank's thread leaves those to this one,
        unless it takes too long to come back; else it is woken.
        """
        worker, line = self._worker, self._line
        if worker is None or line is None or not self._may_be_driven or not self._is_woken:
            return False
        # The engine's thread needs the interpreter every 50 us, so it waits for whatever the rank's
        # thread does in Python. Between its steps it does the same work in less time.
        try:
            with self._turn:
                if line.is_closed or self._is_advancing or worker.failure is not None:
                    return False
                refused = self._take_all(line)
                done = self._advance(worker, may_copy=False)
                self._num_reporting += 1
            try:
                self._pass_on(line, [*refused, *done])
            finally:
                with self._turn:
                    self._num_reporting = max(0, self._num_reporting - 1)
            with self._turn:
                may_rest = worker.only_lands and worker.failure is None
                self._rests_until_s = time.monotonic() + _NEXT_DRIVE_S if may_rest else 0.0
            if not may_rest:
                self.wake()
        except BaseException:  # of any class, from a signal handler
            self._is_torn = True  # an op may be lost: the rank registers again, which ends them all
            with contextlib.suppress(OSError):  # closed meanwhile
                self.wake()
            raise
        return True

    def can_wait(self, run: RunOp) -> bool:
        """Return whether an op can be taken when its gate opens."""
        return self._tasks.can_wait(run)

    def start(self, run: RunOp) -> None:
        """Queue the copies of an op, if another thread than the rank's makes them and nothing comes
        before."""
        may_queue = self._is_woken and not self._tasks.keeps_loads  # else `finish` may drive it
        if run.gated or not may_queue or self._is_advancing:
            return
        with self._turn:
            if self._worker is not None and self._why_refused(run) is None:
                if self._worker.queue(make_execute(run)) and run.adapter:
                    self._adapters[run.op.op_id] = run.adapter
                self._rests_until_s = 0.0  # who launches it may not drive

    def has_started(self, run: RunOp) -> bool:
        """Return whether the last `start` has queued the copies of an op, interrupted or not."""
        return self._worker is not None and self._worker.queued_op == run.op.op_id

    # -- the rank's thread -----------------------------------------------------------------------

    def hang_up(self) -> None:
        """Let no other thread start ops any more: what comes by the line is dropped. Idempotent."""
        if self._line is not None:
            self._line.close()
        with self._turn:
            pass  # who drives it has seen that, or is through

    def end(self) -> None:
        """The registration is over, and with it every task. Idempotent."""
        self.hang_up()
        self._worker = self._line = None
        self._adapters, self._ended_early = {}, []
        self._tasks.attach(None, 0)

    def take_given(self) -> None:
        """Take what came by the line."""
        if (line := self._line) is not None:
            with self._turn:  # all that has left the line is with the worker when it is over
                refused = self._take_all(line)
            if refused:
                self._pass_on(line, refused)

    def take(self, message: Execute | Drop | Ended | SessionOver) -> None:
        """Take what the server has sent."""
        with self._turn:
            refused = self._take(message)
        self._report(refused)

    def _take_all(self, line: LocalLine) -> list[Done]:
        """Take what came by the line; return the ops that have ended by that."""
        return [done for message in line.take() for done in self._take(message)]

    def _take(self, message: Execute | Drop | Ended | SessionOver) -> list[Done]:
        """Take a message; return an op that has ended by that."""
        match message:
            case Execute(op_id) if self._tasks.is_shut(message):
                return [Done(op_id, 0, error="its gate was never opened")]
            case Execute(op_id) if (why := self._why_refused(message)) is not None:
                if self._worker is not None:
                    self._worker.gates.lose_layer_load(message.task_id)
                return [Done(op_id, 0, error=why)]
            case Execute() if self._worker is not None:
                if message.adapter:
                    self._adapters[message.op_id] = message.adapter
                self._worker.execute(message)
                self._tasks.given(message)
            case Drop(op_id) if self._worker is not None:
                self._worker.drop(op_id)
            case Ended(task_id, num_ok):
                self._tasks.ended(task_id, num_ok)
            case SessionOver(session):
                self._tasks.session_over(session)
        return []

    def rest(self) -> float | None:
        """Rest for a moment while copies on a GPU land; return for how long to wait for messages
        before the next `advance`, None for as long as it takes."""
        worker = self._worker
        if worker is None:
            return None
        with self._turn:
            has_work, only_waits = worker.has_work, worker.only_waits
        if not has_work:
            return None
        if only_waits and self._is_woken:
            if not self._rests_until_s:
                return None
            return max(0.0, self._rests_until_s - time.monotonic())  # it may not be woken again
        if only_waits:
            time.sleep(EVENT_POLL_S)
        return 0.0

    @property
    def may_rest(self) -> bool:
        """Whether what has landed is left to the engine's thread, and there is nothing else."""
        worker, line = self._worker, self._line
        if worker is None or line is None or self._is_torn or line.has_messages:
            return False
        with self._turn:
            return self._rests_until_s > time.monotonic() and worker.only_lands

    def advance(self) -> None:
        """Start what may start, and report what has ended.

        Raises:
            DeviceLostError: No copy will succeed any more.
            ServerLostError: It is unknown which ops are under way; another registration ends all.
        """
        worker = self._worker
        if worker is None:
            return
        if self._is_torn:
            raise ServerLostError("the engine was interrupted while it drove its rank")
        if worker.failure is not None:
            raise DeviceLostError(worker.failure)
        self._is_advancing = True
        try:
            with self._turn:
                self._rests_until_s = 0.0
                done = self._advance(worker)
                self._num_reporting += 1
        finally:
            self._is_advancing = False
        try:
            for each in done if self._tasks.keeps_loads else ():
                self._tasks.moved(each)
            self._report(done)
        finally:
            with self._turn:
                self._num_reporting = max(0, self._num_reporting - 1)
        if worker.failure is not None:
            raise DeviceLostError(worker.failure)

    def _why_refused(self, op: Execute | RunOp) -> str | None:
        """Return why the rank must not move the blocks of an op, if so."""
        if op.weights != self.weights or self.weights == UNKNOWN_WEIGHTS:
            return "the weights have changed since it was planned"
        if op.adapter and not self._holds_adapter(op.adapter):
            return "its adapter is not loaded"
        return None

    def _advance(self, worker: DeviceWorker, may_copy: bool = True) -> list[Done]:
        """Start what may start; return what has ended."""
        with self._turn:
            while self._tasks.promised:
                worker.execute(self._tasks.promised.popleft())  # a step counts on it
            ended, self._ended_early = self._ended_early, []
            moved = worker.advance() if may_copy else worker.advance(may_copy=False)
            return ended + (self._judged(moved) if self._adapters else moved)

    def _judged(self, done: list[Done]) -> list[Done]:
        """Return how ops have ended: what moved under an adapter that is gone is of no use."""
        judged = []
        for each in done:
            adapter = self._adapters.pop(each.op_id, None)
            if adapter is not None and each.num_ok and not self._holds_adapter(adapter):
                each = Done(each.op_id, 0, error="its adapter was unloaded meanwhile")
            judged.append(each)
        return judged

    def _report(self, done: list[Done]) -> None:
        if (line := self._line) is None:
            for each in done:
                self._link.send(each)
        elif done:
            self._pass_on(line, done)

    def _pass_on(self, line: LocalLine, done: list[Done]) -> None:
        if done:
            line.report(done)
            self.take_given()  # what follows from it, without having been woken
