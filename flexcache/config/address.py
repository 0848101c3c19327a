"""Addresses: a server's, with the engine that it was handed out for, and an HTTP endpoint.

    ipc:///run/user/1000/flexcache-1000/1f0c.sock#engine=4242-9a7e51d0

`KVManager.endpoint` names its engine this way, so that a rank that connects to it belongs to that
engine and to no other. Whatever needs only the server takes the part before the mark.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import quote, unquote

from flexcache.config.values import reject

_MARK = "#engine="
_TCP = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]{1,5})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MAX_PORT = 65_535


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


def split_tcp(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``; an IPv6 address without its brackets.

    Every check of such an endpoint uses this. ZMQ goes to THERE for
    ``tcp://HERE:1;THERE:2``, whose host other parsers take for HERE.

    Raises:
        ValueError: It is anything else.
    """
    found = _TCP.fullmatch(endpoint)
    host = "" if found is None else (found[1] or found[2]).lower()
    if found is None or not is_host(host) or int(found[3]) > _MAX_PORT:
        raise ValueError("must be tcp://HOST:PORT")
    if (found[1] is not None) != (":" in host):
        raise ValueError("must be tcp://HOST:PORT with an address of IPv6 in brackets")
    return host, int(found[3])


def is_host(text: str) -> bool:
    """Return whether a text is a name, an address, or ``*``, to every parser."""
    if text == "*" or _NAME.fullmatch(text):
        return True
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


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
