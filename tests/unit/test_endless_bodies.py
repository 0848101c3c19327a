"""A store's answer that does not end costs no more memory than the object that is expected."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("obstore")

from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import Status

SIZE = 5000
PIECE = bytes(64 << 10)
MOST = 16 << 20  # what sockets and the client hold
TOO_MUCH = 256 << 20


class Endless(BaseHTTPRequestHandler):
    """Says that an object has `SIZE` bytes, and sends more and more of them."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Length": str(SIZE), "Transfer-Encoding": "chunked", "ETag": '"e"',
            "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.server.num_sent = 0  # type: ignore[attr-defined]
        try:
            while self.server.num_sent < TOO_MUCH:  # type: ignore[attr-defined]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
                self.server.num_sent += len(PIECE)  # type: ignore[attr-defined]
        except OSError:
            self.close_connection = True
        self.server.is_over.set()  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def endless() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    server.is_over = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_more_is_read_of_an_object_than_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with endless() as server:
        url = f"s3://bucket/x?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"
        store = open_remote_store(url, timeout_s=60)
        room = memoryview(bytearray(SIZE))
        [outcome] = store.read_into(["name"], [[room]], time.monotonic() + 60)
        store.close()
        assert server.is_over.wait(60)  # type: ignore[attr-defined]
        assert server.num_sent <= MOST  # type: ignore[attr-defined]
        assert outcome.status in (Status.TOO_LARGE, Status.FAILED)
