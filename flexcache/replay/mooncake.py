"""Reads request traces in Mooncake's format and in that of Alibaba's Bailian traces, also gzipped.

A line of JSON per request has its time and an id per block of the prompt. Equal ids stand for equal
prefixes. Mooncake's have 512 tokens per id and times in milliseconds; Bailian's, which name the
chat that a request belongs to, 16 tokens and seconds.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.tracing.records import (
    DECODE_ERRORS,
    KEY_BYTES,
    Matched,
    Record,
    TraceHeader,
    read_lines,
)

TOKENS_PER_ID = 512
BAILIAN_TOKENS_PER_ID = 16
DEFAULT_BLOCK_BYTES = 8192
"""Size of a block, which the format does not have. Small, since only hits are of interest."""

_MOST_IDS = 1 << 18  # 4 million tokens, of Mooncake's 134 million
_GZIP_MAGIC = b"\x1f\x8b"
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of a trace.

    Attributes:
        input_length: Tokens of the prompt, and ``output_length`` of the answer; 0 if unknown.
        chat_id: Only in Bailian's traces; ``parent_chat_id`` is the chat's turn before, or -1.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)]
    hash_ids: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]], msgspec.Meta(max_length=_MOST_IDS)
    ]
    input_length: _Length = 0
    output_length: _Length = 0
    chat_id: int | None = None
    parent_chat_id: int = -1

    @property
    def time_s(self) -> float:
        return self.timestamp / 1000 if self.chat_id is None else self.timestamp

    @property
    def tokens_per_id(self) -> int:
        return TOKENS_PER_ID if self.chat_id is None else BAILIAN_TOKENS_PER_ID


_decoder = msgspec.json.Decoder(MooncakeRequest)


def hash_key(hash_id: int) -> bytes:
    """Return the block key that stands for an id."""
    return hash_id.to_bytes(KEY_BYTES, "big")


def read_requests(path: Path) -> Iterator[MooncakeRequest]:
    """Yield the requests of a file, without a last line that was torn as it was written.

    Raises:
        TraceError: A line is not a request, or the file cannot be read.
    """
    number, line = 0, b""
    try:
        for number, line in enumerate(_lines(path), 1):  # noqa: B007
            yield _decoder.decode(line)
    except DECODE_ERRORS as error:
        is_json = isinstance(error, msgspec.ValidationError)  # a whole line, if not a request
        if number > 1 and not is_json and not line.endswith(b"\n"):
            return
        raise TraceError(f"{path}, line {number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}, after line {number}: {reason}") from None


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if _is_gzipped(path) else path.open("rb") as lines:
        yield from read_lines(cast(BinaryIO, lines), path)


def _is_gzipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC


def is_mooncake(path: Path) -> bool:
    """Return whether the file begins with a request in one of the two formats, or is gzipped."""
    try:
        if path.is_file() and _is_gzipped(path):
            return True
        return path.is_file() and next(read_requests(path), None) is not None
    except (OSError, TraceError):
        return False


class MooncakeTrace:
    """Presents each request as a get of its prompt and then a put, without outcomes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.has_outcomes = False
        first = next(read_requests(path), None)
        self._tokens_per_id = TOKENS_PER_ID if first is None else first.tokens_per_id
        self.header = TraceHeader(
            block_bytes=DEFAULT_BLOCK_BYTES,
            tokens_per_block=self._tokens_per_id,
            fingerprint=path.name,
        )

    def records(self, *, with_keys: bool = False) -> Iterator[Record]:
        task = 0
        for number, request in enumerate(read_requests(self._path), 1):
            keys = b"".join(map(hash_key, request.hash_ids)) if with_keys else b""
            for kind in (TaskKind.GET, TaskKind.PUT):
                task += 1
                yield Matched(
                    time=request.time_s,
                    task=task,
                    kind=kind,
                    request=str(number),
                    start=0,
                    stop=len(request.hash_ids),
                    num_tokens=len(request.hash_ids) * self._tokens_per_id,
                    keys=keys,
                    found_start=0,
                    num_blocks=0,
                )
