"""Reads traces: the files of one run, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from flexcache.errors import TraceError
from flexcache.replay.keys import KeyReader
from flexcache.tracing.records import (
    DECODE_ERRORS,
    FORMAT,
    Matched,
    Record,
    TraceHeader,
    read_lines,
)

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
                if with_keys and isinstance(record, Matched):
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
