"""Identifiers, enumerations and request metadata that all layers share."""

from __future__ import annotations

import time
from enum import Enum, IntEnum
from typing import Any, NewType

import msgspec

__version__ = "0.1.0"

BlockKey = NewType("BlockKey", bytes)
"""Digest of a token prefix up to and including one block, or the engine's own hash of it."""

RootId = NewType("RootId", bytes)
"""Digest of fingerprint, namespace and kind of key, on which a key's identity depends."""

ROOT_BYTES = 16
MAX_KEY_BYTES = 40
"""Room for a key in the SSD tier's index; vLLM's keys have 32 bytes, FlexCache's own 16."""

SessionId = NewType("SessionId", int)
"""One registration of an engine's scheduler at one server; the upper half of its task ids."""

TaskId = NewType("TaskId", int)
OpId = NewType("OpId", int)


class TierName(str, Enum):
    """A place that holds blocks. The GPU is the engine's own: FlexCache never evicts it."""

    GPU = "GPU"
    CPU = "CPU"
    SSD = "SSD"
    PEER = "PEER"
    """DRAM of other hosts."""
    REMOTE = "REMOTE"


class OpKind(str, Enum):
    """Kinds of movement, named source first, then destination.

    COMMIT moves nothing: it records what D2DISK has written.
    """

    H2D = "H2D"
    D2H = "D2H"
    DISK2H = "DISK2H"
    H2DISK = "H2DISK"
    PEER2H = "PEER2H"
    REMOTE2H = "REMOTE2H"
    H2REMOTE = "H2REMOTE"
    DISK2D = "DISK2D"
    D2DISK = "D2DISK"
    COMMIT = "COMMIT"

    def __init__(self, name: str) -> None:  # not properties: a match reads some thirty of them
        self.fills_gpu = name in ("H2D", "DISK2D")
        """Whether the op writes the engine's own slots."""
        self.is_direct = name in ("DISK2D", "D2DISK")
        """Whether the op moves blocks between the engine's own slots and the SSD, past DRAM."""
        self.touches_gpu = self.is_direct or name in ("H2D", "D2H")
        """Whether the op reads or writes the engine's own slots."""


class TaskKind(str, Enum):
    GET = "get"
    PUT = "put"
    PREFETCH = "prefetch"
    STORE = "store"
    """From DRAM to the tiers below, initiated by the cache itself."""


class TaskState(str, Enum):
    """State of a task; ``docs/internals/tasks.md`` shows the transitions."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    OVERDUE = "overdue"
    """Answered, although a copy that missed its deadline may still land."""
    CANCELLING = "cancelling"
    """No more ops start; running ops end first."""
    CANCELLING_OVERDUE = "cancelling_overdue"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    def __init__(self, name: str) -> None:
        self.is_final = name in ("completed", "cancelled", "failed")
        self.is_cancelled = name in ("cancelling", "cancelling_overdue", "cancelled")
        """Whether its caller has cancelled it, whether or not it has ended."""
        self.is_overdue = name in ("overdue", "cancelling_overdue")

    @property
    def reported(self) -> TaskState:
        """State in statistics: a task counts as running while its ops run."""
        is_ending = self.is_overdue or self is TaskState.CANCELLING
        return TaskState.RUNNING if is_ending else self


class KVStatus(str, Enum):
    """Outcome of a task, as its caller sees it."""

    SUCCESS = "success"
    NOT_FOUND = "not_found"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMEOUT = "timeout"


class BreakerState(str, Enum):
    """State of a circuit breaker; while it is not closed, only trials pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """What a get may wait for: another engine computes its prompt at this moment.

    Attributes:
        until_s: Until when it waits, by the monotonic clock of the host; 0 for not at all.
        source: The peer that will have the blocks, ``tcp://HOST:PORT``; empty: this cache itself,
            the remote store, or any peer.
    """

    until_s: float = 0.0
    source: str = ""

    def is_awaited_of_peer(self, now: float) -> bool:
        """Whether a peer is to have it in time."""
        return bool(self.source) and now < self.until_s


NO_HAND_OVER = HandOver()


class RequestInfo(msgspec.Struct, frozen=True):
    """Metadata of one request, for KV events and traces; never affects look-ups.

    Attributes:
        request_id: The engine's id of the request.
        lora_id: The adapter's number, for older readers of KV events.
        lora_name: The adapter's name.
        extra_keys: Per block of the prompt, what the engine hashed besides tokens (adapter, images,
            salt), as published; None if nothing.
    """

    request_id: str = ""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


NO_INFO = RequestInfo()
_encoder = msgspec.msgpack.Encoder()
_NOTHING = type(None)
_TYPES = {
    "request_id": (str,), "lora_id": (int, _NOTHING), "lora_name": (str, _NOTHING),
    "extra_keys": (list, tuple, _NOTHING),
}  # fmt: skip


def check_request_info(info: object) -> None:
    """Raise `ValueError` unless it fits messages, traces and events: observers read it later, when
    no call could be refused any more."""
    if not isinstance(info, RequestInfo):
        raise ValueError(f"request_info must be a RequestInfo, not {type(info).__name__}")
    for name, types in _TYPES.items():
        if type(value := getattr(info, name)) not in types:  # a bool is no number of an adapter
            raise ValueError(f"request_info: {name} is of type {type(value).__name__}")
    try:
        _encoder.encode(info)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"request_info: {error}") from None


class PromptDetail(IntEnum):
    """Amount of a prompt's metadata that its observers need."""

    NOTHING = 0
    INFO = 1
    """Request metadata, for a trace."""
    TOKENS = 2
    """Request metadata and token ids, for KV events."""


_COUNT_BITS = 32
_SESSION_BITS = 16
_EPOCHS_PER_S = 4
MAX_TASK_ID = (1 << 64) - 2  # below `transfer.copier.NEVER_REVOKED`
NUM_WORDS = 2
"""Words of an engine's fence (`protocol.fence`): the server's and the scheduler's."""
WORD_BYTES = 8


def new_epoch() -> int:
    """A number that no server started shortly before or after has."""
    return 1 + int(time.time() * _EPOCHS_PER_S) % 0xFFFF  # 0 is of no server


def make_session(epoch: int, number: int) -> SessionId:
    return SessionId(epoch << _SESSION_BITS | number % (1 << _SESSION_BITS))


def session_of(task_id: int) -> SessionId:
    return SessionId(task_id >> _COUNT_BITS)


def is_of_same_server(session: SessionId, other: SessionId) -> bool:
    return session >> _SESSION_BITS == other >> _SESSION_BITS


def epoch_of(task_id: int) -> int:
    return task_id >> (_COUNT_BITS + _SESSION_BITS)


def id_before(session: SessionId) -> TaskId:
    """Below every task id of the session, and given to none."""
    return TaskId(session << _COUNT_BITS)


def last_id(session: SessionId) -> TaskId:
    """The highest task id that the session can have."""
    return TaskId(id_before(session) | (1 << _COUNT_BITS) - 1)


class TaskIds:
    """Counts the tasks of one session.

        | epoch: 16 bits | session: 16 bits | count: 32 bits |

    The epoch differs from one start of a server to the next, so that a rank which outlived its
    server can tell that a task of the old one will never be reported again. A session is one
    registration of an engine's scheduler; it counts its own tasks, and can name one before the
    server has answered: a match whose answer is lost can be cancelled.
    """

    def __init__(self, session: SessionId) -> None:
        self.session = session
        self._base = id_before(session)
        self._count = 0

    def next(self) -> TaskId:
        self._count += 1
        return TaskId(self._base + self._count)

    def __contains__(self, task_id: int) -> bool:
        """Whether the id was given out."""
        return 1 <= task_id - self._base <= self._count
