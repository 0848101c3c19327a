"""Outbox of the hub: what it wants sent, run or done. The only queue to sockets and workers.

The hub fills it under the server's lock; the event loop takes the contents out under the lock and
carries them out after releasing it. What a rank of this process is given goes past the loop, by the
rank's line (`LocalLine`). Slow jobs have a thread of their own.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flexcache.logs import log_event
from flexcache.protocol.messages import Ended, SessionOver, ToClient, WeightsChanged
from flexcache.tasks.instructions import (
    AskToStage,
    DiscardObjects,
    DropOp,
    EndLoan,
    Lend,
    ReplaceExecutor,
    RunLookUp,
    RunOp,
)
from flexcache.transfer.messages import (
    CHECKSUM_BYTES,
    Done,
    Drop,
    Execute,
    NoteLayout,
    pack_checksums,
    pack_ids,
)

if TYPE_CHECKING:
    from flexcache.server.server import KVServer

logger = logging.getLogger(__name__)

MAX_WAITING = 16
"""Slow jobs."""
_CLOSE_PATIENCE_S = 5.0

PeerMessage = ToClient | RunOp
"""An op for a rank is encoded when it is sent, without the lock."""
RankMessage = RunOp | Drop | Ended | SessionOver
"""Ops of a rank, and what becomes of tasks."""
WorkerInstruction = (
    RunOp
    | DropOp
    | RunLookUp
    | AskToStage
    | DiscardObjects
    | NoteLayout
    | Lend
    | EndLoan
    | ReplaceExecutor
)


class Output(NamedTuple):
    """Messages and jobs, each list in the order in which it was filled."""

    to_peers: list[tuple[bytes, PeerMessage]]
    to_workers: list[WorkerInstruction]
    jobs: list[BackgroundJob]


class Outbox:
    """Collects output. Not thread-safe.

    Attributes:
        lines: Of the ranks in this process, by identity.
    """

    def __init__(self) -> None:
        self.lines: dict[bytes, LocalLine] = {}
        self._output = Output([], [], [])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not any(self._output)

    def send(self, identity: bytes, message: PeerMessage) -> None:
        """Queue a message for a peer."""
        self._output.to_peers.append((identity, message))

    def give(self, identity: bytes, message: RankMessage) -> None:
        """Pass a message to a rank: at once by its line, or else queued like any other."""
        line = self.lines.get(identity)
        if line is not None:
            line.put(message)
        else:
            self.send(identity, message)

    def instruct(self, instruction: WorkerInstruction) -> None:
        """Queue an instruction for the disk or the remote worker."""
        self._output.to_workers.append(instruction)

    def begin(self, job: BackgroundJob) -> None:
        """Queue a slow job."""
        self._output.jobs.append(job)

    def take(self) -> Output:
        """Empty the outbox."""
        # Swapped: the loop sends it without the lock while others fill the new one.
        output, self._output = self._output, Output([], [], [])
        return output


def make_execute(run: RunOp) -> Execute:
    """The message that has an executor carry out an op."""
    op = run.op
    assert op.src is not None and op.dst is not None
    return Execute(
        op.op_id, op.kind, pack_ids(op.src), pack_ids(op.dst), run.task_id, run.gated,
        b"" if run.checksums is None else pack_checksums(run.checksums), op.names, run.weights,
        run.adapter,
    )  # fmt: skip


def problem_of(done: Done) -> str | None:
    """Return why a report makes no sense."""
    if len(done.checksums) % CHECKSUM_BYTES:
        return f"{len(done.checksums)} bytes are not whole checksums"
    if done.device_bytes < 0:
        return f"{done.device_bytes} bytes on a device"
    if not 0 <= done.seconds < math.inf:
        return f"a load of {done.seconds} s"
    return None


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """``work`` runs on another thread; ``end`` is called with its error, as an event."""

    work: Callable[[], None]
    end: Callable[[Exception | None], None]


class BackgroundThread:
    """Runs jobs in order.

    A disk that hangs blocks this thread alone. Jobs beyond a bound are refused with the reason, and
    the end of the server waits for the thread for a limited time.

    Args:
        end: Ends a job, with its error, as an event of the server. Called on this thread and, for a
            refused job, on the caller's.
    """

    def __init__(self, end: Callable[[BackgroundJob, Exception | None], None]) -> None:
        self._end = end
        self._waiting: queue.Queue[BackgroundJob | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def begin(self, job: BackgroundJob) -> None:
        """Queue a job; or end it at once with an error, if too many are waiting."""
        if self._thread is None:
            # A daemon: a call that hangs in the kernel must not keep the process from ending.
            self._thread = threading.Thread(
                target=self._run, name="flexcache-background", daemon=True
            )
            self._thread.start()
        try:
            # Never waits: the caller is the event loop, and the disk may hang.
            self._waiting.put_nowait(job)
        except queue.Full:
            error = OSError(f"the disk is behind: {MAX_WAITING} jobs of this kind wait for it")
            self._end(job, error)

    def close(self) -> bool:
        """Finish the queued jobs, for a few seconds at most; whether all are done. Idempotent."""
        if self._thread is None:
            return True
        deadline = time.monotonic() + _CLOSE_PATIENCE_S
        try:
            self._waiting.put(None, timeout=_CLOSE_PATIENCE_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if not self._thread.is_alive():
            return True
        log_event(
            logger, logging.ERROR, "disk_hangs", patience_s=_CLOSE_PATIENCE_S,
            effect="the files of the SSD tier stay open until the process ends",
        )  # fmt: skip
        return False

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                self._end(job, error_of(job.work))
            except Exception:  # the next job must still run
                log_event(logger, logging.ERROR, "aside_failed", exc_info=True)


def error_of(work: Callable[[], None]) -> Exception | None:
    """Run a piece of work; return its error, if any, and log one that is not the disk's."""
    try:
        work()
    except OSError as error:
        return error
    except Exception as error:  # who waits for its end must still hear of it
        log_event(logger, logging.ERROR, "aside_failed", exc_info=True)
        return error
    return None


class LinedRank(Protocol):
    """A rank as its line sees it. Thread-safe."""

    def wake(self) -> None:
        """Have the rank's thread look for messages."""

    def start(self, run: RunOp) -> None:
        """Start an op at once, if nothing has to wait for that."""

    def has_started(self, run: RunOp) -> bool:
        """Whether the last `start` has started an op, interrupted or not."""

    def can_wait(self, run: RunOp) -> bool:
        """Whether an op may lie here until the rank's thread is woken for another reason."""


class LocalLine:
    """What a server has passed to one rank. `put` under the server's lock, the rest on the thread
    that drives the rank.

        hub, under the server's lock --put--> LocalLine --take--> the rank's thread
                                          +--start--> native threads that copy
        hub, under the server's lock <--KVServer.take_reports-- the rank's thread

    Ops, their reports and what becomes of tasks take the line. Over a socket each of them would
    pass the event loop, another thread that wants the interpreter, which the engine's thread then
    waits for. The rank's thread wants it too: an op whose copies need no thread of Python is queued
    for those that make them as it is launched, up to a switch interval (5 ms) earlier. Greetings,
    heartbeats and the end of the server stay on the socket, so that a rank whose server hangs or
    ends learns of it as any other does.

    Args:
        identity: The rank's, as the server knows it from its socket.
        rank: Takes the messages.

    Attributes:
        is_closed: Whether the rank takes nothing more.
    """

    def __init__(self, server: KVServer, identity: bytes, rank: LinedRank) -> None:
        self.identity = identity
        self._server = server
        self._rank = rank
        self._messages: deque[RankMessage] = deque()
        self._is_reporting = False
        self.is_closed = False
        self._closing = threading.Lock()

    def put(self, message: RankMessage) -> None:
        """Start an op, or leave a message for the rank and wake its thread unless it looks anyway.

        What comes after `close` is dropped: the server will hear that the rank has left.
        """
        with self._closing:
            if self.is_closed:
                return
            op = message if isinstance(message, RunOp) else None
            try:
                # Ops begin in their order: none before those that lie here.
                if op is not None and not self._messages:
                    self._rank.start(op)
            finally:  # also when it was interrupted
                if op is None or not self._rank.has_started(op):
                    self._leave(message)

    def _leave(self, message: RankMessage) -> None:
        self._messages.append(message)  # first: who opens its gate now looks for it
        can_wait = isinstance(message, RunOp) and self._rank.can_wait(message)
        if not can_wait and not self._is_reporting:
            self._rank.wake()

    def close(self) -> None:
        """Take nothing more, and wake the rank's thread no more: its client may be closed."""
        with self._closing:
            self.is_closed = True

    @property
    def has_messages(self) -> bool:
        """Whether there is something to take."""
        return bool(self._messages)

    def take(self) -> list[Execute | Drop | Ended | SessionOver]:
        """Return the messages that have come since the last call, in order."""
        taken: list[Execute | Drop | Ended | SessionOver] = []
        while self._messages:
            message = self._messages.popleft()
            taken.append(make_execute(message) if isinstance(message, RunOp) else message)
        return taken

    def tell(self, message: WeightsChanged) -> None:
        """Pass a message to the server, which has taken it in when this returns."""
        self._server.take_reports(self.identity, [message])

    def report(self, reports: Sequence[Done]) -> None:
        """Report ops that have ended. What follows from it can be taken afterwards."""
        self._is_reporting = True
        try:
            self._server.take_reports(self.identity, reports)
        finally:
            self._is_reporting = False


_served: dict[str, KVServer] = {}


def serve_lines(endpoint: str, server: KVServer) -> None:
    """Let ranks of this process find the server at ``endpoint``."""
    _served[endpoint] = server


def withdraw_lines(endpoint: str, server: KVServer) -> None:
    """Let no rank find the server any more. Idempotent."""
    if _served.get(endpoint) is server:
        del _served[endpoint]


def open_line(endpoint: str, server_pid: int, identity: bytes, rank: LinedRank) -> LocalLine | None:
    """Open a rank's line to the server that has greeted it; None if that is another process."""
    # A fork has its parent's table, but not its server.
    server = _served.get(endpoint) if server_pid == os.getpid() else None
    if server is None:
        return None
    line = LocalLine(server, identity, rank)
    server.connect(line)
    return line
