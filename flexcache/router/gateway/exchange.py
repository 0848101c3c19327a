"""Exchange of Envoy with the endpoint picker: a request and its answer, piece by piece.

No I/O: takes messages and returns those to answer with.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from urllib.parse import urlsplit

from flexcache.errors import InternalError, MissingDependencyError
from flexcache.router.chooser import Arrival, Choice, Chooser, NotRouted, Outcome
from flexcache.router.discovery import Resolve, resolve
from flexcache.router.gateway import messages
from flexcache.router.listing import bracketed
from flexcache.router.proxy.answers import (
    MATCHED_TOKENS_HEADER,
    ROUTING_HEADERS,
    WORKER_HEADER,
    UsageReader,
)
from flexcache.router.stored import IdReader, id_reader

KEPT_S = 5.0


class Destinations:
    """Turns URLs into addresses. Those of names are looked up again every few seconds.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(
        self, *, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resolve = resolve
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """Return ``IP:PORT`` of an engine, an IPv6 address in brackets.

        Raises:
            OSError: Its name has no address.
        """
        address, until_s = self._known.get(url, ("", 0.0))
        if address and self._clock() < until_s:
            return address
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        until_s = float("inf")
        if not _is_address(host):
            host = (await self._resolve(host, port))[0]
            until_s = self._clock() + KEPT_S
        address = f"{bracketed(host)}:{port}"
        self._known[url] = (address, until_s)
        return address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Room:
    """Limits of a picker's memory.

    Args:
        max_body_bytes: Of one body.
        max_held_bytes: Of all of them.

    Attributes:
        held_bytes: In use.
    """

    def __init__(self, max_body_bytes: int, max_held_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._max_held_bytes = max_held_bytes

    @property
    def is_full(self) -> bool:
        return self.held_bytes > self._max_held_bytes

    def take(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def check(self, *, is_idle: bool) -> None:
        """
        Args:
            is_idle: There is no request.

        Raises:
            InternalError: Bytes are held by no request.
        """
        if self.held_bytes < 0 or (is_idle and self.held_bytes):
            raise InternalError(f"{self.held_bytes} bytes held, is_idle={is_idle}")


try:
    from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
    from envoy.service.ext_proc.v3.external_processor_pb2 import (
        HttpBody,
        ProcessingRequest,
        ProcessingResponse,
    )
except ImportError as error:
    raise MissingDependencyError(
        f"the endpoint picker needs the package {error.name}: pip install '.[gateway]'"
    ) from None

_REFUSALS = ("429", "502", "503")
_STREAM = "text/event-stream"
_Replies = Sequence[ProcessingResponse]


class BadStream(Exception):
    """Messages come in an order, or bodies in a mode, that the picker cannot work with."""


class Stage(Enum):
    """How far a request is."""

    COLLECTING = "collecting"
    WHOLE = "whole"
    """It waits for `Exchange.placed` or `Exchange.refused`."""
    PLACED = "placed"
    """It is at an engine; its answer comes."""
    OVER = "over"
    """No further message is answered."""


class Exchange:
    """Collects a request until it is whole, then follows its answer to the end.

    Every call of `Chooser.choose` that returned, noted with `placed`, is followed by one of
    `Chooser.ended`, at the latest in `close`.

    Args:
        request_id: See `Arrival`.
        room: For the body, until the request is placed.
    """

    def __init__(self, chooser: Chooser, request_id: str, room: Room) -> None:
        self.stage = Stage.COLLECTING
        self._chooser = chooser
        self._request_id = request_id
        self._room = room
        self._headers: dict[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._body: list[HttpBody] = []
        self._num_bytes = 0
        self._has_trailers = False
        self._answer_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        self._choice: Choice | None = None
        self._destinations: tuple[str, ...] = ()
        self._outcome = Outcome.ABORTED
        self._usage = UsageReader()
        self._ids: IdReader | None = None
        self._has_first_token = self._is_error = self._tells_time = False
        self._has_ended = False
        self._takers: dict[Stage, dict[str | None, Callable[[ProcessingRequest], _Replies]]] = {
            Stage.COLLECTING: {
                "request_headers": self._take_headers,
                "request_body": self._take_body,
                "request_trailers": self._take_trailers,
            },
            Stage.PLACED: {
                "response_headers": self._take_answer_headers,
                "response_body": self._take_answer_body,
                "response_trailers": self._take_answer_trailers,
            },
        }

    def take(self, message: ProcessingRequest) -> _Replies:
        """Take the next message and return the answers to it; those to the request follow from
        `placed` or `refused`.

        Raises:
            BadStream: It is not the turn of this message, or a mode is not supported.
        """
        kind = message.WhichOneof("request")
        taker = self._takers.get(self.stage, {}).get(kind)
        if taker is None:
            raise BadStream(f"{kind} while the request is {self.stage.value}")
        return taker(message)

    # -- the request -------------------------------------------------------------------------------

    def _take_headers(self, message: ProcessingRequest) -> _Replies:
        headers = message.request_headers
        self._headers = messages.read_headers(headers.headers)
        self._subset = messages.subset_of(message.metadata_context)
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._answer_mode = config.response_body_mode
            if (
                not headers.end_of_stream
                and config.request_body_mode != ProcessingMode.FULL_DUPLEX_STREAMED
            ):
                raise BadStream("request_body_mode must be FULL_DUPLEX_STREAMED")
        if headers.end_of_stream:
            self.stage = Stage.WHOLE
        return ()

    def _take_body(self, message: ProcessingRequest) -> _Replies:
        chunk = message.request_body
        self._body.append(chunk)
        self._num_bytes += len(chunk.body)
        self._room.take(len(chunk.body))
        limit = self._room.max_body_bytes
        if self._num_bytes > limit:
            return self.refused(NotRouted(413, f"the body is larger than {limit} bytes"))
        if self._room.is_full:
            return self.refused(NotRouted(503, "too many large requests at once"))
        if chunk.end_of_stream:
            self.stage = Stage.WHOLE
        return ()

    def _take_trailers(self, message: ProcessingRequest) -> _Replies:
        self._has_trailers = True
        self.stage = Stage.WHOLE
        return ()

    def arrival(self) -> Arrival:
        """Return the whole request."""
        headers = self._headers
        return Arrival(
            request_id=self._request_id,
            method=headers.get(":method", "GET"),
            path=headers.get(":path", "/"),
            headers={name: headers[name] for name in ROUTING_HEADERS if name in headers},
            body=b"".join(chunk.body for chunk in self._body),
            only=self._subset,
        )

    def reserved(self, choice: Choice) -> None:
        """Note what `Chooser.choose` returned: from now on the request is load of a worker."""
        self._choice = choice

    def placed(self, destinations: Sequence[str]) -> _Replies:
        """Return the answers to a request that goes to an engine.

        Args:
            destinations: ``IP:PORT`` of the chosen engine, then of others to fall back to.
        """
        if self._choice is None:
            raise InternalError("destinations for a request without a worker")
        self.stage = Stage.PLACED
        self._destinations = tuple(destinations)
        text = ",".join(destinations)
        added = {**self._choice.headers, messages.DESTINATION: text}
        has_key = any(name.lower() == "authorization" for name in self._choice.headers)
        headers = messages.mutation(added, ["x-api-key"] if has_key else [])
        replies = [messages.destined(headers, text)]
        replies += [
            ProcessingResponse(request_body=messages.streamed(chunk)) for chunk in self._body
        ]
        if self._has_trailers:
            replies.append(messages.REQUEST_TRAILERS)
        self._forget_body()
        return replies

    def refused(self, error: NotRouted) -> _Replies:
        """Return the answer to a request that goes to no engine."""
        self.stage = Stage.OVER
        self._forget_body()
        return [messages.refusal(error)]

    def _forget_body(self) -> None:
        self._body.clear()
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0

    # -- the answer --------------------------------------------------------------------------------

    def _take_answer_headers(self, message: ProcessingRequest) -> _Replies:
        choice = self._choice
        if choice is None:
            raise InternalError("an answer to a request without a worker")
        headers = message.response_headers
        served = messages.served_by(message)
        was_moved = served is not None and served != self._destinations[0]
        fields = messages.read_headers(headers.headers)
        status = fields.get(":status", "")
        self._is_error = status[:1] in ("4", "5")
        is_stream = fields.get("content-type", "").startswith(_STREAM)
        self._tells_time = is_stream and self._answer_mode != ProcessingMode.NONE
        if not (self._is_error or was_moved):
            found, target = (
                partial(self._chooser.stored, choice.url),
                self._headers.get(":path", ""),
            )
            self._ids = id_reader(found, target, fields.get("content-type", ""), None)
        is_refused = was_moved or status in _REFUSALS
        self._outcome = Outcome.REFUSED if is_refused else Outcome.DONE
        if self._answer_mode == ProcessingMode.NONE:
            self._note_first_token()
        if headers.end_of_stream or self._answer_mode == ProcessingMode.NONE or was_moved:
            self._end(self._outcome)
        added = {} if was_moved else {WORKER_HEADER: choice.worker}
        if choice.matched_tokens is not None and not was_moved:
            added[MATCHED_TOKENS_HEADER] = str(choice.matched_tokens)
        return [messages.headers_of_answer(messages.mutation(added))]

    def _take_answer_body(self, message: ProcessingRequest) -> _Replies:
        chunk = message.response_body
        if chunk.body:
            self._note_first_token()
            self._usage.feed(chunk.body)
        if self._ids is not None:
            self._ids.feed(chunk.body)
            if chunk.end_of_stream:
                self._ids.end()
        if chunk.end_of_stream:
            self._end(self._outcome)
        if self._answer_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return [ProcessingResponse(response_body=messages.streamed(chunk))]
        return [messages.RESPONSE_BODY]

    def _take_answer_trailers(self, message: ProcessingRequest) -> _Replies:
        self._end(self._outcome)
        return [messages.RESPONSE_TRAILERS]

    def close(self) -> None:
        """End the request if it has not ended: its client left, or the engine."""
        self.stage = Stage.OVER
        self._forget_body()
        self._end(Outcome.ABORTED)

    def _note_first_token(self) -> None:
        if self._has_first_token or self._has_ended or self._is_error:
            return
        if self._outcome is Outcome.DONE:
            self._has_first_token = True
            self._chooser.first_token(self._request_id, tells_time=self._tells_time)

    def _end(self, outcome: Outcome) -> None:
        if self._choice is None or self._has_ended:
            return
        self._has_ended = True
        self._chooser.ended(self._request_id, outcome, self._usage.read())
