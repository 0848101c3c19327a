"""Exchange of Envoy with the endpoint picker: a request and its answer, piece by piece.

The messages are those of Envoy's external processing protocol, with what the Gateway API Inference
Extension puts into them (its proposal 004). No I/O: takes messages and returns those to answer
with.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from urllib.parse import urlsplit

from flexcache.config.values import is_address
from flexcache.errors import InternalError, MissingDependencyError
from flexcache.router.chooser import Arrival, Choice, Chooser, NotRouted, Outcome
from flexcache.router.discovery import Resolve, resolve
from flexcache.router.listing import bracketed
from flexcache.router.proxy.answers import (
    MATCHED_TOKENS_HEADER,
    ROUTING_HEADERS,
    WORKER_HEADER,
    AnswerReader,
    OutputWatch,
)
from flexcache.router.proxy.clients import BodyRefused, Room
from flexcache.router.stored import id_reader

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
        if not is_address(host):
            host = (await self._resolve(host, port))[0]
            until_s = self._clock() + KEPT_S
        address = f"{bracketed(host)}:{port}"
        self._known[url] = (address, until_s)
        return address


try:
    from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
    from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
    from envoy.service.ext_proc.v3.external_processor_pb2 import (
        BodyMutation,
        BodyResponse,
        CommonResponse,
        HeaderMutation,
        HeadersResponse,
        HttpBody,
        ImmediateResponse,
        ProcessingRequest,
        ProcessingResponse,
        StreamedBodyResponse,
        TrailersResponse,
    )
    from envoy.type.v3.http_status_pb2 import HttpStatus
    from google.protobuf.struct_pb2 import Struct
except ImportError as error:
    raise MissingDependencyError(
        f"the endpoint picker needs the package {error.name}: pip install '.[gateway]'"
    ) from None

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata entry: ``IP:PORT[,IP:PORT...]``, in the order in which they are tried."""
_LB = "envoy.lb"
_SUBSET_SPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_UPSTREAM = "upstream.address"


# -- what Envoy sends ------------------------------------------------------------------------------


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Return header fields, pseudo-headers included; of repeated ones the last."""
    return {
        each.key: each.raw_value.decode("latin-1") if each.raw_value else each.value
        for each in headers.headers
    }


def subset_of(metadata: Metadata) -> tuple[str, ...] | None:
    """Return the endpoints to choose from; None: all."""
    value = _entry(metadata, _SUBSET_SPACE, _SUBSET)
    if value is None:
        return None
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())


def served_by(message: ProcessingRequest) -> str | None:
    """Return the endpoint that an answer comes from: as the protocol has it in the metadata, or as
    Envoy alone can report it, as an attribute; None if neither is configured."""
    value = _entry(message.metadata_context, _LB, _SERVED)
    if value is None:
        for attributes in message.attributes.values():
            if _UPSTREAM in attributes.fields:
                value = attributes.fields[_UPSTREAM].string_value
    return value if isinstance(value, str) and value else None


def _entry(metadata: Metadata, space: str, key: str) -> str | list[object] | None:
    if space not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[space].fields
    if key not in fields:
        return None
    kind = fields[key].WhichOneof("kind")
    if kind == "list_value":
        return [each.string_value for each in fields[key].list_value.values]
    return str(fields[key].string_value)


# -- what Envoy is answered ------------------------------------------------------------------------


def mutation(fields: Mapping[str, str], removed: Iterable[str] = ()) -> HeaderMutation:
    """Set header fields, in place of those of the same names, and remove others."""
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name.lower(), raw_value=value.encode("latin-1")),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in fields.items()
        ],
        remove_headers=list(removed),
    )


def destined(headers: HeaderMutation, destinations: str) -> ProcessingResponse:
    """Send a request to the first of some endpoints that can be reached."""
    metadata = Struct()
    metadata.update({_LB: {DESTINATION: destinations}})
    common = CommonResponse(header_mutation=headers, clear_route_cache=True)
    return ProcessingResponse(
        request_headers=HeadersResponse(response=common), dynamic_metadata=metadata
    )


def headers_of_answer(headers: HeaderMutation) -> ProcessingResponse:
    """Pass the headers of an answer on, changed."""
    common = CommonResponse(header_mutation=headers)
    return ProcessingResponse(response_headers=HeadersResponse(response=common))


def streamed(chunk: HttpBody) -> BodyResponse:
    """Pass a piece of a body on, where Envoy leaves that to the processor."""
    piece = StreamedBodyResponse(body=chunk.body, end_of_stream=chunk.end_of_stream)
    return BodyResponse(
        response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece))
    )


REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse())
RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse())
RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse())
"""Passes a piece of the answer's body on, where Envoy keeps it meanwhile."""


def refusal(error: NotRouted) -> ProcessingResponse:
    """Answer a request without an engine."""
    fields = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        fields["retry-after"] = str(math.ceil(error.retry_after_s))
    content = {"error": {"message": str(error), "type": "router_error", "code": error.status}}
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=mutation(fields),
            body=json.dumps(content).encode(),
            details="flexcache_router",
        )
    )


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
        self._reader, self._output = AnswerReader(), OutputWatch("", is_stream=False)
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
        self._headers = read_headers(headers.headers)
        self._subset = subset_of(message.metadata_context)
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
        try:
            self._room.take(len(chunk.body), self._num_bytes)
        except BodyRefused as refused:
            return self.refused(NotRouted(refused.status, str(refused)))
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
        added = {**self._choice.headers, DESTINATION: text}
        has_key = any(name.lower() == "authorization" for name in self._choice.headers)
        headers = mutation(added, ["x-api-key"] if has_key else [])
        replies = [destined(headers, text)]
        replies += [ProcessingResponse(request_body=streamed(chunk)) for chunk in self._body]
        if self._has_trailers:
            replies.append(REQUEST_TRAILERS)
        self._forget_body()
        return replies

    def refused(self, error: NotRouted) -> _Replies:
        """Return the answer to a request that goes to no engine."""
        self.stage = Stage.OVER
        self._forget_body()
        return [refusal(error)]

    def _forget_body(self) -> None:
        self._body.clear()
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0

    # -- the answer --------------------------------------------------------------------------------

    def _take_answer_headers(self, message: ProcessingRequest) -> _Replies:
        choice = self._choice
        if choice is None:
            raise InternalError("an answer to a request without a worker")
        served = served_by(message)
        if served is not None and served != self._destinations[0]:  # Envoy has tried another one
            self._end(Outcome.REFUSED)
            return [headers_of_answer(mutation({}))]
        headers = message.response_headers
        fields = read_headers(headers.headers)
        status, content_type = fields.get(":status", ""), fields.get("content-type", "")
        is_passed = self._answer_mode != ProcessingMode.NONE
        self._is_error = status[:1] in ("4", "5")
        is_stream = content_type.startswith(_STREAM)
        self._tells_time = is_stream and is_passed
        self._output = OutputWatch(self._headers.get(":path", ""), is_stream)
        if not self._is_error:
            found = partial(self._chooser.stored, choice.url)
            ids = id_reader(found, self._headers.get(":path", ""), content_type, None)
            self._reader = AnswerReader(ids)
        self._outcome = Outcome.REFUSED if status in _REFUSALS else Outcome.DONE
        if not is_passed:
            self._note_first_token()
        if headers.end_of_stream or not is_passed:
            self._end(self._outcome)
        added = {WORKER_HEADER: choice.worker}
        if choice.matched_tokens is not None:
            added[MATCHED_TOKENS_HEADER] = str(choice.matched_tokens)
        return [headers_of_answer(mutation(added))]

    def _take_answer_body(self, message: ProcessingRequest) -> _Replies:
        chunk = message.response_body
        if chunk.body:
            if not self._has_first_token and self._output.sees(chunk.body):
                self._note_first_token()
            self._reader.feed(chunk.body)
        if chunk.end_of_stream:
            self._reader.end()
            self._end(self._outcome)
        if self._answer_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return [ProcessingResponse(response_body=streamed(chunk))]
        return [RESPONSE_BODY]

    def _take_answer_trailers(self, message: ProcessingRequest) -> _Replies:
        self._end(self._outcome)
        return [RESPONSE_TRAILERS]

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
        self._chooser.ended(self._request_id, outcome, self._reader.usage())
