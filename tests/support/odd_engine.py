"""An engine in the test's process that answers whatever a test wants.

    with OddEngine({"/metrics": Answer(b"...")}) as engine, RouterProcess(worker=engine.url):
        engine.answers["/health"] = Answer(status=503)

It accepts a connection only while `accepts` is set; those that it has are served on.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE = b" " * (64 << 10)


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        padding: Bytes sent after the body, piece by piece, until the peer closes.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    padding: int = 0


def as_json(content: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(content).encode(), status, {"Content-Type": "application/json"})


def models(*names: str, **fields: Any) -> Answer:
    """Return a list of models."""
    cards = [{"id": name, "object": "model", "owned_by": "test", **fields} for name in names]
    return as_json({"object": "list", "data": cards})


Answering = Answer | Callable[[str, str, bytes], Answer]
"""A function is given method, target and body."""


class OddEngine:
    """
    Args:
        answers: By path; of others a path's beginning counts, the longest. What none is for gets a
            completion of one token.
        backlog: Connections that wait to be accepted.

    Attributes:
        seen: Requests that came, by method and path.
        sent: Padding that was sent, by path.
    """

    def __init__(self, answers: Mapping[str, Answering] | None = None, backlog: int = 128) -> None:
        self.answers: dict[str, Answering] = {
            "/health": Answer(),
            "/v1/models": models("odd"),
            "/metrics": Answer(),
            **(answers or {}),
        }
        self.seen: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.accepts = threading.Event()
        self.accepts.set()
        engine = self

        class Server(ThreadingHTTPServer):
            request_queue_size = backlog
            daemon_threads = True
            block_on_close = False

            def get_request(self) -> tuple[Any, Any]:
                engine.accepts.wait()
                return super().get_request()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine._serve(self)

            do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OddEngine:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.accepts.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        path = handler.path.partition("?")[0]
        self.seen[f"{handler.command} {path}"] += 1
        found = max((key for key in self.answers if path.startswith(key)), key=len, default=None)
        answering = _completion() if found is None else self.answers[found]
        if callable(answering):
            answering = answering(handler.command, handler.path, body)
        handler.send_response(answering.status)
        for name, value in answering.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answering.body) + answering.padding))
        handler.end_headers()
        handler.wfile.write(answering.body)
        try:
            for _ in range(0, answering.padding, len(_PIECE)):
                handler.wfile.write(_PIECE)
                self.sent[path] += len(_PIECE)
        except OSError:
            handler.close_connection = True


def _completion() -> Answer:
    return as_json({"object": "text_completion", "choices": [{"index": 0, "text": "x"}]})
