"""Identifiers and enumerations that every layer speaks in. No behaviour."""

from __future__ import annotations

from enum import Enum
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Digest of a token prefix up to and including one block, or the engine's own hash of it."""

RootId = NewType("RootId", bytes)
"""Digest of fingerprint, namespace and kind of key: what a key's identity rests on."""

ROOT_BYTES = 16
MAX_KEY_BYTES = 40
"""As many as the SSD tier's index has room for; vLLM's keys have 32, our own 16."""

SessionId = NewType("SessionId", int)
"""One registration of an engine's scheduler at one server; the upper half of its task ids."""

TaskId = NewType("TaskId", int)
OpId = NewType("OpId", int)


class TierName(str, Enum):
    """A place that holds blocks. The GPU is the engine's own: FlexCache never evicts it."""

    GPU = "GPU"
    CPU = "CPU"
    SSD = "SSD"
    REMOTE = "REMOTE"


class OpKind(str, Enum):
    """The typed movements; the name reads source, then destination."""

    H2D = "H2D"
    D2H = "D2H"
    DISK2H = "DISK2H"
    H2DISK = "H2DISK"
    REMOTE2H = "REMOTE2H"
    H2REMOTE = "H2REMOTE"

    @property
    def touches_gpu(self) -> bool:
        """Whether the op reads or writes the engine's own slots."""
        return self is OpKind.H2D or self is OpKind.D2H


class TaskKind(str, Enum):
    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"
    STORE = "store"
    """From DRAM to the tiers below, on the cache's own account."""


class TaskState(str, Enum):
    """Life of a task; ``docs/tasks.md`` draws the transitions."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    OVERDUE = "overdue"
    """Answered, although a copy that missed its deadline may still land."""
    CANCELLING = "cancelling"
    """Nothing more starts; ops that run end first."""
    CANCELLING_OVERDUE = "cancelling_overdue"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (TaskState.COMPLETED, TaskState.CANCELLED, TaskState.FAILED)

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller has cancelled it, be it over or not."""
        return self in (
            TaskState.CANCELLING, TaskState.CANCELLING_OVERDUE, TaskState.CANCELLED,
        )  # fmt: skip

    @property
    def is_overdue(self) -> bool:
        return self is TaskState.OVERDUE or self is TaskState.CANCELLING_OVERDUE

    @property
    def reported(self) -> TaskState:
        """The state that statistics count it under: while ops run, a task is running."""
        is_ending = self.is_overdue or self is TaskState.CANCELLING
        return TaskState.RUNNING if is_ending else self


class KVStatus(str, Enum):
    """How a task ended, as its caller sees it."""

    SUCCESS = "success"
    NOT_FOUND = "not_found"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMEOUT = "timeout"
