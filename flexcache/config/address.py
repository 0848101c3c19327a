"""Addresses: a server's, with the engine that it was handed out for, and an HTTP endpoint.

    ipc:///run/user/1000/flexcache-1000/1f0c.sock#engine=4242-9a7e51d0

`KVManager.endpoint` names its engine this way, so that a rank that connects to it belongs to that
engine and to no other. Whatever needs only the server takes the part before the mark.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import quote, unquote

from flexcache.config.values import reject

_MARK = "#engine="


def with_engine(endpoint: str, engine_id: str) -> str:
    """The address to hand out to the ranks of an engine; the bare one for an engine without id."""
    return f"{endpoint}{_MARK}{quote(engine_id, safe='')}" if engine_id else endpoint


def server_of(address: str) -> str:
    """The endpoint of the server alone."""
    return address.partition(_MARK)[0]


def split_address(address: str, engine_id: str) -> tuple[str, str]:
    """Endpoint of the server, and the engine: ``engine_id``, or else the one it was made for."""
    endpoint, _, quoted = address.partition(_MARK)
    return endpoint, engine_id or unquote(quoted)


def check_http_endpoint(endpoint: str, has_token: bool) -> tuple[str, int]:
    """Host and port; a bare port is on loopback.

    Raises:
        ConfigError: It is malformed, or open to other hosts without a token.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise reject("http_endpoint", endpoint, "must be HOST:PORT, or a port on loopback")
    if not is_loopback(host) and not has_token:
        raise reject("http_endpoint", endpoint, "beyond loopback http_token must be set")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, for this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
