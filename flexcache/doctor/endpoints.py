"""Addresses to serve and to publish at: free, or served by who should."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from flexcache.config.address import check_http_endpoint
from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.subject import Subject
from flexcache.errors import ConfigError
from flexcache.events.batch_publisher import is_bound
from flexcache.protocol.runtime import check_endpoint
from flexcache.protocol.trust import find_listener

_CONNECT_TIMEOUT_S = 1.0


def check_server_endpoint(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    try:
        endpoint = subject.endpoint
        has_keys = config is not None and config.curve_keys is not None
        check_endpoint(endpoint, has_keys)
        find_listener(endpoint, has_keys)
    except ConfigError as problem:
        yield error(str(problem), "set another endpoint, or mend the directory")
        return
    server = subject.server
    if server is not None:
        pid, num_engines = server.server.server_pid, len(server.engines)
        yield ok(f"{endpoint}: served by process {pid}, {num_engines} engines")
    elif subject.is_served:
        yield error(
            f"{endpoint}: a server holds it and does not answer",
            "its log says why; end its process, engines start another or reconnect",
        )
    elif config is None or config.endpoint is None:
        yield ok("no endpoint is set: an engine keeps its cache to itself")
    else:
        yield _judge_bind(endpoint, _bind_problem(endpoint), subject)


def check_http(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.http_endpoint is None:
        return
    host, port = check_http_endpoint(config.http_endpoint, config.http_token is not None)
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    yield _judge_bind(f"http_endpoint {host}:{port}", _bind_problem(address), subject)


def check_event_endpoints(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None:
        return
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(config, name)
        if address is None:
            continue
        if is_bound(address):
            yield _judge_bind(f"{name} {address}", _bind_problem(address), subject)
        else:
            yield _judge_connection(name, address)


def _judge_bind(what: str, code: int, subject: Subject) -> Finding:
    if code == 0:
        return ok(f"{what}: free")
    if code == errno.EADDRINUSE and subject.server is not None:
        return ok(f"{what}: in use, as it is to be while the server runs")
    if code == errno.EADDRINUSE:
        return error(
            f"{what}: in use by another process",
            "name another port, or end who has it (`ss -ltnp` says)",
        )
    remedies = {
        errno.EACCES: "name a port from 1024 on, or a socket in a directory that is yours",
        errno.ENOENT: "make the socket's directory, or name another",
    }
    remedy = remedies.get(code, "name an address of this host")
    return error(f"{what}: {os.strerror(code)}", remedy)


def _judge_connection(name: str, address: str) -> Finding:
    host, port = _host_and_port(address)
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError as failure:
        return warning(
            f"{name} {address}: connections are refused ({failure.strerror or failure})",
            "start the one that is to be connected to, or publish at tcp://*:PORT",
        )
    return ok(f"{name} {address}: takes connections")


def _bind_problem(address: str) -> int:
    """0 where the address can be bound, else the errno."""
    if address.startswith("ipc://"):
        parent = Path(address.removeprefix("ipc://")).parent
        if not parent.is_dir():
            return errno.ENOENT
        return 0 if os.access(parent, os.W_OK | os.X_OK) else errno.EACCES
    host, port = _host_and_port(address)
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as failure:
        return failure.errno or errno.EIO
    return 0


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.partition("://")[2].rpartition(":")
    host = host.strip("[]").replace("*", "")
    return host, int(port) if port.isdecimal() else 0
