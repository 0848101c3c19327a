"""Worker processes under supervision: the disk worker and the remote worker.

Driven by one thread. What touches the owner (`receive`, the report of a death) is called under the
owner's lock; starting a process and sending to it are not.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from flexcache.cache.tail_index import last_tail_key
from flexcache.logs import log_event
from flexcache.processes import WorkerSupervisor
from flexcache.server.outbox import WorkerInstruction, make_execute, problem_of
from flexcache.server.reactor import (
    Reactor,
    RouterSocket,
    UnreadableError,
    log_failed,
    read_message,
)
from flexcache.stats import ServerCounters
from flexcache.tasks.instructions import (
    DISK,
    PEER,
    REMOTE,
    DiscardObjects,
    DropOp,
    EndLoan,
    Lend,
    ReplaceExecutor,
    RunLookUp,
    RunOp,
)
from flexcache.transfer.messages import (
    Discard,
    Done,
    Drop,
    LayoutsNoted,
    LookedUp,
    LookUp,
    NoteLayout,
    PeerFailed,
    Ready,
    SendBlocks,
    SendNoMore,
    Stop,
    pack_ids,
)

if TYPE_CHECKING:
    from flexcache.server.store import CacheStore

logger = logging.getLogger(__name__)

_MAX_MESSAGES_A_TURN = 256
_DISCARDED_AT_ONCE = 256  # objects; each message has the time of one op

WorkerMessage = Ready | Done | LookedUp | LayoutsNoted | PeerFailed
_DECODER = msgspec.msgpack.Decoder(WorkerMessage)


class WorkerPool:
    """Starts workers, restarts them after a death, and carries messages both ways.

    Any process of this user can connect to the workers' socket, so a message counts only if it
    comes from the identity that a worker was given when it was started, and that no other process
    knows. One that makes no sense is counted and logged; the op that it was about ends by its
    deadline.
    """

    def __init__(self, reactor: Reactor, owner: WorkerOwner) -> None:
        self._reactor = reactor
        self._owner = owner
        self._workers: dict[str, WorkerSupervisor] = {}  # by executor
        self._logged: set[str] = set()
        """Kinds of refused messages that were logged."""
        self._socket: RouterSocket | None = None
        self.on_peer_failed: Callable[[str, str, float], object] = lambda peer, reason, now: None
        """Called under the owner's lock when a peer could not be read from."""

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Open the socket that workers connect to."""
        self._socket = RouterSocket(context)
        self._socket.bind(endpoint)
        self._reactor.add_socket(self._socket.zmq_socket)

    def add_store_workers(
        self, store: CacheStore, endpoint: str, peer_fd: int | None = None
    ) -> None:
        """Supervise the workers that an open store needs: for its disk, for peers, for its remote
        store. The next `start_due` starts them.

        Args:
            endpoint: Where they connect to.
            peer_fd: Where peers connect to read, or -1; None without peers.
        """
        if store.disk_pool is not None:
            self._workers[DISK] = WorkerSupervisor(
                DISK, "flexcache.transfer.disk_worker",
                partial(store.disk_worker_config, endpoint), store.inherited_fds,
            )  # fmt: skip
        if peer_fd is not None:
            self._workers[PEER] = WorkerSupervisor(
                PEER, "flexcache.server.peer_worker",
                partial(store.peer_worker_config, endpoint, peer_fd),
                [*store.segment_fds, *([peer_fd] if peer_fd >= 0 else [])],
            )  # fmt: skip
        if store.config.remote_url is not None:
            self._workers[REMOTE] = WorkerSupervisor(
                REMOTE, "flexcache.transfer.remote_worker",
                partial(store.remote_worker_config, endpoint), store.segment_fds,
            )  # fmt: skip

    # -- insight ---------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Process id of every worker that runs."""
        return {name: w.pid for name, w in self._workers.items() if w.pid is not None}

    def restarts(self) -> dict[str, int]:
        return {name: max(0, w.num_starts - 1) for name, w in self._workers.items()}

    def missing(self) -> list[str]:
        """Workers that are not up."""
        return [f"{name} worker" for name, w in self._workers.items() if not w.is_ready]

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait until a worker has read others."""
        return self._socket is not None and self._socket.has_unsent

    # -- events ----------------------------------------------------------------------------------

    def next_start(self) -> float | None:
        """When the next worker is to be started."""
        return min((w.restart_at for w in self._workers.values() if w.restart_at is not None),
                   default=None)  # fmt: skip

    def start_due(self, now: float) -> None:
        """Start the workers whose time has come."""
        for worker in self._workers.values():
            if worker.restart_at is not None and now >= worker.restart_at and worker.start(now):
                self._reactor.watch_pidfd(worker.pidfd, partial(self._died, worker))

    def receive(self, now: float) -> None:
        """Take in what workers have sent."""
        if self._socket is None:
            return
        self._socket.flush()
        for _ in range(_MAX_MESSAGES_A_TURN):
            frames = self._socket.receive()
            if frames is None:
                return
            self.take(frames, now)

    def take(self, frames: Sequence[bytes], now: float) -> None:
        """Take in what the socket received: the sender's identity and its message."""
        sender, *rest = frames
        known = {w.identity.encode(): w for w in self._workers.values() if w.pid is not None}
        worker = known.get(sender)
        if worker is None:
            self._refuse(sender, "unknown_worker", "not from a worker of this server")
            return
        try:
            message = read_message(_DECODER, rest)
        except UnreadableError as error:
            self._refuse(sender, error.why, str(error))
            return
        try:
            self._handle(worker, message, now)
        except Exception:  # it must not cost the others their server
            log_failed(message, self._owner.counters, sender)

    def _handle(self, worker: WorkerSupervisor, message: WorkerMessage, now: float) -> None:
        sender = worker.identity.encode()
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
            case LayoutsNoted(others) if worker.name == REMOTE:
                self._owner.layouts_noted(others)
            case PeerFailed(peer, reason) if worker.name == PEER:
                self.on_peer_failed(peer, reason, now)
            case Done() as done if (problem := problem_of(done)) is not None:
                self._refuse(sender, "malformed", problem)
            case Done() as done:
                self._owner.op_done(worker.name, done, now)
            case _:
                self._refuse(sender, "misplaced", f"{type(message).__name__} is out of place")

    def _refuse(self, sender: bytes, why: str, text: str) -> None:
        """Count it; log the first of its kind."""
        self._owner.counters.rejected_messages[why] += 1
        if why not in self._logged:
            self._logged.add(why)
            log_event(
                logger, logging.WARNING, "worker_message_refused", reason=f"{why}: {text}",
                identity=sender.hex(),
            )  # fmt: skip

    def _died(self, worker: WorkerSupervisor, now: float) -> None:
        self._reactor.unwatch_pidfd(worker.pidfd)
        how = worker.died(now)
        log_event(
            logger, logging.ERROR, "worker_died", worker=worker.name, how=how,
            effect="its ops fail, it is restarted",
        )  # fmt: skip
        self._owner.counters.worker_deaths[worker.name] += 1
        self._owner.worker_down(worker.name, f"{worker.name} worker {how}", now)

    # -- instructions ----------------------------------------------------------------------------

    def carry_out(self, instruction: WorkerInstruction) -> None:
        """Send an instruction to its worker, or kill a worker that is late."""
        match instruction:
            case RunOp(executor):
                self._send(executor, make_execute(instruction))
            case DropOp(executor, op_id):
                self._send(executor, Drop(op_id))
            case RunLookUp(lookup_id, root, keys, tails):
                units = [(needed, last_tail_key(key, count)) for needed, key, count in tails]
                self._send(REMOTE, LookUp(lookup_id, root, list(keys), list(units)))
            case DiscardObjects(root, keys):
                for start in range(0, len(keys), _DISCARDED_AT_ONCE):
                    part = keys[start : start + _DISCARDED_AT_ONCE]
                    self._send(REMOTE, Discard(root, list[bytes](part)))
            case NoteLayout():
                self._send(REMOTE, instruction)
            case Lend(token, blocks, ends_s):
                self._send(PEER, SendBlocks(token, pack_ids(blocks), ends_s))
            case EndLoan(token):
                self._send(PEER, SendNoMore(token))
            case ReplaceExecutor(executor, reason):
                log_event(logger, logging.ERROR, "worker_replaced", worker=executor, reason=reason)
                self._workers[executor].kill()

    def _send(self, name: str, message: msgspec.Struct) -> None:
        if self._socket is None:
            return
        # If the worker has just died, its ops end when its death is taken in.
        with contextlib.suppress(zmq.ZMQError):
            identity = self._workers[name].identity.encode()
            self._socket.send(identity, msgspec.msgpack.encode(message))

    # -- the end ---------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Forget past deaths: a worker that is away is due now."""
        for worker in self._workers.values():
            worker.hurry(time.monotonic())

    def stop(self, patience_s: float) -> None:
        """Ask every worker to finish and wait for it; kill those that do not."""
        running = [worker for worker in self._workers.values() if worker.pid is not None]
        for worker in running:
            if worker.is_ready:
                self._send(worker.name, Stop())
            else:  # it is starting: it has nothing to finish, and would not hear of it
                worker.kill()
        for worker in running:
            self._end(worker, patience_s)

    def discard(self) -> None:
        """End all workers at once and forget them: their store could not be opened."""
        for worker in self._workers.values():
            self._end(worker, 0)
        self._workers.clear()

    def close(self) -> None:
        """End what still runs, and close the socket. Idempotent."""
        for worker in self._workers.values():
            self._end(worker, 0)
        if self._socket is not None:
            self._socket.close()

    def _end(self, worker: WorkerSupervisor, patience_s: float) -> None:
        if worker.pidfd >= 0:
            self._reactor.unwatch_pidfd(worker.pidfd)
        worker.stop(patience_s)


class WorkerOwner(Protocol):
    """Called under the owner's lock, by the thread that drives the `WorkerPool`."""

    @property
    def counters(self) -> ServerCounters:
        """Counts deaths and refused messages."""

    def worker_up(self, worker: str) -> None:
        """A worker serves from now on."""

    def worker_down(self, worker: str, reason: str, now: float) -> None:
        """A worker is gone, and with it what it was moving."""

    def op_done(self, worker: str, done: Done, now: float) -> None:
        """A worker has ended an op."""

    def looked_up(self, answer: LookedUp, now: float) -> None:
        """The remote worker has answered a question."""

    def layouts_noted(self, others: Sequence[str]) -> None:
        """The remote worker has told in which other layouts its store has the model."""
