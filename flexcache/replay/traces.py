"""Traces: FlexCache's own, and request traces in the formats of others, also gzipped.

Of a request trace, a line of JSON per request has its time and an id per block of the prompt. Equal
ids stand for equal prefixes. Mooncake's have 512 tokens per id and times in milliseconds;
Bailian's, which name the chat that a request belongs to, 16 tokens and seconds. ``block_size``, as
kvcache-simulator has it, says another number of tokens.

Two formats have sessions instead. Their blocks get other numbers here, and their requests come in
order of time:

* AIPerf's, a line per turn with ``session_id``: only what the turn adds to the prompt, and a delay
  after the turn before. The answers of earlier turns are part of the prompt too.
* kv-cache-tester's ("weka"), a JSON file per session, or a directory of such: whole prompts, those
  of subagents within. Ids mean nothing beyond their file. All sessions begin at once.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, TypeVar, cast

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
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_SESSION_BYTES = 256 << 20  # of a file that is read whole
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Ids = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]], msgspec.Meta(max_length=_MOST_IDS)
]


_Line = TypeVar("_Line")


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of a trace, or what one of another format amounts to.

    Attributes:
        input_length: Tokens of the prompt, and ``output_length`` of the answer; 0 if unknown.
        chat_id: Only in Bailian's traces; ``parent_chat_id`` is the chat's turn before, or -1.
        block_size: Tokens per id; 0 for as many as the format has.
        session: The session or subagent that asks; empty where the format names none.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)]
    hash_ids: _Ids
    input_length: _Length = 0
    output_length: _Length = 0
    chat_id: int | None = None
    parent_chat_id: int = -1
    block_size: Annotated[int, msgspec.Meta(ge=0, le=_MOST_BLOCK_TOKENS)] = 0
    session: str = ""

    @property
    def time_s(self) -> float:
        return self.timestamp / 1000 if self.chat_id is None else self.timestamp

    @property
    def tokens_per_id(self) -> int:
        if self.block_size:
            return self.block_size
        return TOKENS_PER_ID if self.chat_id is None else BAILIAN_TOKENS_PER_ID


class _Turn(msgspec.Struct, frozen=True):
    """A line of AIPerf's sessions: what a turn adds. Times in milliseconds."""

    session_id: str
    hash_ids: Annotated[_Ids, msgspec.Meta(min_length=1)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    output_length: _Length = 0
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)] = 0.0
    delay: Annotated[float, msgspec.Meta(ge=0, le=1e13)] = 0.0


class _Call(msgspec.Struct, frozen=True):
    """A request of kv-cache-tester's, or a subagent with ``requests`` of its own."""

    t: Annotated[float, msgspec.Meta(ge=0, le=1e10)]
    input_length: _Length = msgspec.field(name="in", default=0)
    output_length: _Length = msgspec.field(name="out", default=0)
    hash_ids: _Ids = []
    agent_id: str = ""
    requests: list[_Call] = []


class _WekaSession(msgspec.Struct, frozen=True):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BLOCK_TOKENS)]
    requests: list[_Call]


_decoder = msgspec.json.Decoder(MooncakeRequest)
_turn_decoder = msgspec.json.Decoder(_Turn)
_weka_decoder = msgspec.json.Decoder(_WekaSession)

_Piece = tuple[Hashable, int, int]
"""A name of tokens, and from which of them on, how many."""


class _Prefixes:
    """Numbers blocks by what they contain and what is before them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, before: Sequence[int], content: Hashable) -> int:
        key = (before[-1] if before else -1, content)
        return self._numbers.setdefault(key, len(self._numbers))


class _Conversation:
    """The prompt of a session that grows with each turn, by blocks."""

    def __init__(self, block_size: int, prefixes: _Prefixes) -> None:
        self._block_size = block_size
        self._prefixes = prefixes
        self._blocks: list[int] = []
        self._tail: tuple[_Piece, ...] = ()  # what of the prompt fills no block
        self.num_tokens = 0

    def append(self, name: Hashable, num_tokens: int) -> None:
        done = 0
        while done < num_tokens:
            room = self._block_size - self.num_tokens % self._block_size
            taken = min(room, num_tokens - done)
            self._tail += ((name, done, taken),)
            self.num_tokens += taken
            done += taken
            if taken == room:
                self._blocks.append(self._prefixes.number(self._blocks, self._tail))
                self._tail = ()

    def hash_ids(self) -> list[int]:
        """Return the numbers of all blocks; the last may have fewer tokens."""
        last = [self._prefixes.number(self._blocks, self._tail)] if self._tail else []
        return self._blocks + last


def hash_key(hash_id: int) -> bytes:
    """Return the block key that stands for an id."""
    return hash_id.to_bytes(KEY_BYTES, "big")


def read_requests(path: Path) -> Iterator[MooncakeRequest]:
    """Yield the requests of a file, without a last line that was torn as it was written.

    Those of sessions come in order of time, and the file is read whole before the first.

    Args:
        path: Or a directory of kv-cache-tester's sessions.

    Raises:
        TraceError: A line is not a request, or the file cannot be read.
    """
    match _format_of(path):
        case "lines":
            yield from _decoded(path, _decoder)
        case "turns":
            turns = list(_decoded(path, _turn_decoder))
            yield from sorted(_accumulated(path, turns), key=lambda request: request.timestamp)
        case _:
            files = sorted(path.glob("*.json")) if path.is_dir() else [path]
            prefixes = _Prefixes()
            requests = [each for file in files for each in _weka_requests(file, prefixes)]
            yield from sorted(requests, key=lambda request: request.timestamp)


def _format_of(path: Path) -> str:
    if path.is_dir():
        return "weka"
    try:
        first = next(_lines(path), b"{}")
    except (OSError, EOFError, zlib.error, TraceError):
        return "weka" if path.suffix == ".json" else "lines"  # the reader says what is wrong
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS:
        fields = {}  # torn, or a line of many
    if "session_id" in fields and "hash_ids" in fields:
        return "turns"
    return "weka" if path.suffix == ".json" and "hash_ids" not in fields else "lines"


def _accumulated(path: Path, turns: Sequence[_Turn]) -> Iterator[MooncakeRequest]:
    """Yield whole prompts. An answer takes no time here, since the format does not say how long."""
    size, prefixes = _block_size_of(path, turns), _Prefixes()
    conversations: dict[str, tuple[_Conversation, float]] = {}
    for number, turn in enumerate(turns):
        if turn.session_id not in conversations:
            conversations[turn.session_id] = _Conversation(size, prefixes), turn.timestamp
        prompt, before = conversations[turn.session_id]
        rest = turn.input_length
        for hash_id in turn.hash_ids:
            prompt.append(hash_id, min(rest, size))
            rest -= size
        now = before + turn.delay
        conversations[turn.session_id] = prompt, now
        yield MooncakeRequest(
            now, prompt.hash_ids(), prompt.num_tokens, turn.output_length,
            block_size=size, session=turn.session_id,
        )  # fmt: skip
        prompt.append(("answer", number), turn.output_length)  # no other prompt has it


def _block_size_of(path: Path, turns: Sequence[_Turn]) -> int:
    """Return the tokens per id, which the format does not have: the first size that fits all turns,
    AIPerf's default before powers of two and these before others.

    Raises:
        TraceError: None fits.
    """
    least = max((-(-t.input_length // len(t.hash_ids)) for t in turns), default=1)
    several = (t for t in turns if len(t.hash_ids) > 1)
    most = min(
        ((t.input_length - 1) // (len(t.hash_ids) - 1) for t in several), default=_MOST_BLOCK_TOKENS
    )
    sizes = (TOKENS_PER_ID, *(1 << bits for bits in range(21)), least)
    for size in sizes:
        if least <= size <= most:
            return size
    raise TraceError(f"{path}: no number of tokens per id fits the input_length of all turns")


def _weka_requests(path: Path, prefixes: _Prefixes) -> Iterator[MooncakeRequest]:
    try:
        if path.stat().st_size > _MOST_SESSION_BYTES:
            raise TraceError(f"{path}: more than {_MOST_SESSION_BYTES >> 20} MiB")
        trace = _weka_decoder.decode(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except DECODE_ERRORS as error:
        raise TraceError(f"{path}: {error}") from None

    def requests(calls: Sequence[_Call], session: str, began: float) -> Iterator[MooncakeRequest]:
        for call in calls:
            # Recorders count a subagent's time from the session's start, old ones from its own.
            time_s = call.t if call.t >= began else began + call.t
            if call.requests:
                yield from requests(call.requests, f"{session}/{call.agent_id}", time_s)
            if not call.hash_ids:
                continue
            blocks: list[int] = []
            for hash_id in call.hash_ids:
                blocks.append(prefixes.number(blocks, (trace.id, hash_id)))
            yield MooncakeRequest(
                time_s * 1000, blocks, call.input_length, call.output_length,
                block_size=trace.block_size, session=session,
            )  # fmt: skip

    yield from requests(trace.requests, trace.id, 0.0)


def _decoded(path: Path, decoder: msgspec.json.Decoder[_Line]) -> Iterator[_Line]:
    number, line = 0, b""
    try:
        for number, line in enumerate(_lines(path), 1):  # noqa: B007
            yield decoder.decode(line)
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
    """Return whether these are requests in one of the formats of others, or gzipped."""
    try:
        if path.is_file() and _is_gzipped(path):
            return True
        return path.exists() and next(read_requests(path), None) is not None
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
