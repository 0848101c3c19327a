"""The router's proxy as a process before engines without a model: what it passes on, how engines
fail, how clients leave, and what hostile clients can do."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import itertools
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

from certificates import make_certificate
from cluster import PATIENCE_S, until
from fake_openai_engine import FakeEngine
from ports import free_port
from proxy_process import ProxyProcess

BODY = {"prompt": list(range(40)), "max_tokens": 8}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


class Answer:
    """A whole answer; `broke` if its body was not complete."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.broke = False
        try:
            self.body = response.read()
        except http.client.IncompleteRead as error:
            self.body = error.partial
            self.broke = True

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def ask(
    proxy: ProxyProcess,
    content: Any = BODY,
    path: str = "/v1/completions",
    method: str = "POST",
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Send one request on a connection of its own."""
    connection: http.client.HTTPConnection
    if context is not None:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", proxy.port, timeout=PATIENCE_S, context=context
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
        connection.request(
            method, path, body, {"Content-Type": "application/json", **(headers or {})}
        )
        return Answer(connection.getresponse())


def connect(proxy: ProxyProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def request_bytes(content: Any = STREAM, *extra: str) -> bytes:
    body = json.dumps(content).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_until(sock: socket.socket, wanted: bytes, times: int = 1) -> bytes:
    received = b""
    while received.count(wanted) < times:
        chunk = sock.recv(65536)
        assert chunk, f"closed after {received!r}"
        received += chunk
    return received


def read_all(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(65536):
            received += chunk
    return received


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with FakeEngine() as first, FakeEngine() as second:
        yield first, second


@pytest.fixture
def pair(engines: tuple[FakeEngine, FakeEngine]) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """Two engines that behave; they are the same for all tests."""
    for engine in engines:
        engine.behave(fail="none", token_interval_s=0.0, retry_after=None, token_bytes=1)
    yield engines
    for engine in engines:
        engine.behave(fail="none")


@pytest.fixture
def engine(pair: tuple[FakeEngine, FakeEngine]) -> FakeEngine:
    return pair[0]


def both(pair: tuple[FakeEngine, FakeEngine]) -> list[str]:
    return [engine.url for engine in pair]


def num_requests(*engines: FakeEngine) -> int:
    return sum(engine.stats()["requests"] for engine in engines)


# -- what is passed on ----------------------------------------------------------------------------


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
TARGETS = (
    "/v1/any?a=1&b=%20x",
    "//evil.example/x",
    "/@evil/../y",
    "/a%2Fb;c=%00",
    "/x?y=http://z/",
)


def test_any_method_and_target_is_passed_on_as_received(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url]) as proxy:
        for method, target in itertools.product(METHODS, TARGETS):
            body = None if method in ("GET", "OPTIONS") else b'{"n":  1, "odd": "\xc3\xa9"}'
            assert ask(proxy, body, target, method).status == 200
            seen = engine.requests()[-1]
            assert (seen["method"], seen["target"]) == (method, target)
            assert seen["sha256"] == hashlib.sha256(body or b"").hexdigest()


def test_bodies_answers_and_fields_are_passed_on_as_received(engine: FakeEngine) -> None:
    hints = {"flexcache_store": False, "flexcache_max_store_tokens": 7}
    hinted = {**BODY, "kv_transfer_params": hints, "custom_params": hints}
    squeezed = gzip.compress(json.dumps(hinted).encode())
    large = b" " * 3_000_000 + json.dumps(BODY).encode()
    with ProxyProcess([engine.url]) as proxy:
        ask(proxy, squeezed, headers={"Content-Encoding": "gzip", "Cookie": "a=b"})
        seen = engine.requests()[-1]
        assert seen["sha256"] == hashlib.sha256(squeezed).hexdigest()
        fields = {name.lower(): value for name, value in seen["headers"]}
        assert fields["content-encoding"] == "gzip" and fields["cookie"] == "a=b"
        assert fields.keys() == {
            "host", "accept-encoding", "content-type", "content-length", "content-encoding",
            "cookie", "x-request-id",
        }  # fmt: skip
        assert fields["host"] == engine.url.removeprefix("http://")

        ask(proxy, large)
        assert engine.requests()[-1]["sha256"] == hashlib.sha256(large).hexdigest()

        engine.behave(fail="500", times=1)
        answer = ask(proxy)
        assert (answer.status, answer.error["message"]) == (500, "failing with 500")
        assert ask(proxy, None, "/x", "HEAD").body == b""


@pytest.mark.parametrize("target", ["/v1/messages?beta=true", "/v1/chat/completions"])
def test_a_marked_prompt_is_to_be_pinned(engine: FakeEngine, target: str) -> None:
    marker = {"type": "ephemeral", "ttl": "1h"}
    part = {"type": "text", "text": "x", "cache_control": marker}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    with ProxyProcess([engine.url]) as proxy:
        assert ask(proxy, body, target).status == 200
        seen = json.loads(engine.requests()[-1]["body"])
        assert seen == {**body, "kv_transfer_params": {"flexcache_pin_ttl_s": 3600}}
        assert ask(proxy, body, "/v1/embeddings").status == 200
        assert json.loads(engine.requests()[-1]["body"]) == body


def test_an_expected_continue_is_answered(engine: FakeEngine) -> None:
    head, _, body = request_bytes(BODY, "Expect: 100-continue", "Connection: close").partition(
        b"\r\n\r\n"
    )
    with ProxyProcess([engine.url]) as proxy, connect(proxy) as sock:
        sock.sendall(head + b"\r\n\r\n")
        read_until(sock, b"100 Continue\r\n\r\n")
        sock.sendall(body)
        assert b"200 OK" in read_all(sock)


def test_a_stream_is_passed_on_as_it_comes(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url]) as proxy:
        engine.behave(fail="hang_midway", times=1)  # after 4 of 8 tokens
        with connect(proxy) as sock:
            sock.sendall(request_bytes())
            received = read_until(sock, b"data: ", times=4)
            assert b"text/event-stream" in received and b"[DONE]" not in received
        until(lambda: proxy.stats()["outcomes"] == {"aborted": 1})
        assert proxy.stats()["ended"][-1]["first_token"]


def test_who_answered_is_shown_and_request_ids_are_kept(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], matched_tokens=32) as proxy:
        answer = ask(proxy, headers={"X-Request-Id": "mine-1", "X-Session-Id": "s"})
        assert answer.headers["x-flexcache-worker"] == engine.url
        assert answer.headers["x-flexcache-matched-tokens"] == "32"
        assert answer.headers.get_all("x-request-id") == ["mine-1"]
        assert ["x-request-id", "mine-1"] in engine.requests()[-1]["headers"]
        made = {ask(proxy).headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3 and all(made)
        assert proxy.stats()["arrivals"][0]["headers"]["x-session-id"] == "s"
        # Two requests may have the same id: the router tells them apart.
        engine.behave(fail="hang", times=1)
        with connect(proxy) as sock:
            sock.sendall(request_bytes(BODY, "x-request-id: mine-1"))
            until(lambda: proxy.stats()["num_open"] == 1)
            assert ask(proxy, headers={"X-Request-Id": "mine-1"}).status == 200


def test_without_a_prediction_no_matched_tokens_are_shown(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url]) as proxy:
        assert "x-flexcache-matched-tokens" not in ask(proxy).headers


def test_reported_usage_reaches_the_chooser(engine: FakeEngine) -> None:
    prompt = list(range(1000, 1100))
    with ProxyProcess([engine.url]) as proxy:
        ask(proxy, {"prompt": prompt, "max_tokens": 3})
        ask(proxy, {**STREAM, "prompt": prompt})
        ask(proxy, {"prompt": prompt, "stream": True})
        ended = proxy.stats()["ended"]
    counts = [(e["cached_tokens"], e["prompt_tokens"], e["output_tokens"]) for e in ended]
    assert counts == [(0, 100, 3), (96, 100, 8), (None, None, None)]
    assert [e["outcome"] for e in ended] == ["done"] * 3


def test_the_router_answers_for_its_own_health(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], api_keys=["k"]) as proxy:
        engine.behave(healthy=False)
        assert ask(proxy, None, "/health", "GET").status == 200
        engine.behave(healthy=True)
        assert not proxy.stats()["arrivals"]
        models = ask(proxy, None, "/v1/models", "GET", {"Authorization": "Bearer k"})
        assert json.loads(models.body)["data"][0]["id"] == "fake"


# -- how engines fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["refuse", "close", "429", "502", "503"])
def test_another_engine_answers_if_one_does_not_take_a_request(
    pair: tuple[FakeEngine, FakeEngine], failure: str
) -> None:
    pair[0].behave(fail=failure)
    with ProxyProcess(both(pair)) as proxy:
        for _ in range(6):
            answer = ask(proxy, STREAM)
            assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
            assert answer.headers["x-flexcache-worker"] == pair[1].url
        stats = proxy.stats()
        assert (stats["outcomes"], stats["num_retries"]) == ({"done": 6, "refused": 3}, 3)
        assert stats["num_open"] == 0


@pytest.mark.parametrize(
    ("failure", "status"),
    [("refuse", 502), ("close", 502), ("502", 502), ("429", 503), ("503", 503)],
)
def test_at_most_two_other_engines_are_tried(
    pair: tuple[FakeEngine, FakeEngine], failure: str, status: int
) -> None:
    with FakeEngine() as third, FakeEngine() as good:
        for engine in (*pair, third):
            engine.behave(fail=failure, retry_after="7")
        with ProxyProcess([*both(pair), third.url, good.url]) as proxy:
            answer = ask(proxy)
            assert answer.status == answer.error["code"] == status
            assert answer.headers["Retry-After"] == ("7" if failure.isdigit() else None)
            assert answer.headers["x-request-id"]
            assert proxy.stats()["outcomes"] == {"refused": 3}
        assert num_requests(good) == 0


def test_if_no_other_engine_is_left_the_error_is_passed_on(engine: FakeEngine) -> None:
    engine.behave(fail="429", retry_after="7")
    before = num_requests(engine)
    with ProxyProcess([engine.url]) as proxy:
        answer = ask(proxy)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
        assert num_requests(engine) == before + 1
        assert proxy.stats()["num_open"] == 0


def test_an_engine_that_closed_an_idle_connection_is_tried_again(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url]) as proxy:
        assert ask(proxy).status == 200
        engine.behave(fail="close", times=1)  # as if it had closed the connection just now
        assert ask(proxy).status == 200
        stats = proxy.stats()
        assert (stats["outcomes"], stats["num_retries"]) == ({"done": 2, "refused": 1}, 0)


def test_nothing_is_retried_behind_the_budgets_back(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], retry_burst=0) as proxy:
        assert ask(proxy, None, "/x", "GET").status == 200  # leaves a connection to be used again
        before = num_requests(engine)
        engine.behave(fail="close", times=1)
        assert ask(proxy, None, "/x", "GET").status == 502
        assert num_requests(engine) == before + 1


def test_retries_end_with_the_budget(pair: tuple[FakeEngine, FakeEngine]) -> None:
    with FakeEngine() as third:
        for engine in (*pair, third):
            engine.behave(fail="503")
        before = num_requests(*pair, third)
        urls = [*both(pair), third.url]
        with ProxyProcess(urls, retry_burst=3, retry_ratio=0.0) as proxy:
            for _ in range(6):
                assert ask(proxy).status == 503
        assert num_requests(*pair, third) == before + 6 + 3


def test_nothing_is_retried_after_a_byte_of_the_answer(
    pair: tuple[FakeEngine, FakeEngine],
) -> None:
    for engine in pair:
        engine.behave(fail="close_midway")
    before = num_requests(*pair)
    with ProxyProcess(both(pair)) as proxy:
        answer = ask(proxy, STREAM)
        assert answer.status == 200 and answer.broke
        assert b"[DONE]" not in answer.body
        last_event = answer.body.rstrip().rpartition(b"\n\n")[2]
        error = json.loads(last_event.removeprefix(b"data: "))["error"]
        assert error["code"] == 502 and "broke" in error["message"]
        assert proxy.stats()["outcomes"] == {"broken": 1}
    assert num_requests(*pair) == before + 1


def test_an_answer_that_is_not_http_is_an_error(pair: tuple[FakeEngine, FakeEngine]) -> None:
    for engine in pair:
        engine.behave(fail="garbage")
    before = num_requests(*pair)
    with ProxyProcess(both(pair)) as proxy:
        assert ask(proxy).error["code"] == 502
        assert proxy.stats()["outcomes"] == {"broken": 1}
    assert num_requests(*pair) == before + 1


@pytest.mark.parametrize("piece", [b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_an_answer_cut_in_its_header_is_not_retried(engine: FakeEngine, piece: bytes) -> None:
    before = num_requests(engine)
    with engine_that_says(piece) as url, ProxyProcess([url, engine.url]) as proxy:
        assert ask(proxy).status == 502
        assert proxy.stats()["outcomes"] == {"broken": 1}
    assert num_requests(engine) == before


@contextlib.contextmanager
def engine_that_says(piece: bytes) -> Iterator[str]:
    """An engine that answers one request with these bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                read_until(sock, b"}")
                sock.sendall(piece)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_short_answer_cut_in_its_body_is_an_error() -> None:
    piece = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    with engine_that_says(piece) as url, ProxyProcess([url]) as proxy:
        answer = ask(proxy)
        assert (answer.status, answer.broke) == (502, False)
        assert "broke" in answer.error["message"]
        assert answer.headers["x-request-id"]
        assert proxy.stats()["outcomes"] == {"broken": 1}


@pytest.mark.parametrize("failure", ["hang", "hang_midway"])
def test_a_silent_engine_ends_at_the_idle_limit(engine: FakeEngine, failure: str) -> None:
    engine.behave(fail=failure)
    with ProxyProcess([engine.url], engine_idle_s=0.5) as proxy:
        answer = ask(proxy, STREAM)
        assert answer.status == 502 or answer.broke
        assert proxy.stats()["outcomes"] == {"broken": 1}
    until(lambda: engine.stats()["running"] == 0)


def test_an_address_that_does_not_answer_is_given_up(engine: FakeEngine) -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # its queue is full: connecting takes for ever
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with ProxyProcess([url, engine.url], connect_timeout_s=0.5) as proxy:
            assert ask(proxy).status == 200
            assert proxy.stats()["outcomes"] == {"refused": 1, "done": 1}


def test_without_workers_the_answer_is_503() -> None:
    with ProxyProcess([]) as proxy:
        answer = ask(proxy)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert answer.error["message"] == "no worker is up"


# -- how clients leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["hang", "hang_midway"])
def test_the_engine_aborts_when_the_client_leaves(engine: FakeEngine, failure: str) -> None:
    aborted = engine.stats()["aborted"]
    engine.behave(fail=failure)
    with ProxyProcess([engine.url]) as proxy:
        with connect(proxy) as sock:
            sock.sendall(request_bytes())
            until(lambda: engine.stats()["running"] == 1)
        until(lambda: engine.stats()["aborted"] == aborted + 1)
        until(lambda: proxy.stats()["outcomes"] == {"aborted": 1})


def test_nothing_leaks_when_clients_leave_at_any_time(engine: FakeEngine) -> None:
    engine.behave(token_interval_s=0.002)
    message = request_bytes()
    with ProxyProcess([engine.url]) as proxy:
        for number in range(600):
            with connect(proxy) as sock:
                stage = number % 6
                if stage == 0:  # within the request
                    sock.sendall(message[: number % len(message)])
                    continue
                sock.sendall(message)
                if stage > 1:
                    read_until(sock, b"data: ", times=stage - 1)
        until(lambda: proxy.stats()["num_open"] == 0)
        until(lambda: engine.stats()["running"] == 0)
        assert proxy.stats()["outcomes"]["aborted"] > 300
        assert ask(proxy).status == 200


def test_a_client_that_does_not_read_is_left(engine: FakeEngine) -> None:
    engine.behave(token_bytes=100_000)
    with ProxyProcess([engine.url], client_idle_s=1.0) as proxy, connect(proxy) as sock:
        sock.sendall(request_bytes({"prompt": [1], "stream": True, "max_tokens": 1000}))
        until(lambda: proxy.stats()["outcomes"] == {"aborted": 1})
        until(lambda: engine.stats()["running"] == 0)


# -- who may ask, and limits ----------------------------------------------------------------------


def test_clients_need_a_key_and_engines_get_their_own(engine: FakeEngine) -> None:
    key = {"Authorization": "Bearer secret"}
    with ProxyProcess([engine.url], api_keys=["other", "secret"]) as proxy:
        refused = ask(proxy)
        assert refused.status == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
        assert ask(proxy, headers={"Authorization": "Bearer secret2"}).status == 401
        assert not proxy.stats()["arrivals"]
        assert ask(proxy, headers=key).status == 200
        assert ["Authorization", "Bearer secret"] in engine.requests()[-1]["headers"]
        assert ask(proxy, headers={"x-api-key": "other"}).status == 200
    added = {"Authorization": "Bearer engine"}
    with ProxyProcess([engine.url], api_keys=["secret"], headers=added) as proxy:
        assert ask(proxy, headers=key).status == 200
        assert "secret" not in str(engine.requests()[-1]["headers"])
        assert ["Authorization", "Bearer engine"] in engine.requests()[-1]["headers"]


def test_tls(engine: FakeEngine, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    config = {"tls_cert": str(certificate), "tls_key": str(key)}
    with ProxyProcess([engine.url], **config) as proxy:
        answer = ask(proxy, STREAM, context=context)
        assert answer.status == 200 and answer.body.endswith(b"[DONE]\n\n")
        with connect(proxy) as plain:
            plain.sendall(request_bytes())
            assert b"HTTP" not in read_all(plain)


def test_large_bodies_are_refused_before_they_are_read(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], max_body_bytes=10_000) as proxy:
        assert ask(proxy, b"x" * 10_000).status == 200
        assert ask(proxy, b"x" * 10_001).error["code"] == 413
        with connect(proxy) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
            assert b" 413 " in read_until(sock, b"\r\n")
        with connect(proxy) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            sock.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            sock.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            assert b" 413 " in read_until(sock, b"\r\n")
        assert len(proxy.stats()["arrivals"]) == 1


def test_all_bodies_together_are_limited(engine: FakeEngine) -> None:
    engine.behave(fail="hang")
    with ProxyProcess([engine.url], max_held_bytes=10_000) as proxy:
        with connect(proxy) as sock:
            sock.sendall(request_bytes({"prompt": "x" * 6_000}))
            until(lambda: proxy.stats()["num_open"] == 1)
            assert ask(proxy, b"x" * 6_000).error["code"] == 503
        until(lambda: proxy.stats()["num_open"] == 0)
        engine.behave(fail="none")
        assert ask(proxy, b"x" * 6_000).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"".join(b"x-%d: 1\r\n" % number for number in range(200)), b" 400 "),
        (b"x: " + b"y" * 40_000 + b"\r\n", b" 400 "),
        (b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(40)), b" 431 "),
        (b"x-request-id: " + b"y" * 300 + b"\r\n", b" 400 "),
        (b"x-request-id: a b\r\n", b" 400 "),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b" 400 "),
    ],
)
def test_headers_have_limits(engine: FakeEngine, header: bytes, status: bytes) -> None:
    before = num_requests(engine)
    with ProxyProcess([engine.url]) as proxy, connect(proxy) as sock:
        sock.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
        assert status in read_until(sock, b"\r\n")
    assert num_requests(engine) == before


def test_slow_clients_are_left(engine: FakeEngine) -> None:
    limits = {"client_idle_s": 5.0, "body_timeout_s": 5.0}
    with ProxyProcess([engine.url], **limits) as proxy, contextlib.ExitStack() as stack:
        silent, slow_header, slow_body = (stack.enter_context(connect(proxy)) for _ in range(3))
        slow_header.sendall(b"POST / HTTP/1.1\r\nHost")
        slow_body.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx")
        dripping = threading.Thread(target=drip, args=(slow_body,))
        dripping.start()
        assert read_all(silent) == b""
        assert read_all(slow_header) == b""
        assert b" 408 " in read_until(slow_body, b"\r\n")
        slow_body.shutdown(socket.SHUT_RDWR)
        dripping.join()
        assert not proxy.stats()["arrivals"]


def drip(sock: socket.socket) -> None:
    """Send a byte now and then, so that the connection is never idle for long."""
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(b"x")
            threading.Event().wait(0.05)


def test_connections_are_limited(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], max_connections=3) as proxy:
        engine.behave(fail="hang_midway", times=3)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(connect(proxy))
                sock.sendall(request_bytes())
                read_until(sock, b"data: ")
            with connect(proxy) as turned_away:
                assert read_all(turned_away) == b""
        until(lambda: is_served(proxy))


def is_served(proxy: ProxyProcess) -> bool:
    try:
        return ask(proxy).status == 200
    except ConnectionError:
        return False


# -- malformed requests ---------------------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
MALFORMED = {
    "length and chunks": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 50\r\n\r\n" + SMUGGLED,
    "two equal lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "length in hex": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "length with an underscore": POST + b"Content-Length: 1_0\r\n\r\n{}        ",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding after chunked": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding with a control character": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "folded field": POST + b"X-A: 1\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded first field": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "return in a field": POST + b"X-Request-Id: a\rSet-Cookie: b\r\n\r\n",
    "zero in a field": POST + b"X-Request-Id: a\x00b\r\n\r\n",
    "chunk size not a number": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk size too large": POST
    + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "chunk longer than said": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "whole address": b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: x\r\n\r\n",
    "address of another host": b"GET evil.example HTTP/1.1\r\nHost: x\r\n\r\n",
    "tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "fragment": b"GET /x#@evil.example HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /x HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /x HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "odd version": b"GET /x HTTP/9.9\r\nHost: x\r\n\r\n",
    "start of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "start of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "noise": bytes(range(256)) * 40,
    "endless line": b"GET /" + b"x" * 100_000,
}  # fmt: skip


def test_malformed_requests_reach_no_engine_and_do_not_disturb_others(engine: FakeEngine) -> None:
    """Send all of them while another client gets a stream."""
    engine.behave(token_interval_s=0.02)
    length = 300
    content = {"prompt": [1], "stream": True, "max_tokens": length}
    with ProxyProcess([engine.url]) as proxy, connect(proxy) as good:
        good.sendall(request_bytes(content, "Connection: close"))
        received = read_until(good, b"data: ")
        before = num_requests(engine)
        for name, message in MALFORMED.items():
            with connect(proxy) as sock:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(message)
                    sock.shutdown(socket.SHUT_WR)
                answer = read_all(sock)
                assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), name
                assert len(re.findall(rb"HTTP/1\.[01] \d", answer)) <= 1, name
                assert b"\r\nSet-Cookie" not in answer, name
            assert num_requests(engine) == before, name
        received += read_all(good)
        assert received.count(b"data: {") in (length - 1, length)
        assert b"data: [DONE]" in received
        assert proxy.stats()["num_open"] == 0


def test_half_open_connections_do_not_disturb_others(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url]) as proxy, contextlib.ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(connect(proxy))
            sock.sendall(request_bytes(BODY)[: 20 + number])
        check_answers(proxy)


def test_refused_bodies_do_not_disturb_others(engine: FakeEngine) -> None:
    with ProxyProcess([engine.url], max_body_bytes=100_000) as proxy:
        ended = threading.Event()
        senders = [threading.Thread(target=send_large, args=(proxy, ended)) for _ in range(3)]
        for sender in senders:
            sender.start()
        try:
            check_answers(proxy)
        finally:
            ended.set()
            for sender in senders:
                sender.join()


def check_answers(proxy: ProxyProcess) -> None:
    for _ in range(20):
        answer = ask(proxy, STREAM)
        assert answer.status == 200 and answer.body.endswith(b"[DONE]\n\n")
    assert proxy.stats()["outcomes"] == {"done": 20}


def send_large(proxy: ProxyProcess, ended: threading.Event) -> None:
    """Send bodies that are too large, one after the other."""
    message = POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1_000_000
    while not ended.is_set():
        with contextlib.suppress(ConnectionError), connect(proxy) as sock:
            sock.sendall(message)
            assert b" 413 " in read_until(sock, b"}")


# -- stopping, and several processes --------------------------------------------------------------


def test_running_answers_end_before_the_proxy_does(engine: FakeEngine) -> None:
    engine.behave(token_interval_s=0.05)
    with ProxyProcess([engine.url]) as proxy, connect(proxy) as sock, connect(proxy) as idle:
        sock.sendall(request_bytes({"prompt": [1], "stream": True, "max_tokens": 30}))
        read_until(sock, b"data: ")
        proxy.terminate()
        until(lambda: not accepts(proxy))
        assert b"data: [DONE]" in read_all(sock)
        assert read_all(idle) == b""
        assert proxy.process.wait(PATIENCE_S) == 0


def accepts(proxy: ProxyProcess) -> bool:
    try:
        connect(proxy).close()
    except ConnectionError:
        return False
    return True


def test_answers_that_take_too_long_are_cut_when_the_proxy_stops(engine: FakeEngine) -> None:
    engine.behave(fail="hang_midway")
    with ProxyProcess([engine.url], stop_deadline_s=0.5) as proxy, connect(proxy) as sock:
        sock.sendall(request_bytes())
        read_until(sock, b"data: ")
        proxy.terminate()
        assert b"[DONE]" not in read_all(sock)
        assert proxy.process.wait(PATIENCE_S) == 0
    until(lambda: engine.stats()["running"] == 0)


def test_processes_share_a_port(engine: FakeEngine) -> None:
    port = free_port()
    with (
        ProxyProcess([engine.url], port=port, reuse_port=True) as first,
        ProxyProcess([engine.url], port=port, reuse_port=True) as second,
    ):
        proxies = [first, second]
        answered: Callable[[], list[int]] = lambda: [  # noqa: E731
            each.stats()["outcomes"].get("done", 0) for each in proxies
        ]
        while not all(answered()):
            assert ask(first).status == 200
        first.terminate()
        assert first.process.wait(PATIENCE_S) == 0
        assert ask(second).status == 200
