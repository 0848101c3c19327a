"""RankOps: what a server has a rank do, and how the rank reports it.

server --socket, or a line if it is in this process--> RankTasks, DeviceWorker
   ^                                                              |
   +------------------- reports, the same way --------------------+
"""

from __future__ import annotations

from flexcache.client.link import ServerLink
from flexcache.client.rank_tasks import RankTasks
from flexcache.errors import DeviceLostError
from flexcache.protocol.messages import Ended, SessionOver
from flexcache.server.local_lines import LocalLine, open_line
from flexcache.transfer.messages import Done, Drop, Execute
from flexcache.transfer.workers.device import DeviceWorker


class RankOps:
    """The ops of one rank. Used on the rank's thread only.

    Args:
        tasks: What of them concerns the engine's thread.
    """

    def __init__(self, link: ServerLink, tasks: RankTasks) -> None:
        self._link = link
        self._tasks = tasks
        self._worker: DeviceWorker | None = None
        self._line: LocalLine | None = None

    def begin(self, worker: DeviceWorker, server_pid: int, epoch: int) -> None:
        """A registration begins, at the server that has greeted the rank."""
        self._worker = worker
        self._tasks.attach(worker, epoch)
        self._line = open_line(
            self._link.endpoint, server_pid, self._link.identity, self._link.wake,
            self._tasks.can_wait,
        )  # fmt: skip

    def end(self) -> None:
        """The registration is over, and with it every task. Idempotent."""
        if self._line is not None:
            self._line.close()
        self._worker = self._line = None
        self._tasks.attach(None, 0)

    def take_given(self) -> None:
        """Take what came by the line."""
        for message in () if self._line is None else self._line.take():
            self.take(message)

    def take(self, message: Execute | Drop | Ended | SessionOver) -> None:
        """Take what the server has sent."""
        match message:
            case Execute(op_id) if self._tasks.is_shut(message):
                self._report([Done(op_id, 0, error="its gate was never opened")])
            case Execute() if self._worker is not None:
                self._worker.execute(message)
                self._tasks.given(message)
            case Drop(op_id) if self._worker is not None:
                self._worker.drop(op_id)
            case Ended(task_id, num_ok):
                self._tasks.ended(task_id, num_ok)
            case SessionOver(session):
                self._tasks.session_over(session)

    def advance(self) -> None:
        """Start what may start, and report what has ended.

        Raises:
            DeviceLostError: No copy will succeed any more.
        """
        worker = self._worker
        if worker is None:
            return
        done = worker.advance()
        for each in done:
            self._tasks.moved(each)
        if done:
            self._report(done)
        if worker.failure is not None:
            raise DeviceLostError(worker.failure)

    def _report(self, done: list[Done]) -> None:
        if self._line is None:
            for each in done:
                self._link.send(each)
        else:
            self._line.report(done)
            self.take_given()  # what follows from it, for which this thread was not woken
