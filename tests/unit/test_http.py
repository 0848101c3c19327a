"""The HTTP service over real sockets and a simulated server."""

from __future__ import annotations

import http.client
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from server_stats import SERVER_STATS

from flexcache.cache.control import Pin
from flexcache.errors import ClosedError, ConfigError, StorageError
from flexcache.server.http import HttpService
from flexcache.stats import Lately, ServerCounters, Stats, UserSession, to_plain
from flexcache.ui import PAGE_HEADERS

TOKEN = "correct horse"
JSON = {"Content-Type": "application/json"}
MORE_THAN_BUFFERS = 64 << 20  # what the sockets of both sides hold


class PlayedServer:
    """A server with one tier, CPU, and three blocks, which records requests."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.prefetched: list[tuple[Any, Any, Any]] = []
        self.named: list[int] = []
        self.looked_up: list[tuple[Any, Any, Any]] = []
        self.pinned: list[tuple[Any, Any, Any, Any, float]] = []
        self.deleted: list[tuple[Any, Any, Any, Any]] = []
        self.hints: list[tuple[str, bool, float | None]] = []
        self.cleared: list[str | None] = []
        self.failure: Exception | None = None
        self.padding = ""
        self.entered = threading.Event()
        self.gate: threading.Event | None = None

    def stats(self) -> Stats:
        if self.failure is not None:
            raise self.failure
        return Stats(
            server=SERVER_STATS,
            counters=ServerCounters(rejected_messages={self.padding: 1}),
            engines={},
        )

    def lately(self) -> Lately:
        return Lately(time=1.5, sessions=[UserSession(session_id="a", prompts=1, blocks=2)])

    def health(self) -> dict[str, Any]:
        return {"serving": True, "missing": self.missing}

    def clear(self, tier: str | None) -> int:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if tier not in (None, "CPU"):
            raise ValueError(f"there is no tier {tier!r}, only CPU")
        self.cleared.append(tier)
        return 3

    def prefetch(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
        block_hash: int | None = None,
    ) -> int:
        if block_hash is None:
            self.prefetched.append((token_ids, block_keys, namespace))
        else:
            self.named.append(block_hash)
        return 2

    def lookup(
        self, token_ids: Any, block_keys: Any, namespace: str | Sequence[str] | None = None
    ) -> dict[str, int]:
        self.looked_up.append((token_ids, block_keys, namespace))
        return {"CPU": 48}

    def pin(
        self, token_ids: Any, block_keys: Any, namespace: Any, session_id: Any, *, ttl_s: float
    ) -> Pin | None:
        self.pinned.append((token_ids, block_keys, namespace, session_id, ttl_s))
        return None if session_id is None else Pin("an id", 48, 1.5)

    def delete(
        self, token_ids: Any, block_keys: Any, namespace: Any, session_id: Any
    ) -> dict[str, int]:
        self.deleted.append((token_ids, block_keys, namespace, session_id))
        return {"CPU": 3}

    def unpin(self, pin_id: str) -> bool:
        return pin_id == "an id"

    def session_hint(
        self, session_id: str, over: bool = False, returns_in_s: float | None = None
    ) -> bool:
        self.hints.append((session_id, over, returns_in_s))
        return session_id == "known"


@contextmanager
def serving(
    server: PlayedServer, endpoint: str = "127.0.0.1:0", token: str | None = None, **more: int
) -> Iterator[HttpService]:
    service = HttpService(server, endpoint, token, **more)
    service.start()
    try:
        yield service
    finally:
        service.close()


@pytest.fixture
def server() -> PlayedServer:
    return PlayedServer()


@pytest.fixture
def service(server: PlayedServer) -> Iterator[HttpService]:
    with serving(server) as service:
        yield service


def ask(
    service: HttpService,
    method: str,
    path: str,
    body: bytes | str | None = None,
    headers: Mapping[str, str] = {},
) -> tuple[int, str, http.client.HTTPMessage]:
    host, port = service.address.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def address_of(service: HttpService) -> tuple[str, int]:
    host, port = service.address.removeprefix("http://").split(":")
    return host, int(port)


def test_an_ipv6_address_is_served(server: PlayedServer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(server, "[::1]:0") as service:
        assert service.address.startswith("http://[::1]:")
        assert ask(service, "GET", "/healthz")[0] == 200


def post(service: HttpService, path: str, content: object) -> tuple[int, Any]:
    status, text, _ = ask(service, "POST", path, json.dumps(content), JSON)
    return status, json.loads(text)


def test_metrics_are_text_or_openmetrics_as_the_scraper_prefers(service: HttpService) -> None:
    status, text, headers = ask(service, "GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'flexcache_build_info{version="1.2"} 1.0' in text.splitlines()
    wanted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    status, text, headers = ask(service, "GET", "/metrics", headers=wanted)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_health_says_what_is_missing(server: PlayedServer, service: HttpService) -> None:
    assert ask(service, "GET", "/healthz")[0] == 200
    server.missing = ["disk worker"]
    status, text, _ = ask(service, "GET", "/healthz")
    assert status == 503
    assert json.loads(text)["missing"] == ["disk worker"]


def test_status_is_the_servers_statistics(server: PlayedServer, service: HttpService) -> None:
    status, text, _ = ask(service, "GET", "/status")
    assert (status, json.loads(text)) == (200, to_plain(server.stats()))


def test_what_happened_lately_is_told_as_json(service: HttpService) -> None:
    status, text, _ = ask(service, "GET", "/lately")
    session = {"session_id": "a", "prompts": 1, "blocks": 2, "is_over": False}
    told = {"time": 1.5, "minutes": [], "sessions": [session], "peers": [], "events": []}
    assert (status, json.loads(text)) == (200, told)


def test_the_page_is_served_with_a_policy_and_asked_for_again_each_time(
    service: HttpService,
) -> None:
    for path in ("/ui/", "/ui/cache.html", "/ui/cache.js", "/ui/ui.js", "/ui/ui.css"):
        status, text, headers = ask(service, "GET", path)
        assert (status, len(text) > 100) == (200, True)
        assert dict(headers).items() >= {k.lower(): v for k, v in PAGE_HEADERS.items()}.items()
    for path in ("/ui/router.js", "/ui/../status", "/ui/a/b", "/ui/ui.js/"):
        assert ask(service, "GET", path)[0] == 404
    assert ask(service, "GET", "/")[2]["location"] == "ui/"
    status, _, headers = ask(service, "GET", "/ui")
    assert (status, headers["Location"]) == (307, "ui/"), "also behind a proxy with a prefix"


@pytest.mark.parametrize("path", ["/metrics", "/status"])
def test_a_server_that_has_stopped_is_503(
    path: str, server: PlayedServer, service: HttpService
) -> None:
    server.failure = ClosedError("the cache was shut down")
    status, text, _ = ask(service, "GET", path)
    assert status == 503
    assert "shut down" in text


def test_a_tier_is_cleared_by_name_and_all_by_null(
    server: PlayedServer, service: HttpService
) -> None:
    assert post(service, "/cache/clear", {"tier": "CPU"}) == (200, {"dropped_blocks": 3})
    assert post(service, "/cache/clear", {"tier": None})[0] == 200
    assert server.cleared == ["CPU", None]


def test_a_failure_in_the_server_is_503_with_its_message(
    server: PlayedServer, service: HttpService
) -> None:
    server.failure = StorageError("its index cannot be written")
    status, answer = post(service, "/cache/clear", {"tier": "CPU"})
    assert (status, answer) == (503, {"error": "its index cannot be written"})


def test_prompts_are_prefetched_by_tokens_or_by_keys(
    server: PlayedServer, service: HttpService
) -> None:
    by_tokens = {"token_ids": [1, 2, 3], "namespace": ["tenant"]}
    assert post(service, "/cache/prefetch", by_tokens) == (202, {"blocks": 2})
    by_keys = {"block_keys": ["00ff", "Ab01"], "namespace": "tenant"}
    assert post(service, "/cache/prefetch", by_keys)[0] == 202
    assert post(service, "/cache/prefetch", {"block_hash": (1 << 64) - 1}) == (202, {"blocks": 2})
    assert server.named == [(1 << 64) - 1]
    assert server.prefetched == [
        ([1, 2, 3], None, ["tenant"]),
        (None, [b"\x00\xff", b"\xab\x01"], "tenant"),
    ]


def test_prompts_are_looked_up_by_tokens_or_by_keys(
    server: PlayedServer, service: HttpService
) -> None:
    by_tokens = {"token_ids": [1, 2, 3], "namespace": ["tenant", "salt"]}
    assert post(service, "/cache/lookup", by_tokens) == (200, {"tokens": {"CPU": 48}})
    by_keys = {"block_keys": ["00ff"], "namespace": "tenant"}
    assert post(service, "/cache/lookup", by_keys)[0] == 200
    assert server.looked_up == [
        ([1, 2, 3], None, ["tenant", "salt"]), (None, [b"\x00\xff"], "tenant"),
    ]  # fmt: skip


def test_prompts_and_sessions_are_pinned_and_unpinned(
    server: PlayedServer, service: HttpService
) -> None:
    pinned = {"pin": {"id": "an id", "num_tokens": 48, "expires_at": 1.5}}
    session = {"session_id": "a", "ttl_s": 300}
    assert post(service, "/cache/pin", session) == (200, pinned)
    by_tokens = {"token_ids": [1, 2], "namespace": ["tenant"], "ttl_s": 2.5}
    assert post(service, "/cache/pin", by_tokens) == (200, {"pin": None})
    assert server.pinned == [(None, None, None, "a", 300), ([1, 2], None, ["tenant"], None, 2.5)]
    assert post(service, "/cache/unpin", {"pin_id": "an id"}) == (200, {"unpinned": True})
    assert post(service, "/cache/unpin", {"pin_id": "other"}) == (200, {"unpinned": False})


def test_prompts_sessions_and_namespaces_are_deleted(
    server: PlayedServer, service: HttpService
) -> None:
    for body in ({"token_ids": [1, 2]}, {"session_id": "a"}, {"namespace": "team"}):
        assert post(service, "/cache/delete", body) == (200, {"deleted_blocks": {"CPU": 3}})
    assert server.deleted == [
        ([1, 2], None, None, None), (None, None, None, "a"), (None, None, "team", None),
    ]  # fmt: skip


def test_hints_about_sessions_are_passed_on(server: PlayedServer, service: HttpService) -> None:
    over = {"session_id": "known", "over": True}
    returns = {"session_id": "other", "returns_in_s": 2.5}
    assert post(service, "/cache/session", over) == (200, {"known": True})
    assert post(service, "/cache/session", returns) == (200, {"known": False})
    assert server.hints == [("known", True, None), ("other", False, 2.5)]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/cache/clear", "{", "truncated"),
        ("/cache/clear", "[]", "object"),
        ("/cache/clear", "{}", "tier"),  # that would be all of them, by a slip
        ("/cache/clear", '{"tier": 1}', "tier"),
        ("/cache/clear", '{"tier": "CPU", "Tier": "SSD"}', "Tier"),
        ("/cache/clear", '{"tier": "SSD"}', "no tier 'SSD'"),
        ("/cache/clear", '{"tier": "\\ud800"}', ""),  # no character
        ("/cache/prefetch", '{"token_ids": [1.5]}', "token_ids"),
        ("/cache/prefetch", '{"token_ids": "abc"}', "token_ids"),
        ("/cache/prefetch", f'{{"token_ids": [1, {2**70}]}}', "$.token_ids[1]"),
        ("/cache/prefetch", '{"token_ids": [-1]}', "int` >= 0 - at `$.token_ids[0]"),
        ("/cache/prefetch", '{"block_keys": ["xy"]}', "block_keys: "),
        ("/cache/prefetch", '{"block_hash": "ab"}', "block_hash"),
        ("/cache/prefetch", "[" * 100_000, ""),
        ("/cache/lookup", '{"token_ids": [0.5]}', "token_ids"),
        ("/cache/lookup", '{"block_keys": ["xy"]}', "block_keys: "),
        ("/cache/lookup", '{"namespace": 1}', "namespace"),
        ("/cache/lookup", '{"token_ids": [1], "ttl_s": 1}', "ttl_s"),
        ("/cache/pin", '{"token_ids": [1]}', "ttl_s"),
        ("/cache/pin", '{"session_id": "a", "ttl_s": "1"}', "ttl_s"),
        ("/cache/unpin", "{}", "pin_id"),
        ("/cache/delete", '{"session": "a"}', "session"),
        ("/cache/session", "{}", "session_id"),
        ("/cache/session", '{"session_id": "a", "over": 1}', "over"),
        ("/cache/session", '{"session_id": "a", "returns_in_s": "20"}', "returns_in_s"),
        ("/cache/session", '{"session_id": "a", "returns_in_s": true}', "returns_in_s"),
        ("/cache/session", '{"session_id": "\\ud800", "over": true}', ""),
    ],
)
def test_a_bad_body_is_400_and_says_what_is_wrong(
    path: str, body: str, names: str, server: PlayedServer, service: HttpService
) -> None:
    status, text, _ = ask(service, "POST", path, body, JSON)
    assert status == 400
    assert names in json.loads(text)["error"]
    assert not server.cleared
    assert not server.prefetched
    assert not server.hints


def test_only_json_is_taken_so_that_no_web_page_can_post(
    server: PlayedServer, service: HttpService
) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        headers = {"Content-Type": kind}
        assert ask(service, "POST", "/cache/clear", '{"tier": null}', headers)[0] == 415
    assert ask(service, "OPTIONS", "/cache/clear")[0] == 405  # a preflight request fails too
    assert not server.cleared


def test_unknown_methods_and_paths_are_refused(service: HttpService) -> None:
    assert ask(service, "GET", "/cache/clear")[0] == 405
    assert ask(service, "POST", "/status", "{}", JSON)[0] == 405
    assert ask(service, "GET", "/none")[0] == 404


@pytest.mark.parametrize("request_line", ["POST /cache/prefetch", "POST /status", "GET /status",
                                          "GET /cache/clear", "GET /none"])  # fmt: skip
def test_an_endless_body_is_not_read(
    request_line: str, server: PlayedServer, service: HttpService
) -> None:
    head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk, taken = b"10000\r\n" + b"1" * 0x10000 + b"\r\n", 0
    with socket.create_connection(address_of(service), 30) as connection:
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):  # it has hung up
            while taken < MORE_THAN_BUFFERS:
                connection.sendall(chunk)
                taken += len(chunk)
    assert taken < MORE_THAN_BUFFERS
    assert not server.prefetched
    assert ask(service, "GET", "/status")[0] == 200


def test_a_body_that_is_too_long_is_413(service: HttpService) -> None:
    head = b"POST /cache/prefetch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address_of(service), 30) as connection:
        connection.sendall(head + b"Content-Length: 1000000000000\r\n\r\n")
        answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert_closed(connection)


def test_a_client_that_leaves_in_the_middle_of_a_body_is_not_logged_as_an_error(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    address = service.address.removeprefix("http://")
    host, port = address.split(":")
    head = (
        f"POST /cache/clear HTTP/1.1\r\nHost: {address}\r\nContent-Length: 99\r\n"
        "Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100")  # the body is waited for now
    service.close()  # waits for what is under way
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_with_a_token_configured_everything_but_health_needs_it(server: PlayedServer) -> None:
    with serving(server, token=TOKEN) as service:
        assert ask(service, "GET", "/healthz")[0] == 200
        for path in ("/", "/ui", "/ui/", "/ui/cache.js"):  # which show nothing
            assert ask(service, "GET", path)[0] in (200, 307)
        assert ask(service, "GET", "/ui/../status")[0] == 404
        for path in ("/metrics", "/status", "/lately", "/cache/clear", "/elsewhere", "/healthz/",
                     "/uis", "//ui/", "/lately?/ui/"):  # fmt: skip
            for given in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong"},
                          {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer "},
                          {"Authorization": "Bearer \xe9"}):  # fmt: skip
                status, _, headers = ask(service, "GET", path, headers=given)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), (path, given)
        for host in ("localhost/healthz?", "localhost/healthz#"):  # no path is read off this
            assert ask(service, "GET", "/metrics", headers={"Host": host})[0] == 401
        for scheme in ("Bearer", "bearer"):
            good = {"Authorization": f"{scheme} {TOKEN}"}
            assert ask(service, "GET", "/metrics", headers=good)[0] == 200


@pytest.mark.parametrize("path", ["/status", "/ui/"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "[",
                                  "10.0.0.1:80"])  # fmt: skip
def test_on_loopback_other_host_names_are_refused(
    host: str, path: str, service: HttpService
) -> None:
    assert ask(service, "GET", path, headers={"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:80", "[::1]:80"])
def test_on_loopback_its_own_host_names_are_accepted(host: str, service: HttpService) -> None:
    assert ask(service, "GET", "/status", headers={"Host": host})[0] == 200


def test_beyond_loopback_any_host_name_is_accepted_but_a_token_is_required(
    server: PlayedServer,
) -> None:
    with pytest.raises(ConfigError, match="http_token"):
        HttpService(server, "0.0.0.0:0")
    with serving(server, "0.0.0.0:0", TOKEN) as service:
        headers = {"Host": "cache-7.cluster.local", "Authorization": f"Bearer {TOKEN}"}
        assert ask(service, "GET", "/status", headers=headers)[0] == 200
        assert ask(service, "GET", "/status", headers={"Host": "cache-7.cluster.local"})[0] == 401


CLEAR = (
    b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Authorization: Bearer correct horse\r\nContent-Length: 14\r\n\r\n{"tier": null}'
)


def ask_as(uid: int, service: HttpService, requests: Sequence[bytes], waits: bool) -> list[int]:
    """Have another user send requests, each on a connection of its own; return the statuses."""

    "localhost".encode("idna")  # loads what the other user may have no access to

    def run(statuses: Connection) -> None:
        os.setgid(uid)
        os.setuid(uid)
        for request in requests:
            with socket.create_connection(address_of(service), 30) as connection:
                connection.sendall(request)
                if waits:
                    statuses.send(int(connection.recv(100).split()[1]))

    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return [ours.recv() for _ in requests] if waits else []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_on_loopback_other_users_need_the_token_whether_they_stay_or_not(
    server: PlayedServer, service: HttpService
) -> None:
    ask_as(65_534, service, [CLEAR] * 20, waits=False)
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert ask_as(65_534, service, [CLEAR, status, health], waits=True) == [403, 403, 200]
    shown = [f"GET {p} HTTP/1.1\r\nHost: localhost\r\n\r\n" for p in ("/ui/", "/lately")]
    others = [each.encode() for each in shown]
    assert ask_as(65_534, service, others, waits=True) == [403, 403]
    assert server.cleared == []
    assert post(service, "/cache/clear", {"tier": None})[0] == 200
    with serving(server, token=TOKEN) as guarded:
        assert ask_as(65_534, guarded, [CLEAR], waits=True) == [200]


def test_an_address_that_is_taken_is_refused_by_name(server: PlayedServer) -> None:
    with serving(server) as service:
        endpoint = service.address.removeprefix("http://")
        with pytest.raises(ConfigError, match=f"http_endpoint = '{endpoint}'"):
            HttpService(server, endpoint).start()
    with pytest.raises(ConfigError, match="http_endpoint"):
        HttpService(server, "nowhere.invalid:80", TOKEN).start()


def test_a_bare_port_is_on_loopback(server: PlayedServer) -> None:
    with serving(server, "0") as service:
        assert service.address.startswith("http://127.0.0.1:")
        assert ask(service, "GET", "/healthz")[0] == 200


def test_a_slow_call_does_not_keep_others_waiting(
    server: PlayedServer, service: HttpService
) -> None:
    server.gate = threading.Event()
    clearing = threading.Thread(target=post, args=(service, "/cache/clear", {"tier": "CPU"}))
    clearing.start()
    assert server.entered.wait(60)
    assert ask(service, "GET", "/healthz")[0] == 200
    assert ask(service, "GET", "/metrics")[0] == 200
    server.gate.set()
    clearing.join()
    assert server.cleared == ["CPU"]


def test_closing_leaves_neither_thread_nor_port(server: PlayedServer) -> None:
    before = set(threading.enumerate())
    service = HttpService(server, "127.0.0.1:0")
    service.start()
    idle = http.client.HTTPConnection(*service.address.removeprefix("http://").split(":"))
    idle.request("GET", "/healthz")
    idle.getresponse().read()  # kept alive
    service.close()
    service.close()
    idle.close()
    assert {t for t in threading.enumerate() if "flexcache" in t.name} <= before
    again = HttpService(server, service.address.removeprefix("http://"))
    again.start()
    again.close()


# -- clients that keep the service waiting --------------------------------------------------------

SERVE = """
import logging, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from test_http import HttpService, PlayedServer
service = HttpService(PlayedServer(), "127.0.0.1:0", "correct horse", patience_s=2)
service.start()
print(os.getpid(), service.address, flush=True)
sys.stdin.read()
service.close()
"""


def assert_closed(connection: socket.socket) -> None:
    """Check that the other side closed the connection, with nothing left to read."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionResetError:
        pass


def num_files(pid: str) -> int:
    """Return the number of files that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answers(service: HttpService, path: str) -> bool:
    """Return whether it answers: a connection beyond the limit is closed unread."""
    try:
        return ask(service, "GET", path, headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    except (ConnectionError, http.client.HTTPException):
        return False


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip(f"no more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_idle_connections_keep_others_out_no_longer_than_the_deadline() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        pid, address = process.stdout.readline().split()
        service = HttpService(PlayedServer(), address.removeprefix("http://"))
        until(lambda: answers(service, "/healthz"))  # what is loaded once is loaded
        before, most = num_files(pid), 0
        for _ in range(1300):
            stack.enter_context(socket.create_connection(address_of(service), 30))
            most = max(most, num_files(pid))
        for path in ("/healthz", "/metrics", "/status"):
            until(lambda path=path: answers(service, path))
        assert most <= before + 64 + 1
        until(lambda: num_files(pid) <= before)
        _, log = process.communicate("")
    assert process.returncode == 0
    assert "Traceback" not in log
    assert len(log.splitlines()) < 50


@pytest.mark.parametrize("sent", [
    b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
])  # fmt: skip
def test_a_client_that_trickles_its_request_head_is_cut_off(
    sent: bytes, server: PlayedServer
) -> None:
    with serving(server, patience_s=1) as service:
        with socket.create_connection(address_of(service), 30) as connection:
            connection.sendall(sent)
            gone = threading.Event()

            def send_pieces() -> None:
                try:
                    while not gone.wait(0.05):
                        connection.sendall(b"X: 1\r\n" if sent else b"")
                except OSError:
                    pass

            sender = threading.Thread(target=send_pieces)
            sender.start()
            assert_closed(connection)
            gone.set()
            sender.join()
        assert ask(service, "GET", "/healthz")[0] == 200


def test_a_body_that_never_arrives_is_408(server: PlayedServer) -> None:
    head = b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        serving(server, patience_s=1) as service,
        socket.create_connection(address_of(service), 30) as connection,
    ):
        connection.sendall(head + b"Content-Length: 20\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert_closed(connection)


def test_a_client_that_does_not_read_its_response_is_cut_off(server: PlayedServer) -> None:
    server.padding = "x" * (32 << 20)
    with serving(server, patience_s=1) as service:
        assert ask(service, "GET", "/healthz")[0] == 200
        before = num_files("self")
        with socket.create_connection(address_of(service), 30) as connection:
            connection.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1)  # it has been accepted
            until(lambda: num_files("self") == before + 1)  # this one's end


def test_a_call_may_take_longer_than_a_client_may(server: PlayedServer) -> None:
    server.gate = threading.Event()
    with serving(server, patience_s=1) as service:
        threading.Timer(2.5, server.gate.set).start()
        assert post(service, "/cache/clear", {"tier": "CPU"}) == (200, {"dropped_blocks": 3})


def test_without_free_file_descriptors_clients_wait_and_one_line_is_logged(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(service, "GET", "/healthz")[0] == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            client.connect(address_of(service))
            until(lambda: caplog.records)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(60)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert len(caplog.records) == 1
    assert "http_accept_failed" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    code = """
import sys
import flexcache, flexcache.server.server
from flexcache.errors import MissingDependencyError
for package in ("prometheus_client", "starlette", "uvicorn"):
    sys.modules[package] = None
    try:
        import flexcache.server.http
    except MissingDependencyError as error:
        print(error)
    del sys.modules[package]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for line, package in zip(lines, ("prometheus-client", "starlette", "uvicorn"), strict=True):
        assert f"the package {package}" in line
        assert ".[http]" in line
