"""Instructions of `KVTaskEngine` to the shell around it, the names of executors, and `Recorder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.control import CacheCall
from flexcache.cache.prompt import Prompt
from flexcache.ids import BlockKey, KVStatus, OpId, SessionId, TaskId, TaskKind, TierName
from flexcache.transfer.scheduler import TransferOp

if TYPE_CHECKING:
    from flexcache.tasks.model import Task


DISK = "disk"
REMOTE = "remote"
PEER = "peer"


def device(engine: str, rank: int) -> str:
    """Name of the executor of H2D and D2H on one rank of a serving engine."""
    return f"device:{engine}:{rank}"


class Offer(msgspec.Struct, frozen=True):
    """The answer to a match: a task for ``num_blocks`` of a prompt from block ``start``.

    ``sources`` has how many of them each tier supplies. A launch needs ``num_gpu_blocks``, those of
    the tail behind ``tail_at`` blocks included, unless that is 0. ``num_cached`` are the prompt's
    first blocks that some tier has, of a get in a model with tails also behind the last tail.
    """

    task_id: TaskId
    kind: TaskKind
    num_tokens: int
    start: int
    num_blocks: int = 0
    sources: Mapping[TierName, int] = MappingProxyType({})
    num_gpu_blocks: int = 0
    tail_at: int = 0
    num_cached: int = 0


class PromisedLoad(NamedTuple):
    """A load that the engine's ranks carry out by themselves (`KVTaskEngine.promise`).

    ``pool_blocks``: blocks of the host pool (int64), in the order of the prompt.
    """

    task_id: TaskId
    op_id: OpId
    pool_blocks: bytes


class TaskResult(NamedTuple):
    """How a task ended: ``num_ok`` blocks from block ``start`` of the prompt on.

    Not ``is_final`` while something below the GPU still goes on (a write-through, say).
    """

    status: KVStatus
    start: int
    num_ok: int
    num_tokens: int
    error: str | None = None
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class RunOp:
    """Have an executor move the blocks and report by `KVTaskEngine.op_done`.

    ``checksums`` has one per block where the bytes read must be verified. A ``gated`` op must wait
    until the engine's worker has opened the gate of its task.

    ``weights`` and ``adapter``: as in `Execute`, for ranks.
    """

    executor: str
    task_id: TaskId
    op: TransferOp
    checksums: npt.NDArray[np.uint64] | None
    gated: bool
    adapter: str = ""
    weights: int = 0


@dataclass(frozen=True, slots=True)
class DropOp:
    """Skip what the executor has not begun of the op. The op must still be reported."""

    executor: str
    op_id: OpId


@dataclass(frozen=True, slots=True)
class RunLookUp:
    """Ask the remote worker how many of these blocks, from the first on, the store has, and which
    of the tails; or ask peers. The answer goes to `KVTaskEngine.looked_up`.

    ``tails``: of each, how many of the ``keys`` must be there for it to be of use, the key of the
    block behind which it is, and its number of units. ``source``: the peer to ask; empty for all.
    """

    lookup_id: int
    root: bytes
    keys: Sequence[BlockKey]
    tails: Sequence[tuple[int, BlockKey, int]] = ()
    executor: str = REMOTE
    source: str = ""


@dataclass(frozen=True, slots=True)
class AskToStage:
    """Ask a peer to bring to DRAM what it has on SSD of the prompt that ends with a block, and the
    tail of ``num_units`` behind that, unless these are 0."""

    peer: str
    root: bytes
    key: BlockKey
    num_units: int


@dataclass(frozen=True, slots=True)
class LookUpEnded:
    """Let callers that wait for the answer go on, with or without it."""

    lookup_id: int


@dataclass(frozen=True, slots=True)
class RevokeTask:
    """Keep late ranks from copying for the task. Takes effect before it is answered."""

    task_id: TaskId
    engine: str


@dataclass(frozen=True, slots=True)
class TaskAnswered:
    """Notify the owner of the task. Comes with the end of the GPU side and, where something goes on
    after that, once more with the end of everything.

    ``notify_ranks`` too where it is the end of the GPU side of a gated task.
    """

    task_id: TaskId
    engine: str
    result: TaskResult
    notify_ranks: bool


@dataclass(frozen=True, slots=True)
class ReplaceExecutor:
    """Stop an executor that missed an op's deadline, and report `executor_down`."""

    executor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The cache is empty: the error has left what it had in doubt. What is recorded on SSD must be
    made void as well."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Lend:
    """Have the peer worker send blocks of DRAM to who shows the token."""

    token: bytes
    blocks: npt.NDArray[np.int64]
    ends_s: float


@dataclass(frozen=True, slots=True)
class EndLoan:
    """Have the peer worker send them no more."""

    token: bytes


@dataclass(frozen=True, slots=True)
class DiscardObjects:
    """Have the remote worker remove objects of deleted blocks, best effort. It does not report."""

    root: bytes
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class EraseDeleted:
    """Erase the records of deleted blocks on SSD that tasks have let go of: they are kept from
    every plan until then (`KVTaskEngine.withhold_deleted`)."""


Instruction = (
    RunOp
    | DropOp
    | RunLookUp
    | AskToStage
    | LookUpEnded
    | RevokeTask
    | TaskAnswered
    | ReplaceExecutor
    | Lend
    | EndLoan
    | DiscardObjects
    | EraseDeleted
    | Forgotten
)


class Recorder(Protocol):
    """Called by `Accounts` under the server's lock: takes microseconds, raises nothing, and reads
    the clock itself."""

    def matched(self, task: Task, prompt: Prompt) -> None:
        """A prompt was asked for; ``task.plan`` is what came of it.

        Its keys may be a view of memory that changes after the call.
        """

    def launched(self, task: Task) -> None: ...

    def cancelled(self, task: Task) -> None: ...

    def op_started(self, task: Task, op: TransferOp) -> None:
        """An op was given to its executors."""

    def op_ended(self, task: Task, op: TransferOp, num_ok: int, error: str | None) -> None:
        """All of them have reported."""

    def ended(self, task: Task, result: TaskResult) -> None:
        """The task has come to its final state."""

    def cleared(self, tier: str | None, num_blocks: int) -> None: ...

    def controlled(self, call: CacheCall, blocks: Mapping[TierName, int]) -> None:
        """A user's call was carried out: blocks by tier that were found, pinned or deleted."""

    def session_began(self, session: SessionId, engine: str) -> None: ...

    def session_ended(self, session: SessionId) -> None: ...
