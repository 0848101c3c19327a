"""Messages from the disk and the remote worker, which have a socket of their own.

Any process of this user can connect to that socket, so a message counts only if it comes from the
identity that a worker was given when it was started, and that no other process knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from flexcache.logs import log_event
from flexcache.server.guard import Buffer, SocketGuard
from flexcache.server.op_reports import problem_of
from flexcache.server.supervisor import WorkerSupervisor
from flexcache.server.worker_owner import WorkerOwner
from flexcache.tasks.instructions import REMOTE
from flexcache.transfer.messages import Done, LookedUp, Ready

logger = logging.getLogger(__name__)

WorkerMessage = Ready | Done | LookedUp


class WorkerMessages:
    """Passes on to the owner what its workers report.

    A message that makes no sense is counted and logged; the op that it was about ends by its
    deadline.

    Args:
        workers: By name; workers may be added later.
    """

    def __init__(self, workers: Mapping[str, WorkerSupervisor], owner: WorkerOwner) -> None:
        self._workers = workers
        self._owner = owner
        self._logged: set[str] = set()
        self._guard = SocketGuard[WorkerMessage](
            WorkerMessage, owner.counters, handle=self._handle, refuse=self._refuse
        )

    def take(self, frames: Sequence[bytes], now: float) -> None:
        """Take in what the socket received: the sender's identity and its message."""
        sender, *message = frames
        if self._worker_of(sender) is None:
            self._refuse(sender, "unknown_worker", "not from a worker of this server")
        else:
            self._guard.take(sender, message, now)

    def _worker_of(self, identity: bytes) -> WorkerSupervisor | None:
        for worker in self._workers.values():
            if worker.pid is not None and worker.identity.encode() == identity:
                return worker
        return None

    def _handle(self, sender: bytes, message: WorkerMessage, _: Buffer, now: float) -> None:
        worker = self._worker_of(sender)
        assert worker is not None
        match message:
            case Ready(detail) if not worker.is_ready:
                worker.is_ready = True
                log_event(
                    logger, logging.INFO, "worker_began", worker=worker.name, pid=worker.pid,
                    detail=detail,
                )  # fmt: skip
                self._owner.worker_up(worker.name)
            case LookedUp() as answer if worker.name == REMOTE:
                self._owner.looked_up(answer, now)
            case Done() as done if (problem := problem_of(done)) is not None:
                self._refuse(sender, "malformed", problem)
            case Done() as done:
                self._owner.op_done(worker.name, done, now)
            case _:
                self._refuse(sender, "misplaced", f"{type(message).__name__} is out of place")

    def _refuse(self, sender: bytes, why: str, text: str) -> None:
        """Count it; log the first of its kind."""
        self._owner.counters[f"rejected_{why}"] += 1
        if why not in self._logged:
            self._logged.add(why)
            log_event(
                logger, logging.WARNING, "worker_message_refused", reason=f"{why}: {text}",
                identity=sender.hex(),
            )  # fmt: skip
