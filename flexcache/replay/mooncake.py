"""Reads request traces in Mooncake's format.

A line of JSON per request has its time in milliseconds and one id per 512 tokens of the prompt.
Equal ids stand for equal prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.tracing.records import DECODE_ERRORS, KEY_BYTES, Matched, Record, TraceHeader

TOKENS_PER_ID = 512
DEFAULT_BLOCK_BYTES = 8192
"""Size of a block, which the format does not have. Small, since only hits are of interest."""


class MooncakeRequest(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]

    @property
    def time_s(self) -> float:
        return self.timestamp / 1000


_decoder = msgspec.json.Decoder(MooncakeRequest)


def hash_key(hash_id: int) -> bytes:
    """Return the block key that stands for an id."""
    return hash_id.to_bytes(KEY_BYTES, "big")


def read_requests(path: Path) -> Iterator[MooncakeRequest]:
    """Yield the requests of a file.

    Raises:
        TraceError: A line is not a request.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _decoder.decode(line)
            except DECODE_ERRORS as error:
                raise TraceError(f"{path}, line {number}: {error}") from None


def is_mooncake(path: Path) -> bool:
    """Return whether the file begins with a request in this format."""
    try:
        return path.is_file() and next(read_requests(path), None) is not None
    except (TraceError, OSError):
        return False


class MooncakeTrace:
    """Presents each request as a get of its prompt and then a put, without outcomes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.has_outcomes = False
        self.header = TraceHeader(
            block_bytes=DEFAULT_BLOCK_BYTES, tokens_per_block=TOKENS_PER_ID, fingerprint=path.name
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
                    num_tokens=len(request.hash_ids) * TOKENS_PER_ID,
                    keys=keys,
                    found_start=0,
                    num_blocks=0,
                )
