"""A bucket that does not exist is an error of the operator, not a store without objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("obstore")

from flexcache.doctor.endpoints import check_remote_store
from flexcache.doctor.subject import Subject
from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import RemoteStore, Status, StoreUnavailableError

NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>none of that name</Message></Error>"
QUOTING = (
    b"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>AWS4-HMAC-SHA256 x-amz-date "
    b"signed-headers-of-ours</StringToSign><SignatureProvided>0a1b2c</SignatureProvided></Error>"
)
NO_KEY = b"<Error><Code>NoSuchKey</Code><Message>none of that name</Message></Error>"


class PlayedBucket(BaseHTTPRequestHandler):
    """An empty bucket, while its server says that there is one."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_GET(self) -> None:
        exists = self.server.has_bucket  # type: ignore[attr-defined]
        self._answer(404, NO_KEY if exists else NO_BUCKET)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.is_distrustful:  # type: ignore[attr-defined]
            self._answer(403, QUOTING)
            return
        exists = self.server.has_bucket  # type: ignore[attr-defined]
        self._answer(200, b"") if exists else self._answer(404, NO_BUCKET)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlayedBucket)
    server.has_bucket = server.is_distrustful = False  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"s3://bucket/x?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"


@pytest.fixture
def store(server: ThreadingHTTPServer) -> Iterator[RemoteStore]:
    server.has_bucket = True  # type: ignore[attr-defined]
    store = open_remote_store(url_of(server), timeout_s=60)
    yield store
    store.close()


def soon() -> float:
    return time.monotonic() + 60


def test_look_ups_and_stores_say_so_as_long_as_it_lasts(
    server: ThreadingHTTPServer, store: RemoteStore
) -> None:
    def put() -> str | None:
        [outcome] = store.write_from(["a"], [[memoryview(b"abc")]], soon())
        return None if outcome.status is Status.OK else outcome.reason

    server.has_bucket = False  # type: ignore[attr-defined]
    assert "bucket" in str(put())
    for _ in range(2):
        for _ in range(2):
            found = store.count_present(["a", "b"], soon())
            assert found.num_present == 0 and "bucket" in str(found.error)
            assert "bucket" in str(put())
        server.has_bucket = True  # type: ignore[attr-defined]
        assert store.count_present(["a", "b"], soon()).error is None
        assert put() is None
        server.has_bucket = False  # type: ignore[attr-defined]
        assert "bucket" in str(put())


def test_a_store_without_its_bucket_is_not_open(server: ThreadingHTTPServer) -> None:
    with pytest.raises(StoreUnavailableError, match="bucket or container does not exist"):
        open_remote_store(url_of(server), timeout_s=60)


def test_the_doctor_names_it(server: ThreadingHTTPServer) -> None:
    environ = {"FLEXCACHE_NUM_CPU_BLOCKS": "4", "FLEXCACHE_REMOTE_URL": url_of(server)}
    [finding] = check_remote_store(Subject(environ=environ))
    assert "bucket or container does not exist" in finding.text


def test_a_reason_does_not_quote_our_signed_request(
    server: ThreadingHTTPServer, store: RemoteStore
) -> None:
    server.is_distrustful = True  # type: ignore[attr-defined]
    [outcome] = store.write_from(["a"], [[memoryview(b"abc")]], soon())
    assert outcome.reason is not None and "SignatureDoesNotMatch" in outcome.reason
    assert "signed-headers" not in outcome.reason and "0a1b2c" not in outcome.reason
    assert len(outcome.reason) < 400
