"""What the hub wants sent, run or done. The only queue between the task engine and the sockets.

The hub fills it under the server's lock; the event loop takes the contents out under the lock and
carries them out after releasing it. What a rank of this process is given goes past the loop, by the
rank's line (`local_lines`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flexcache.protocol.messages import Ended, SessionOver, ToClient
from flexcache.server.background import BackgroundJob
from flexcache.tasks.instructions import DropOp, ReplaceExecutor, RunLookUp, RunOp
from flexcache.transfer.messages import Drop, Execute, pack_checksums, pack_ids

PeerMessage = ToClient | RunOp
"""An op for a rank is encoded when it is sent, without the lock."""
RankMessage = RunOp | Drop | Ended | SessionOver
"""Ops of a rank, and what becomes of tasks."""
WorkerInstruction = RunOp | DropOp | RunLookUp | ReplaceExecutor


class RankLine(Protocol):
    """Passes messages to a rank in this process."""

    @property
    def is_closed(self) -> bool:
        """Whether the rank takes nothing more."""

    def put(self, message: RankMessage) -> None:
        """Start an op or leave a message for the rank. Called under the server's lock: must not
        wait for copies."""


class Output(NamedTuple):
    """Messages and jobs, each list in the order in which it was filled."""

    to_peers: list[tuple[bytes, PeerMessage]]
    to_workers: list[WorkerInstruction]
    jobs: list[BackgroundJob]


class Outbox:
    """Collects output. Not thread-safe.

    Attributes:
        is_empty: Whether there is nothing to take.
        lines: Of the ranks in this process, by identity.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self.lines: dict[bytes, RankLine] = {}
        self._to_peers: list[tuple[bytes, PeerMessage]] = []
        self._to_workers: list[WorkerInstruction] = []
        self._jobs: list[BackgroundJob] = []

    def send(self, identity: bytes, message: PeerMessage) -> None:
        """Queue a message for a peer."""
        self._to_peers.append((identity, message))
        self.is_empty = False

    def give(self, identity: bytes, message: RankMessage) -> None:
        """Pass a message to a rank: at once by its line, or else queued like any other."""
        line = self.lines.get(identity)
        if line is not None:
            line.put(message)
        else:
            self.send(identity, message)

    def connect(self, identity: bytes, line: RankLine) -> None:
        """Pass messages to a rank by this line from now on."""
        self.lines[identity] = line

    def disconnect(self, identity: bytes) -> None:
        """Pass nothing more to a rank by its line, if it has one."""
        self.lines.pop(identity, None)

    def instruct(self, instruction: WorkerInstruction) -> None:
        """Queue an instruction for the disk or the remote worker."""
        self._to_workers.append(instruction)
        self.is_empty = False

    def begin(self, job: BackgroundJob) -> None:
        """Queue a slow job."""
        self._jobs.append(job)
        self.is_empty = False

    def take(self) -> Output:
        """Empty the outbox."""
        output = Output(self._to_peers, self._to_workers, self._jobs)
        self._to_peers, self._to_workers, self._jobs = [], [], []
        self.is_empty = True
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
