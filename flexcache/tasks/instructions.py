"""What `KVTaskEngine` tells the shell around it to do, and the names of who does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.ids import BlockKey, KVStatus, OpId, TaskId, TierName
from flexcache.transfer.graph import TransferOp

DISK = "disk"
REMOTE = "remote"


def device(engine: str, rank: int) -> str:
    """Name of the executor of H2D and D2H on one rank of a serving engine."""
    return f"device:{engine}:{rank}"


class MatchedTask(NamedTuple):
    """What a match came to: a task for ``num_blocks`` of a prompt from block ``start``.

    ``sources`` has how many of them each tier supplies.
    """

    task_id: TaskId
    start: int
    num_blocks: int
    sources: dict[TierName, int]


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
    """Instruction: an executor shall move the blocks and report by `KVTaskEngine.op_done`.

    ``checksums`` has one per block where the bytes read must be verified. A ``gated`` op must wait
    until the engine's worker has opened the gate of its task.
    """

    executor: str
    task_id: TaskId
    op: TransferOp
    checksums: npt.NDArray[np.uint64] | None
    gated: bool


@dataclass(frozen=True, slots=True)
class DropOp:
    """Instruction: what of the op has not started need not; it must still be reported."""

    executor: str
    op_id: OpId


@dataclass(frozen=True, slots=True)
class RunLookUp:
    """Instruction: the remote worker shall say how many of these blocks, from the first on, the
    store has, and report by `KVTaskEngine.looked_up`."""

    lookup_id: int
    root: bytes
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class LookUpEnded:
    """Instruction: whoever waits for the answer can go on, with or without it."""

    lookup_id: int


@dataclass(frozen=True, slots=True)
class RevokeTask:
    """Instruction: keep ranks that are late from copying for the task, before it is answered."""

    task_id: TaskId
    engine: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """Instruction: the GPU side of a task is done; tell whoever waits, and, if it is ``gated``,
    the engine's workers. ``num_ok`` blocks from the task's first on have arrived."""

    task_id: TaskId
    engine: str
    num_ok: int
    gated: bool


@dataclass(frozen=True, slots=True)
class TaskAnswered:
    """Instruction: tell the task's owner. Comes with the end of the GPU side and, where something
    goes on after that, once more with the end of everything."""

    task_id: TaskId
    result: TaskResult


@dataclass(frozen=True, slots=True)
class ReplaceExecutor:
    """Instruction: an executor missed an op's deadline; stop it and report `executor_down`."""

    executor: str
    reason: str


Instruction = (
    RunOp
    | DropOp
    | RunLookUp
    | LookUpEnded
    | RevokeTask
    | TaskEnded
    | TaskAnswered
    | ReplaceExecutor
)
