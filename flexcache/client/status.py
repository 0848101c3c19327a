"""Reads a server's statistics without being one of its engines."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from flexcache.client.link import ServerLink
from flexcache.config.values import server_of
from flexcache.errors import ServerLostError
from flexcache.protocol.messages import Answer, GetStats
from flexcache.protocol.trust import find_listener


def read_status(address: str, curve_keys: str | None, timeout_s: float) -> dict[str, Any]:
    """`KVManager.stats` of the server as a whole.

    Raises:
        ServerLostError: No server is there, or it does not answer within ``timeout_s``.
        UntrustedError: Another user serves the endpoint, or could.
    """
    endpoint = server_of(address)
    link = ServerLink(endpoint, curve_keys, timeout_s)
    has_keys = curve_keys is not None
    try:
        listener = find_listener(endpoint, has_keys)
        if listener is None:
            raise ServerLostError(f"{endpoint}: no server is there")
        with link.connect(uuid.uuid4().hex.encode(), immediate=False) as socket:
            socket.linger = 0
            socket.send(msgspec.msgpack.encode(GetStats(1)))
            if not socket.poll(int(timeout_s * 1000)):
                raise ServerLostError(f"{endpoint}: no answer within {timeout_s:g} s")
            if find_listener(endpoint, has_keys) != listener:
                raise ServerLostError(f"{endpoint}: another server has taken its place")
            report: dict[str, Any] = msgspec.msgpack.decode(socket.recv(), type=Answer).value
            return report
    finally:
        link.close()
