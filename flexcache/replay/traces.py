"""Traces: FlexCache's own, and request traces in Mooncake's and Bailian's formats, also gzipped.

Of a request trace, a line of JSON per request has its time and an id per block of the prompt. Equal
ids stand for equal prefixes. Mooncake's have 512 tokens per id and times in milliseconds;
Bailian's, which name the chat that a request belongs to, 16 tokens and seconds.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, cast

import msgspec

from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.tracing.records import (
    DECODE_ERRORS,
    FORMAT,
    KEY_BYTES,
    Record,
    TaskMatched,
    TraceHeader,
    read_lines,
)


class _Keys:
    """Keys of blocks from ``start`` on; earlier ones are in ``base``, which starts earlier.

    ``jump`` is a base further back, chosen so that any base is found in O(log n) steps.
    """

    __slots__ = ("base", "depth", "jump", "rest", "start")

    def __init__(self, base: _Keys | None, start: int, rest: bytes) -> None:
        self.start = start
        self.rest = rest
        self.base: _Keys = self if base is None else base
        self.jump: _Keys = self.base
        self.depth: int = 0 if base is None else base.depth + 1
        far = self.base.jump
        if self.base.depth - far.depth == far.depth - far.jump.depth:
            self.jump = far.jump

    def last_before(self, stop: int) -> _Keys:
        """Return the nearest of this one and its bases that starts before ``stop``."""
        keys = self
        while keys.start >= stop:
            keys = keys.jump if keys.jump.start >= stop else keys.base
        return keys


class KeyReader:
    """Completes the keys of one file's matches. Uses no more memory than the file's size.

    A match costs at most as many steps as it has keys, and O(log n) for shared ones.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[_Keys, int]] = {}
        """Keys and number of blocks, by task."""
        self._last: tuple[_Keys, bytes] = _Keys(None, 0, b""), b""
        """The last completed keys: a prompt that grows with each call costs one copy."""

    def complete(self, match: TaskMatched) -> TaskMatched:
        """Return the match with all of its keys.

        Raises:
            ValueError: An earlier line that this one refers to is missing, or keys are.
        """
        own, keys = _Keys(None, 0, match.keys), match.keys
        if match.base:
            if match.base not in self._prompts:
                raise ValueError(
                    f"task {match.task} refers to keys of task {match.base}, which is missing"
                )
            base, num_blocks = self._prompts[match.base]
            if match.base_blocks > num_blocks:
                raise ValueError(
                    f"task {match.task} refers to {match.base_blocks} blocks of task "
                    f"{match.base}, which has {num_blocks}"
                )
            if match.base_blocks:
                base = base.last_before(match.base_blocks)
                own = _Keys(base, match.base_blocks, match.keys) if match.keys else base
                keys = self._join(base, match.base_blocks) + match.keys
        if len(keys) != match.stop * KEY_BYTES:
            raise ValueError(f"task {match.task} has {match.stop} blocks and {len(keys)} key bytes")
        self._prompts[match.task] = own, match.stop
        self._last = own, keys
        return msgspec.structs.replace(match, base=0, base_blocks=0, keys=keys)

    def _join(self, keys: _Keys, stop: int) -> bytes:
        """Return the first ``stop`` keys."""
        last, whole = self._last
        pieces = []
        while stop:
            keys = keys.last_before(stop)
            if keys is last and len(whole) >= stop * KEY_BYTES:
                pieces.append(whole[: stop * KEY_BYTES])
                break
            pieces.append(keys.rest[: (stop - keys.start) * KEY_BYTES])
            stop = keys.start
        return b"".join(reversed(pieces))


_header_decoder = msgspec.json.Decoder(TraceHeader)
_record_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Trace(Protocol):
    """Records in the order of events. They can be read more than once."""

    @property
    def header(self) -> TraceHeader: ...

    @property
    def has_outcomes(self) -> bool:
        """Whether the trace has the outcomes of its calls."""

    def records(self, *, with_keys: bool = False) -> Iterator[Record]:
        """Yield all records; ``with_keys`` completes the keys of matches."""


class RecordedTrace:
    """A trace written by `Tracer`.

    Args:
        paths: Files of one trace, in any order, or directories that contain the files of one.

    Raises:
        TraceError: A file is not a trace, or the files belong to several traces.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        files = {path.resolve(): path for path in _files_of(paths)}
        headers = {path: _read_header(path) for path in files.values()}
        if not headers:
            raise TraceError(f"no trace in {', '.join(map(str, paths))}")
        names = {(header.pid, header.began_unix_s) for header in headers.values()}
        if len(names) > 1:
            listed = ", ".join(sorted(path.name for path in headers))
            raise TraceError(
                f"these files belong to {len(names)} traces; name those of one: {listed}"
            )
        self._paths = sorted(headers, key=lambda path: headers[path].file)
        self.header = headers[self._paths[0]]
        self.has_outcomes = True

    def records(self, *, with_keys: bool = False) -> Iterator[Record]:
        for path in self._paths:
            keys = KeyReader()
            for number, record in _read_lines(path):
                if with_keys and isinstance(record, TaskMatched):
                    try:
                        record = keys.complete(record)
                    except ValueError as error:
                        raise TraceError(f"{path}, line {number}: {error}") from None
                yield record


def _files_of(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from path.glob("*.jsonl") if path.is_dir() else [path]


def _read_header(path: Path) -> TraceHeader:
    try:
        with _open(path) as file:
            header = _header_decoder.decode(next(read_lines(file, path), b""))
    except DECODE_ERRORS as error:
        raise TraceError(f"{path} is not a trace: {error}") from None
    if header.format > FORMAT:
        raise TraceError(f"{path} has format {header.format}; this version reads up to {FORMAT}")
    return header


def _open(path: Path) -> BinaryIO:
    """Open a file. It may have been deleted since it was listed if the trace is still written."""
    try:
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def _read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield records with their line numbers, without the header."""
    with _open(path) as file:
        for number, line in enumerate(read_lines(file, path), 1):
            if number == 1:
                continue
            if not line.endswith(b"\n"):
                return  # the writer was killed, or the disk was full
            try:
                record = _record_decoder.decode(line)
            except DECODE_ERRORS as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            yield number, record


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
                yield TaskMatched(
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
