"""RankOps: what a server has a rank do, and how the rank reports it.

server --socket, or a line if it is in this process--> RankTasks, DeviceWorker
   ^                                                              |
   +------------------- reports, the same way --------------------+

The rank's thread drives the worker. While it does not, a thread that launches an op by the line may
have the worker queue its copies.
"""

from __future__ import annotations

import threading
import time

from flexcache.client.attachment import Attachment
from flexcache.client.link import ServerLink
from flexcache.client.rank_tasks import EVENT_POLL_S, RankTasks
from flexcache.errors import DeviceLostError
from flexcache.protocol.messages import Ended, SessionOver
from flexcache.server.local_lines import LocalLine, open_line
from flexcache.server.outbox import make_execute
from flexcache.tasks.instructions import RunOp
from flexcache.transfer.messages import Done, Drop, Execute
from flexcache.transfer.workers.device import DeviceWorker


class RankOps:
    """The ops of one rank. Used on the rank's thread, but for the methods of any thread below.

    Args:
        tasks: What of them concerns the engine's thread.
    """

    def __init__(self, link: ServerLink, tasks: RankTasks) -> None:
        self._link = link
        self._tasks = tasks
        self._worker: DeviceWorker | None = None
        self._is_woken = False
        """Whether the rank's thread is woken when copies have landed."""
        self._line: LocalLine | None = None
        self._turn = threading.RLock()
        """Held by the thread that takes ops or advances the worker. It may be taken under the
        server's lock; who holds it must not take that one."""
        self._is_advancing = False
        """Whether the rank's thread has its turn for long: it may copy itself."""

    def begin(self, attachment: Attachment, server_pid: int, epoch: int) -> None:
        """A registration begins, at the server that has greeted the rank."""
        self._worker = worker = attachment.worker
        self._is_woken = attachment.wakes
        self._tasks.attach(worker, epoch)
        self._line = open_line(self._link.endpoint, server_pid, self._link.identity, self)
        if self._line is not None:
            self._link.ping_rarely()

    # -- any thread ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the rank's thread look for messages."""
        self._link.wake()

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
            if self._worker is not None:
                self._worker.queue(make_execute(run))

    def has_started(self, run: RunOp) -> bool:
        """Return whether the last `start` has queued the copies of an op, interrupted or not."""
        return self._worker is not None and self._worker.queued_op == run.op.op_id

    # -- the rank's thread -----------------------------------------------------------------------

    def hang_up(self) -> None:
        """Let no other thread start ops any more: what comes by the line is dropped. Idempotent."""
        if self._line is not None:
            self._line.close()

    def end(self) -> None:
        """The registration is over, and with it every task. Idempotent."""
        self.hang_up()
        self._worker = self._line = None
        self._tasks.attach(None, 0)

    def take_given(self) -> None:
        """Take what came by the line."""
        if self._line is not None:
            with self._turn:  # all that has left the line is with the worker when it is over
                refused = [done for message in self._line.take() for done in self._take(message)]
            self._report(refused)

    def take(self, message: Execute | Drop | Ended | SessionOver) -> None:
        """Take what the server has sent."""
        with self._turn:
            refused = self._take(message)
        self._report(refused)

    def _take(self, message: Execute | Drop | Ended | SessionOver) -> list[Done]:
        """Take a message; return an op that has ended by that."""
        match message:
            case Execute(op_id) if self._tasks.is_shut(message):
                return [Done(op_id, 0, error="its gate was never opened")]
            case Execute() if self._worker is not None:
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
        if not has_work or (only_waits and self._is_woken):
            return None
        if only_waits:
            time.sleep(EVENT_POLL_S)
        return 0.0

    def advance(self) -> None:
        """Start what may start, and report what has ended.

        Raises:
            DeviceLostError: No copy will succeed any more.
        """
        worker = self._worker
        if worker is None:
            return
        self._is_advancing = True
        try:
            with self._turn:
                done = worker.advance()
        finally:
            self._is_advancing = False
        for each in done:
            self._tasks.moved(each)
        self._report(done)
        if worker.failure is not None:
            raise DeviceLostError(worker.failure)

    def _report(self, done: list[Done]) -> None:
        if not done:
            return
        if self._line is None:
            for each in done:
                self._link.send(each)
        else:
            self._line.report(done)
            self.take_given()  # what follows from it, without having been woken
