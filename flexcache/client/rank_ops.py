"""RankOps: what a server has a rank do, and how the rank reports it.

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
from collections.abc import Callable

from flexcache.client.lent_tensors import Attachment
from flexcache.client.link import ServerLink
from flexcache.client.rank_tasks import EVENT_POLL_S, RankTasks
from flexcache.errors import DeviceLostError, ServerLostError
from flexcache.protocol.messages import UNKNOWN_WEIGHTS, Ended, SessionOver, WeightsChanged
from flexcache.server.outbox import LocalLine, make_execute, open_line
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.messages import Done, Drop, Execute

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
