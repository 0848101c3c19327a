"""The address of a server, and the engine that it was handed out for.

    ipc:///run/user/1000/flexcache-1000/1f0c.sock#engine=4242-9a7e51d0

`KVManager.endpoint` names its engine this way, so that a rank that connects to it belongs to that
engine and to no other. Whatever needs only the server takes the part before the mark.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

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
