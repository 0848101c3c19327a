"""Serves a router's live page, with statistics and decisions that a test hands in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

from flexcache.router.chooser import RouterEvent, to_server_sent
from flexcache.router.stats import RouterStats, to_json
from flexcache.ui import read_page


@dataclass
class ControlPages:
    """What is served.

    Attributes:
        token: If set, statistics and decisions require it.
        events: Sent to the first reader of decisions.
    """

    stats: RouterStats
    token: str | None = None
    events: SimpleQueue[RouterEvent] = field(default_factory=SimpleQueue)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(pages: ControlPages) -> Iterator[ControlPages]:
    """Serve until the block ends."""
    stopping = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/ui/"):
                try:
                    content, headers = read_page("router", self.path.removeprefix("/ui/"))
                except KeyError:
                    self.send_error(404)
                else:
                    self._answer(content, headers)
            elif pages.token and self.headers["Authorization"] != f"Bearer {pages.token}":
                self.send_error(401)
            elif self.path == "/stats":
                self._answer(to_json(pages.stats), {"Content-Type": "application/json"})
            elif self.path == "/decisions":
                self._follow()
            else:
                self.send_error(404)

        def _answer(self, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _follow(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            while not stopping.is_set():
                try:
                    self.wfile.write(to_server_sent(pages.events.get(timeout=0.05)))
                except Empty:
                    continue
                except OSError:
                    return

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    pages.port = server.server_address[1]
    try:
        yield pages
    finally:
        stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
