"""What the hub wants sent, run or done. The only queue between the task engine and the sockets.

The hub fills it under the server's lock; the event loop takes the contents out under the lock and
carries them out after releasing it.
"""

from __future__ import annotations

from typing import NamedTuple

from flexcache.protocol.messages import ToClient
from flexcache.server.background import BackgroundJob
from flexcache.tasks.instructions import DropOp, ReplaceExecutor, RunLookUp, RunOp
from flexcache.transfer.messages import Execute, pack_checksums, pack_ids

PeerMessage = ToClient | RunOp
"""An op for a rank is encoded when it is sent, without the lock."""
WorkerInstruction = RunOp | DropOp | RunLookUp | ReplaceExecutor


class Output(NamedTuple):
    """Messages and jobs, each list in the order in which it was filled."""

    to_peers: list[tuple[bytes, PeerMessage]]
    to_workers: list[WorkerInstruction]
    jobs: list[BackgroundJob]


class Outbox:
    """Collects output. Not thread-safe.

    Attributes:
        is_empty: Whether there is nothing to take.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self._to_peers: list[tuple[bytes, PeerMessage]] = []
        self._to_workers: list[WorkerInstruction] = []
        self._jobs: list[BackgroundJob] = []

    def send(self, identity: bytes, message: PeerMessage) -> None:
        """Queue a message for a peer."""
        self._to_peers.append((identity, message))
        self.is_empty = False

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
        b"" if run.checksums is None else pack_checksums(run.checksums), op.names,
    )  # fmt: skip
