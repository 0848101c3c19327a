"""Values of settings: how one is declared, parsed and refused, and what an address means."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from flexcache.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Patience = Annotated[float, Meta(gt=0, le=1e9)]
"""Seconds after which a peer is given up, in any case."""
Megabytes = Annotated[float, Meta(gt=0, le=1e12)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e9)]
"""At most an exabyte: a larger number is a typing error."""
Retention = Annotated[float, Meta(ge=0.1, le=1e9)]
"""Seconds: long enough for sweeps between, and at most a lifetime."""

_SEVERAL = re.compile(r"[,;\s]\s*[/~]")
_MARK = "#engine="
_TCP = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]{1,5})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_PORT = 65_535
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def setting(
    default: Any,
    help: str,
    unit: str = "",
    *,
    is_secret: bool = False,
    read: Callable[[str, Any], Any] | None = None,
) -> Any:
    """Declare a field of a config.

    Args:
        is_secret: Its value is never shown.
        read: Makes the value of what is given, from the field's name and that; None: `parse`.
    """
    metadata = {"help": help, "unit": unit, "is_secret": is_secret, "read": read}
    return field(default=default, metadata=metadata)


def read_fields(config: Any, hints: Mapping[str, Any]) -> None:
    """Convert the fields of a config that is being constructed.

    Raises:
        ConfigError: One does not admit its value.
    """
    for spec in fields(config):
        value, read = getattr(config, spec.name), spec.metadata["read"]
        if read is None:
            is_secret = spec.metadata["is_secret"]
            value = parse(spec.name, value, hints[spec.name], is_secret=is_secret)
        elif value is not None or type(None) not in _members(hints[spec.name]):
            value = read(spec.name, value)
        object.__setattr__(config, spec.name, value)


def reject(name: str, value: object, allowed: str) -> ConfigError:
    error = ConfigError(f"{name} = {value!r}: {allowed}")
    error.setting = name
    return error


def parse(name: str, value: Any, hint: Any, *, is_secret: bool = False) -> Any:
    """Convert a value to its field's type; text from the environment is parsed.

    Raises:
        ConfigError: The type or its bounds do not admit the value.
    """
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        shown = "..." if is_secret else _as_read(value, hint)
        raise reject(name, shown, f"must be {_allowed(hint)}") from None


def _as_read(value: Any, hint: Any) -> Any:
    """Convert a refused value to its field's type without the bounds, if that admits it: a number
    reads the same from the environment as from a file."""
    kind = next((kind for kind in _members(hint) if get_origin(kind) is Annotated), None)
    if kind is None:
        return value
    try:
        return msgspec.convert(value, get_args(kind)[0], strict=not isinstance(value, str))
    except msgspec.ValidationError:
        return value


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _allowed(hint: Any) -> str:
    """Describe the values that a type admits."""
    hint = _members(hint)[0]  # the other, if any, is None
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is not Annotated:
        return _KINDS[hint]
    kind, meta = get_args(hint)
    bounds = ((meta.ge, "at least"), (meta.gt, "greater than"), (meta.le, "at most"))
    texts = [f"{words} {bound:g}" for bound, words in bounds if bound is not None]
    return f"{_KINDS[kind]} of {' and '.join(texts)}".replace("of greater", "greater")


def read_path(name: str, value: object) -> str:
    """Return an absolute path, with ``~`` expanded.

    A path that depends on a working directory is refused: a service's is not its user's, and in a
    container it is often the node's root disk.

    Raises:
        ConfigError: It is relative, or looks like several paths, or like one to be expanded.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise reject(name, value, "must be text, an absolute path")
    path = os.path.expanduser(text) if text.startswith("~") else text
    if "$" in path:
        raise reject(name, text, "must be an absolute path without variables: none are expanded")
    if not os.path.isabs(path) or path != path.strip() or min(path) < " ":
        hint = "must be an absolute path, as /nvme0/kv or ~/kv, without quotes and spaces around it"
        raise reject(name, text, hint)
    if _SEVERAL.search(path):
        raise reject(name, text, "must be one absolute path, but looks like several")
    return str(Path(path))


def read_paths(name: str, value: object) -> tuple[str, ...]:
    """Return directories, each once. Text lists them with ``:`` between.

    Raises:
        ConfigError: One is no absolute path, or named twice.
    """
    items = value.split(":") if isinstance(value, str) else value
    if isinstance(items, bytes) or not isinstance(items, Sequence):
        raise reject(name, value, "must be a list of directories")
    if "" in items:
        raise reject(name, value, "names an empty directory")
    paths = tuple(read_path(name, item) for item in items)
    if len({_identity(path) for path in paths}) != len(paths):
        raise reject(name, paths, "names a directory twice")
    return paths


def read_peers(name: str, value: object) -> tuple[str, ...]:
    """Return the addresses of other hosts' caches, each once. Text lists them with ``,`` between.

    Raises:
        ConfigError: One is neither ``tcp://HOST:PORT`` nor ``dns://NAME:PORT``.
    """
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, bytes) or not isinstance(items, Sequence):
        raise reject(name, value, "must be a list of addresses")
    peers = dict.fromkeys(parse(name, item, str).strip() for item in items)
    for peer in peers:
        scheme, _, rest = peer.partition("://")
        try:
            host, port = split_tcp(f"tcp://{rest}")
        except ValueError:
            host, port = "*", 0
        if scheme not in ("tcp", "dns") or host == "*" or port == 0:
            raise reject(name, peer, "must be tcp://HOST:PORT or dns://NAME:PORT")
    return tuple(peers)


def read_transport(name: str, value: object) -> str:
    """Return how blocks move between hosts.

    Raises:
        ConfigError: It is not ``tcp``, ``rdma`` or ``rdma:DEVICE,...``.
    """
    text: str = parse(name, value, str)
    if not re.fullmatch(r"tcp|rdma(:\w+(,\w+)*)?", text):
        raise reject(name, text, "must be tcp, rdma or rdma:DEVICE,...")
    return text


def _identity(path: str) -> object:
    """Return what two paths of one directory have in common, also behind links and mounts."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def read_endpoint(name: str, value: object) -> str:
    """Return an address, whose path, if it is ``ipc://``, is absolute.

    Raises:
        ConfigError: It is not.
    """
    address: str = parse(name, value, str)
    if not address.startswith("ipc://"):
        return address
    try:
        return f"ipc://{read_path(name, address.removeprefix('ipc://'))}"
    except ConfigError:
        raise reject(name, address, "must be ipc:// and an absolute path") from None


def check_writable(name: str, directory: str) -> None:
    """Require that a directory is writable, or can be made in one that is.

    Raises:
        ConfigError: It is not.
    """
    existing = Path(directory).absolute()
    while not os.access(existing, os.F_OK) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise reject(name, directory, f"{existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise reject(name, directory, f"{existing} must be writable")


# -- addresses -----------------------------------------------------------------------------------
#
#     ipc:///run/user/1000/flexcache-1000/1f0c.sock#engine=4242-9a7e51d0
#
# `KVManager.endpoint` names its engine this way, so that a rank that connects to it belongs to that
# engine and to no other. Whatever needs only the server takes the part before the mark.


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
    if found is None or not is_host(host) or int(found[3]) > MAX_PORT:
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
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise reject("http_endpoint", endpoint, "must be HOST:PORT, or a port on loopback")
    if not is_loopback(host) and not has_token:
        raise reject("http_endpoint", endpoint, "beyond loopback http_token must be set")
    return host, int(port)


def is_address(host: str) -> bool:
    """Whether a host is given by its address, which needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, for this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
