"""Records of a trace. A file begins with a `TraceHeader`; each further line is a `Record`.

Times are seconds since the trace began, by a monotonic clock. Lines are in the order of events; an
op is recorded at its end. Fields with default values are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from flexcache.errors import TraceError
from flexcache.ids import KVStatus, OpKind, TaskKind

FORMAT = 4
"""Incremented when an old reader would misread or refuse a new trace. 1: no ops past DRAM; 2: no
calls of users."""

KEY_BYTES = 8

SETTINGS = (
    "eviction_policy", "ssd_write_policy", "remote_write_policy", "skip_slow_loads",
    "transfer_chunk_mb", "match_ttl_s", "skip_useless_ssd_writes",
)  # fmt: skip
"""Fields of `CacheConfig` that decide what is moved and kept."""

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoding an untrusted line may raise."""

MAX_LINE_BYTES = 16 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=2**40)]
_Tokens = Annotated[int, msgspec.Meta(gt=0, le=2**16)]
_Rate = Annotated[float, msgspec.Meta(ge=0)]
TraceTime = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
"""Seconds. Bounded, so that a replay can sleep until then."""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identifies the trace, and the file within it.

    Attributes:
        format: As `FORMAT`; only traces of format 1 do not name it.
        version: FlexCache's version.
        block_bytes: Size of one block over all ranks.
        capacities: Blocks of each tier; 0 for the remote store, which FlexCache does not limit.
        indexed: Blocks that each tier held when the trace began.
        settings: Values of `SETTINGS`.
        began_unix_s: When the trace began. Identifies the trace together with ``pid``.
        file: Number of the file, from 1.
    """

    format: int = 1
    version: str = ""
    fingerprint: str = ""
    block_bytes: _Size
    tokens_per_block: _Tokens
    capacities: dict[str, _Count] = {}
    indexed: dict[str, _Count] = {}
    settings: dict[str, Any] = {}
    began_unix_s: float = 0.0
    pid: int = 0
    file: int = 1


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    time: TraceTime


class TaskMatched(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="match"):
    """A match of blocks ``[start, stop)`` of a prompt, and what it found.

    Attributes:
        engine: Name of the engine.
        request: The engine's id of the request.
        root: Root of the keys, as hex: prompts with different roots share no blocks.
        prefill_blocks_per_s: Prefill rate that the engine reported; 0 if it has not.
        keys: The last 8 bytes of each block's key, which is the whole hash where KV events carry
            64 bits, for blocks ``[base_blocks, stop)``. Earlier keys are those of the match of the
            task ``base``, which is earlier in the same file.
        found_start: First of the ``num_blocks`` blocks that the task will move.
        sources: How many of them each tier supplies.
        dropped: Blocks that cannot be stored, by reason.
        skipped: Blocks that are cached but not loaded, by reason.
    """

    task: int
    kind: TaskKind
    engine: str = ""
    request: str = ""
    root: str = ""
    start: _Count
    stop: _Count
    num_tokens: _Count
    retain_s: float = 0.0
    prefill_blocks_per_s: _Rate = 0.0
    base: int = 0
    base_blocks: _Count = 0
    keys: bytes = b""
    found_start: _Count
    num_blocks: _Count
    sources: dict[str, int] = {}
    dropped: dict[str, int] = {}
    skipped: dict[str, int] = {}


class Launched(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="launch"):
    task: int
    kind: TaskKind
    gated: bool = False


class Cancelled(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="cancel"):
    task: int


class OpEnded(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="op"):
    """An op that its executors ran from ``started`` to ``time``.

    Attributes:
        first: Position of its first block in the prompt.
        blocks: Number of blocks to move; the first ``num_ok`` of them were moved.
        after: Ops that had to end before it could start.
    """

    task: int
    op: int
    kind: OpKind
    started: float
    first: int
    blocks: int
    num_ok: int
    error: str | None = None
    after: tuple[int, ...] = ()


class TaskEnded(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """The final state of a task, with ``num_ok`` blocks moved."""

    task: int
    kind: TaskKind
    status: KVStatus
    num_ok: int = 0
    error: str | None = None


class ClearedTier(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="clear"):
    """``tier`` is None when all tiers were cleared."""

    tier: str | None = None
    num_blocks: int


class CacheCalled(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="control"):
    """A user's call about what is cached (`KVManager.lookup`), and what it found.

    Attributes:
        num_tokens: Of its prompt.
        blocks: By tier.
    """

    call: str
    num_tokens: int = 0
    blocks: dict[str, _Count] = {}


class SessionBegan(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="session"):
    session: int
    engine: str


class SessionEnded(_Line, frozen=True, kw_only=True, omit_defaults=True, tag="session_end"):
    session: int


Record = (
    TaskMatched
    | Launched
    | Cancelled
    | OpEnded
    | TaskEnded
    | ClearedTier
    | CacheCalled
    | SessionBegan
    | SessionEnded
)


def read_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a trace.

    Raises:
        TraceError: One is longer than any that is written: the file, or what it unpacks to, need
            not fit into memory.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB")
        yield line
