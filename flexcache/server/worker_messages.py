"""Messages from the disk and the remote worker, which have a socket of their own.

Any process of this user can connect to that socket, so a message counts only if it comes from the
identity that a worker was given when it was started, and that no other process knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from flexcache.ids import OpId
from flexcache.logs import log_event
from flexcache.server.guard import Buffer, SocketGuard
from flexcache.server.hub import Hub
from flexcache.server.supervisor import WorkerSupervisor
from flexcache.tasks.instructions import REMOTE
from flexcache.transfer.messages import Done, LookedUp, Ready, unpack_checksums

logger = logging.getLogger(__name__)

WorkerMessage = Ready | Done | LookedUp
_CHECKSUM_BYTES = 8


class WorkerMessages:
    """Passes on to the task engine what the workers report.

    A message that makes no sense is counted and logged; the op that it was about ends by its
    deadline.

    Args:
        workers: By name; workers may be added later.
        hub: Has the task engine once there is a worker.
    """

    def __init__(self, workers: Mapping[str, WorkerSupervisor], hub: Hub) -> None:
        self._workers = workers
        self._hub = hub
        self._logged: set[str] = set()
        self._guard = SocketGuard[WorkerMessage](
            WorkerMessage, hub.counters, handle=self._handle, refuse=self._refuse
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
        assert self._hub.cache is not None
        tasks = self._hub.cache.tasks
        match message:
            case Ready(detail) if not tasks.queries.is_up(worker.name):
                log_event(
                    logger, logging.INFO, "worker_began", worker=worker.name, pid=worker.pid,
                    detail=detail,
                )  # fmt: skip
                tasks.executor_up(worker.name)
                self._hub.readiness.changed()
            case LookedUp(lookup_id, num_present, error, tail) if worker.name == REMOTE:
                tasks.looked_up(lookup_id, num_present, error, now, tail)
            case Done(checksums=sums) if len(sums) % _CHECKSUM_BYTES:
                self._refuse(sender, "malformed", f"{len(sums)} bytes are not whole checksums")
            case Done() as done:
                tasks.op_done(
                    worker.name, OpId(done.op_id), done.num_ok, now, error=done.error,
                    bad_block=done.bad_block,
                    checksums=unpack_checksums(done.checksums) if done.checksums else None,
                )  # fmt: skip
            case _:
                self._refuse(sender, "misplaced", f"{type(message).__name__} is out of place")

    def _refuse(self, sender: bytes, why: str, text: str) -> None:
        """Count it; log the first of its kind."""
        self._hub.counters[f"rejected_{why}"] += 1
        if why not in self._logged:
            self._logged.add(why)
            log_event(
                logger, logging.WARNING, "worker_message_refused", reason=f"{why}: {text}",
                identity=sender.hex(),
            )  # fmt: skip
