"""What the endpoint picker makes of single messages, in any order; no gRPC, no Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.router.chooser import (
    UNKNOWN,
    Arrival,
    Choice,
    NotRouted,
    Outcome,
    Usage,
    WorkerAddress,
)
from flexcache.router.fleet import Fleet, WorkerSpec, WorkerState

pytest.importorskip("grpc_health.v1", reason="the extra gateway is not installed")
protocol = pytest.importorskip(
    "envoy.service.ext_proc.v3.external_processor_pb2", reason="the extra gateway is not installed"
)

import grpc  # noqa: E402
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata  # noqa: E402
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import (  # noqa: E402
    ProcessingMode,
)
from google.protobuf.struct_pb2 import Struct  # noqa: E402

from flexcache.router.gateway.exchange import (  # noqa: E402
    BadStream,
    Destinations,
    Exchange,
    Stage,
)
from flexcache.router.gateway.server import Picker  # noqa: E402
from flexcache.router.proxy.clients import Room  # noqa: E402

HttpBody, HttpHeaders = protocol.HttpBody, protocol.HttpHeaders
ProcessingRequest = protocol.ProcessingRequest
CHOICE = Choice(worker="w", url="http://10.0.0.7:8000", headers={}, matched_tokens=None)


class Ledger:
    """A chooser of which only the notes are used."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def choose(self, arrival: Arrival) -> Choice:
        raise NotImplementedError

    def stored(self, url: str, ids: Iterable[str]) -> None:
        self.notes.append(f"{', '.join(ids)} at {url}")

    def addresses(self) -> list[WorkerAddress]:
        return []

    def cards(self) -> dict[str, bytes]:
        return {}

    def models_changed(self) -> None:
        pass

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        self.notes.append("first token")

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        self.notes.append(outcome.value)


def headers(*, end: bool = False, **fields: str) -> Any:
    pairs = [HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    return HttpHeaders(headers=HeaderMap(headers=pairs), end_of_stream=end)


def metadata(space: str, **entries: Any) -> Metadata:
    content = Struct()
    content.update({name.replace("_", "-"): value for name, value in entries.items()})
    return Metadata(filter_metadata={space: content})


def status(code: int, **message: Any) -> Any:
    field = HeaderValue(key=":status", raw_value=str(code).encode())
    answer = HttpHeaders(headers=HeaderMap(headers=[field]))
    return ProcessingRequest(response_headers=answer, **message)


def body(content: bytes, *, end: bool = False) -> Any:
    return ProcessingRequest(request_body=HttpBody(body=content, end_of_stream=end))


def answer_body(content: bytes, *, end: bool = False) -> Any:
    return ProcessingRequest(response_body=HttpBody(body=content, end_of_stream=end))


def make_exchange(chooser: Ledger | None = None, **room: int) -> Exchange:
    limits = {"max_body_bytes": 1000, "max_held_bytes": 10_000, **room}
    return Exchange(chooser or Ledger(), "r", Room(**limits))


def placed(chooser: Ledger, *destinations: str) -> Exchange:
    exchange = make_exchange(chooser)
    exchange.take(ProcessingRequest(request_headers=headers(end=True)))
    exchange.reserved(CHOICE)
    exchange.placed(destinations or ("10.0.0.7:8000",))
    return exchange


def test_a_body_is_passed_on_in_its_pieces_after_the_headers() -> None:
    exchange = make_exchange()
    assert exchange.take(ProcessingRequest(request_headers=headers())) == ()
    assert exchange.take(body(b"one")) == ()
    assert exchange.take(body(b"two", end=True)) == ()
    assert exchange.stage is Stage.WHOLE
    assert exchange.arrival().body == b"onetwo"
    exchange.reserved(CHOICE)
    first, *pieces = exchange.placed(["10.0.0.7:8000", "10.0.0.8:8000"])
    key = "x-gateway-destination-endpoint"
    (field,) = first.request_headers.response.header_mutation.set_headers
    assert (field.header.key, field.header.raw_value) == (key, b"10.0.0.7:8000,10.0.0.8:8000")
    entries = first.dynamic_metadata["envoy.lb"]
    assert entries[key] == "10.0.0.7:8000,10.0.0.8:8000"
    streamed = [p.request_body.response.body_mutation.streamed_response for p in pieces]
    assert [(each.body, each.end_of_stream) for each in streamed] == [
        (b"one", False),
        (b"two", True),
    ]


def test_the_id_of_a_stored_response_is_learned() -> None:
    chooser = Ledger()
    exchange = make_exchange(chooser)
    fields = headers(end=True, **{":path": "/v1/responses"})
    exchange.take(ProcessingRequest(request_headers=fields))
    exchange.reserved(CHOICE)
    exchange.placed(["10.0.0.7:8000"])
    answer = headers(**{":status": "200", "content-type": "application/json; charset=utf-8"})
    exchange.take(ProcessingRequest(response_headers=answer))
    exchange.take(answer_body(b'{"id": "resp'))
    exchange.take(answer_body(b'_1"}', end=True))
    assert chooser.notes == ["first token", f"resp_1 at {CHOICE.url}", "done"]


def test_trailers_end_a_request_and_are_passed_on() -> None:
    exchange = make_exchange()
    exchange.take(ProcessingRequest(request_headers=headers()))
    exchange.take(body(b"one"))
    exchange.take(ProcessingRequest(request_trailers=protocol.HttpTrailers()))
    assert exchange.stage is Stage.WHOLE
    exchange.reserved(CHOICE)
    replies = exchange.placed(["10.0.0.7:8000"])
    kinds = [reply.WhichOneof("response") for reply in replies]
    assert kinds == ["request_headers", "request_body", "request_trailers"]


@pytest.mark.parametrize(
    ("entry", "only"),
    [
        (None, None),
        ([], ()),
        (["10.0.0.7:8000", "10.0.0.8:8000"], ("10.0.0.7:8000", "10.0.0.8:8000")),
        ("10.0.0.7:8000, 10.0.0.8:8000", ("10.0.0.7:8000", "10.0.0.8:8000")),
        ("", ()),
    ],
)
def test_a_subset_is_a_list_or_text(entry: Any, only: tuple[str, ...] | None) -> None:
    space = "envoy.lb.subset_hint"
    hint = {} if entry is None else {"x_gateway_destination_endpoint_subset": entry}
    exchange = make_exchange()
    exchange.take(
        ProcessingRequest(
            request_headers=headers(end=True), metadata_context=metadata(space, **hint)
        )
    )
    assert exchange.arrival().only == only


@pytest.mark.parametrize("code", [200, 400, 500])
def test_an_answer_ends_with_its_body(code: int) -> None:
    chooser = Ledger()
    exchange = placed(chooser)
    exchange.take(status(code))
    exchange.take(answer_body(b""))
    assert chooser.notes == []
    exchange.take(answer_body(b"x"))
    exchange.take(answer_body(b"", end=True))
    exchange.close()
    expected = ["first token", "done"] if code == 200 else ["done"]
    assert chooser.notes == expected, "an error is no first token"


@pytest.mark.parametrize("code", [429, 502, 503])
def test_an_engine_that_does_not_take_a_request_refused_it(code: int) -> None:
    chooser = Ledger()
    exchange = placed(chooser)
    exchange.take(status(code))
    exchange.take(answer_body(b"busy", end=True))
    assert chooser.notes == ["refused"]


@pytest.mark.parametrize(
    "served",
    [
        {"metadata_context": metadata("envoy.lb", x_gateway_destination_endpoint_served="b:1")},
        {"attributes": {"envoy.filters.http.ext_proc": Struct(fields={})}},
    ],
)
def test_an_answer_of_another_engine_means_that_the_chosen_one_refused(
    served: dict[str, Any],
) -> None:
    for attributes in served.get("attributes", {}).values():
        attributes.update({"upstream.address": "b:1"})
    chooser = Ledger()
    exchange = placed(chooser, "a:1", "b:1")
    (reply,) = exchange.take(status(200, **served))
    assert not reply.response_headers.response.header_mutation.set_headers
    exchange.take(answer_body(b"x", end=True))
    assert chooser.notes == ["refused"]


def test_a_mode_that_withholds_the_prompt_is_refused() -> None:
    exchange = make_exchange()
    config = protocol.ProtocolConfiguration(request_body_mode=ProcessingMode.STREAMED)
    with pytest.raises(BadStream, match="FULL_DUPLEX_STREAMED"):
        exchange.take(ProcessingRequest(request_headers=headers(), protocol_config=config))


def test_bodies_of_all_requests_together_are_limited() -> None:
    room = Room(1000, 1500)
    first, second = (Exchange(Ledger(), name, room) for name in "ab")
    for exchange in (first, second):
        exchange.take(ProcessingRequest(request_headers=headers()))
    assert first.take(body(bytes(900))) == ()
    (refusal,) = second.take(body(bytes(900)))
    assert refusal.immediate_response.status.code == 503
    assert room.held_bytes == 900
    first.close()
    second.close()
    room.check(is_idle=True)


MESSAGES = {
    "headers": ProcessingRequest(request_headers=headers()),
    "only headers": ProcessingRequest(request_headers=headers(end=True)),
    "piece": body(bytes(400)),
    "last piece": body(bytes(400), end=True),
    "trailers": ProcessingRequest(request_trailers=protocol.HttpTrailers()),
    "status": status(200),
    "refused": status(503),
    "answer": answer_body(b"x"),
    "last answer": answer_body(b"x", end=True),
    "answer trailers": ProcessingRequest(response_trailers=protocol.HttpTrailers()),
    "nothing": ProcessingRequest(),
}


@given(st.lists(st.sampled_from([*MESSAGES, "choose", "no engine"]), max_size=12))
def test_messages_in_any_order_leave_nothing(steps: list[str]) -> None:
    chooser, room = Ledger(), Room(1000, 1500)
    exchange = Exchange(chooser, "r", room)
    num_chosen = 0
    for step in steps:
        if step in MESSAGES:
            try:
                exchange.take(MESSAGES[step])
            except BadStream:
                break
        elif exchange.stage is Stage.WHOLE and step == "choose":
            exchange.reserved(CHOICE)
            num_chosen += 1
            exchange.placed(["10.0.0.7:8000"])
        elif exchange.stage is Stage.WHOLE:
            exchange.refused(NotRouted(503, "none"))
        room.check(is_idle=False)
        if exchange.stage is Stage.OVER:
            break
    exchange.close()
    exchange.close()
    room.check(is_idle=True)
    ends = [note for note in chooser.notes if note != "first token"]
    assert len(ends) == num_chosen <= 1
    assert chooser.notes.count("first token") <= 1
    if "first token" in chooser.notes:
        assert chooser.notes[0] == "first token"


# -- the stream -----------------------------------------------------------------------------------


class FakeStream:
    """A gRPC stream whose messages are all there already; every read and write takes a turn."""

    def __init__(self, *names: str, is_open: bool = False) -> None:
        self.written: list[str] = []
        self._messages = [MESSAGES[name] for name in names]
        self._is_open = is_open

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop(0)
        if self._is_open:
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, reply: Any) -> None:
        await asyncio.sleep(0)
        self.written.append(reply.WhichOneof("response"))

    async def abort(self, code: Any, text: str) -> None:
        self.written.append(code.name)


class Choosing(Ledger):
    """Takes some turns of the loop to choose, or for ever."""

    def __init__(self, turns: int | None = 0) -> None:
        super().__init__()
        self._turns = turns

    async def choose(self, arrival: Arrival) -> Choice:
        if self._turns is None:
            await asyncio.Event().wait()
        for _ in range(self._turns or 0):
            await asyncio.sleep(0)
        return CHOICE


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_no_message_is_lost_however_early_it_comes(turns: int) -> None:
    chooser = Choosing(turns)
    stream = FakeStream("headers", "last piece", "status", "answer", "last answer")
    room = Room(1000, 1000)
    asyncio.run(Picker(chooser, room).Process(None, stream))
    assert stream.written == [
        "request_headers", "request_body", "response_headers", "response_body", "response_body",
    ]  # fmt: skip
    assert chooser.notes == ["first token", "done"]
    room.check(is_idle=True)


def test_a_stream_that_ends_while_its_request_waits_ends_the_wait() -> None:
    chooser = Choosing(None)
    stream = FakeStream("headers", "last piece")
    asyncio.run(asyncio.wait_for(Picker(chooser, Room(1000, 1000)).Process(None, stream), 30))
    assert stream.written == chooser.notes == []


def test_a_refused_stream_is_not_read_further() -> None:
    stream = FakeStream("headers", "piece", "piece", "piece", is_open=True)
    picker = Picker(Choosing(), Room(1000, 10_000))
    asyncio.run(asyncio.wait_for(picker.Process(None, stream), 30))
    assert stream.written == ["immediate_response"]


def test_messages_out_of_order_end_the_stream() -> None:
    stream = FakeStream("status", is_open=True)
    picker = Picker(Choosing(), Room(1000, 1000))
    asyncio.run(asyncio.wait_for(picker.Process(None, stream), 30))
    assert stream.written == ["FAILED_PRECONDITION"]


# -- addresses ------------------------------------------------------------------------------------


def test_names_of_engines_are_looked_up_again_after_a_while() -> None:
    now, lookups = 0.0, []

    async def resolve(name: str, port: int) -> tuple[str, ...]:
        lookups.append((name, port))
        return (f"10.0.0.{len(lookups)}",)

    destinations = Destinations(resolve=resolve, clock=lambda: now)

    def of(url: str) -> str:
        return asyncio.run(destinations.of(url))

    assert of("http://10.0.0.7:8000") == "10.0.0.7:8000"
    assert of("https://[2001:db8::1]") == "[2001:db8::1]:443"
    assert not lookups
    assert of("http://engine:8000") == of("http://engine:8000") == "10.0.0.1:8000"
    now = 6.0
    assert of("http://engine:8000") == "10.0.0.2:8000"
    assert lookups == [("engine", 8000)] * 2


# -- subsets of the workers -----------------------------------------------------------------------


def test_only_workers_that_may_be_chosen_are_eligible() -> None:
    fleet = Fleet()
    fleet.set_workers([WorkerSpec(name=name, url=f"http://{name}:1") for name in "abc"])
    fleet.set_state("b", WorkerState.DOWN)

    def eligible(only: list[str] | None, tried: tuple[str, ...] = ()) -> list[str]:
        mask = fleet.eligible(None, tried, only)
        return [] if mask is None else [fleet.name(int(n)) for n in mask.nonzero()[0]]

    assert eligible(None) == ["a", "c"]
    assert eligible(["a", "b", "unknown"]) == ["a"]
    assert eligible(["a"], tried=("a",)) == ["a"]
    assert eligible(["a", "c"], tried=("a",)) == ["c"]
    assert eligible(["b"]) == []
    assert eligible([]) == []
