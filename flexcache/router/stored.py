"""Responses, files and batches: each is kept by one engine, and asked for by its id.

The router learns ids from answers, and sends what names one to the engine that keeps it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from urllib.parse import unquote

import msgspec

from flexcache.router.chooser import Arrival, NotRouted
from flexcache.router.waiting import is_set_within

_KINDS = ("responses", "files", "batches")
_STREAM, _JSON = "text/event-stream", "application/json"
_MOST = 100_000
_LONGEST = 256  # of an id; a longer one is no engine's
_DELAY_S = 1.0
_MOST_EVENT = 64 << 10  # the first event has the id, and repeats the request's settings
_MOST_ANSWER = 8 << 20  # an id may stand at its end


class _Referred(msgspec.Struct):
    """What a request refers to."""

    previous_response_id: str | None = None
    input_file_id: str | None = None


class _Response(msgspec.Struct):
    id: str | None = None


class _Answer(msgspec.Struct):
    """A response, a file, a batch, or the first event of a response."""

    id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    response: _Response | None = None


_names = msgspec.json.Decoder(_Referred)
_answer = msgspec.json.Decoder(_Answer)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _kind_and_id(target: str) -> tuple[str, str]:
    parts = [*target.partition("?")[0].split("/"), "", ""]
    if parts[:2] != ["", "v1"] or parts[2] not in _KINDS:
        return "", ""
    return parts[2], unquote(parts[3])


def named_id(arrival: Arrival) -> str | None:
    """Return the id that a request names; None: none."""
    kind, name = _kind_and_id(arrival.path)
    if name or not kind:
        return name or None
    if b'"previous_response_id"' not in arrival.body and b'"input_file_id"' not in arrival.body:
        return None
    try:
        names = _names.decode(arrival.body)
    except _UNREADABLE:  # the engine says what is wrong
        return None
    return names.previous_response_id or names.input_file_id


class StoredIds:
    """Which engine keeps what, the last hundred thousand ids."""

    def __init__(self) -> None:
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._noted = asyncio.Event()

    def note(self, url: str, ids: Iterable[str]) -> None:
        """Note that the engine at a URL keeps things under these ids."""
        for name in ids:
            self._urls[name] = url
            self._urls.move_to_end(name)
        while len(self._urls) > _MOST:
            self._urls.popitem(last=False)
        self._noted.set()
        self._noted = asyncio.Event()

    def items(self) -> Mapping[str, str]:
        return dict(self._urls)

    async def find(self, arrival: Arrival, urls: Collection[str]) -> str | None:
        """Do what `url` does, but wait a moment for an id that is unknown: the proxy that saw it
        told it before its client, and the client may ask another proxy, whose message is faster.
        """
        give_up_s = time.monotonic() + _DELAY_S
        while True:
            try:
                return self.url(arrival, urls)
            except NotRouted:
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise
                await is_set_within(self._noted, left_s)

    def url(self, arrival: Arrival, urls: Collection[str]) -> str | None:
        """Return the engine that a request must go to; None: any.

        Args:
            urls: Of all engines.

        Raises:
            NotRouted: With 404: the request names an id, and one of several engines may have it.
        """
        name = named_id(arrival)
        if name is None:
            return None
        url = self._urls.get(name)
        if url is None and len(urls) > 1:
            raise NotRouted(
                404,
                f"{name[:_LONGEST]!r} is at one engine, and this router does not know which: it "
                "was made before the router started, through another router, or not at all",
            )
        return url


def id_reader(
    found: Callable[[list[str]], None], target: str, content_type: str, size: int | None
) -> IdReader | None:
    """Return a reader for an answer without error; None: it has no ids to be learned.

    Args:
        target: Path of the request.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if not _kind_and_id(target)[0] or kind not in (_STREAM, _JSON):
        return None
    return IdReader(found, is_stream=kind == _STREAM, size=size)


class IdReader:
    """Finds the ids in an answer as it passes, before its end reaches the client.

    Args:
        found: Called with the ids.
        is_stream: The first event has the id; otherwise the body is one JSON object.
        size: Of the body; None: unknown.
    """

    def __init__(
        self, found: Callable[[list[str]], None], *, is_stream: bool, size: int | None
    ) -> None:
        self._found = found
        self._is_stream = is_stream
        self._size = size
        self._most = _MOST_EVENT if is_stream else _MOST_ANSWER
        self._head: bytearray | None = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, before they are passed on."""
        if self._head is None:
            return
        self._head += chunk
        if self._is_stream:
            head = self._head[: self._most].replace(b"\r\n", b"\n")
            event, separator, _ = head.partition(b"\n\n")
            is_whole = bool(separator)
            content = event.partition(b"data:")[2]
        else:
            is_whole = len(self._head) == self._size
            content = self._head
        if is_whole:
            self._read(content)
        elif len(self._head) > self._most:
            self._head = None

    def end(self) -> None:
        """Note that there is no more."""
        if self._head and not self._is_stream:
            self._read(self._head)

    def _read(self, content: bytes | bytearray) -> None:
        self._head = None
        try:
            answer = _answer.decode(content)
        except _UNREADABLE:
            return
        inner = None if answer.response is None else answer.response.id
        ids = (answer.id, inner, answer.output_file_id, answer.error_file_id)
        kept = [name for name in ids if name and len(name) <= _LONGEST]
        if kept:
            self._found(kept)
