"""Limits on the connections of an HTTP service: their number, and how long each may idle.

Opening a connection needs no token. uvicorn alone accepts any number of connections, waits forever
for the head of a request, and reads the body of an answered request to its end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexcache.logs import log_event

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_ACCEPT_PAUSE_S = 1.0  # after an error, such as no free file descriptor


class HttpConnection(H11Protocol):
    """A connection that is closed unless its client sends complete requests and reads the answers.

    The head of a request must arrive within ``timeout_keep_alive`` seconds of the connection or the
    last answer, and that answer must have been read by then. Time spent handling a request does
    not count; the handler limits how long it waits for a body.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # the handler did not read the rest of the body
            self.transport.close()
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._expire)

    def _expire(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:  # the handler is running
            self._set_deadline()
        else:
            self.transport.abort()  # closing would wait until the client has read the answer


async def accept_connections(listener: socket.socket, server: uvicorn.Server) -> None:
    """Accept clients of ``server`` until cancelled; close those beyond `MAX_CONNECTIONS` unread.

    Args:
        listener: A listening socket that does not block.
    """
    loop = asyncio.get_running_loop()
    state = server.server_state

    def make_connection() -> HttpConnection:
        app_state: dict[str, Any] = {"found": {}}  # what is known of it, for all its requests
        return HttpConnection(server.config, state, app_state, loop)

    is_failing = False
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:
            if not is_failing:
                log_event(logger, logging.ERROR, "http_accept_failed", error=error.strerror,
                          effect="new connections wait")  # fmt: skip
            is_failing = True
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        is_failing = False
        if server.should_exit or len(state.connections) >= MAX_CONNECTIONS:
            client.close()
            await asyncio.sleep(0)  # accepting does not yield if clients are already waiting
        else:
            await loop.connect_accepted_socket(make_connection, client)
