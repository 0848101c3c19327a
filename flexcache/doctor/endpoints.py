"""Endpoints to serve and publish at, which must be free or held by a server; the remote store."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from flexcache.config.remote_url import check_remote_url, store_kind
from flexcache.config.values import check_http_endpoint
from flexcache.doctor.subject import Finding, Subject, error, ok, warning
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.events.publisher import is_bound
from flexcache.protocol.endpoints import check_endpoint
from flexcache.protocol.trust import find_listener
from flexcache.server.peers import addresses_of, kept_at
from flexcache.server.reactor import UnreadableError
from flexcache.storage.compression import Codec, open_compressor
from flexcache.storage.remote import check_packages

_CONNECT_TIMEOUT_S = 1.0
_MAX_PEERS_ASKED = 16


def check_server_endpoint(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    try:
        endpoint = subject.endpoint
        has_keys = config is not None and config.curve_keys is not None
        check_endpoint(endpoint, has_keys)
        find_listener(endpoint, has_keys)
    except ConfigError as problem:
        yield error(str(problem), "set another endpoint, or fix the directory")
        return
    server = subject.server
    if server is not None:
        pid, num_engines = server.server.server_pid, len(server.engines)
        yield ok(f"{endpoint}: served by process {pid}, {num_engines} engines")
    elif subject.is_served:
        yield error(
            f"{endpoint}: a server holds it but does not answer",
            "see its log; stop its process, then engines start another server or reconnect",
        )
    elif config is None or config.endpoint is None:
        yield ok("no endpoint is set: each engine has a private cache")
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
        return ok(f"{what}: in use, as expected while the server runs")
    if code == errno.EADDRINUSE:
        return error(
            f"{what}: in use by another process",
            "choose another port, or stop that process (`ss -ltnp` shows it)",
        )
    remedies = {
        errno.EACCES: "choose a port from 1024 up, or a socket in a directory that you own",
        errno.ENOENT: "create the socket's directory, or choose another",
    }
    remedy = remedies.get(code, "choose an address of this host")
    return error(f"{what}: {os.strerror(code)}", remedy)


def _judge_connection(name: str, address: str) -> Finding:
    host, port = _host_and_port(address)
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError as failure:
        return warning(
            f"{name} {address}: cannot connect ({failure.strerror or failure})",
            "start the subscriber that listens there, or publish at tcp://*:PORT",
        )
    return ok(f"{name} {address}: accepts connections")


def _bind_problem(address: str) -> int:
    """Return 0 if the address can be bound, else the errno."""
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


_STORE_TIMEOUT_S = 3.0
_PROCESS_TIMEOUT_S = 20.0
_LOOK_UP = """
import sys, time
from flexcache.storage.remote import open_remote_store
limit = float(sys.argv[2])
store = open_remote_store(sys.argv[1], timeout_s=limit)
found = store.count_present(["flexcache-doctor"], time.monotonic() + limit)
sys.exit(found.error)
"""


def check_ssd_compression(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.ssd_compression == "none":
        return
    try:
        open_compressor(Codec.of(config.ssd_compression))
    except MissingDependencyError as missing:
        what, _, remedy = str(missing).partition("; ")
        yield error(f"ssd_compression = {config.ssd_compression}: {what}", remedy)
    else:
        yield ok(f"blocks on SSD can be compressed with {config.ssd_compression}")


def check_remote_store(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.remote_url is None:
        return
    url = check_remote_url(config.remote_url)
    try:
        check_packages(config.remote_url, config.remote_compression)
    except MissingDependencyError as missing:
        what, _, remedy = str(missing).partition(": ")
        yield error(f"remote_url {url.name}: {what}", remedy)
        return
    kind = store_kind(url.scheme)
    problem = _look_up_problem(config.remote_url) if kind.problem is None else kind.problem(url)
    if problem is None:
        yield ok(f"{url.name}: answers{kind.caution}")
    else:
        yield warning(
            f"{url.name}: {problem}",
            "check its address, the credentials in the environment and the network; until it "
            "answers, every lookup in the tier is a miss",
        )


def check_peers(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or not config.has_peers:
        return
    if config.peer_endpoint is not None:
        base, _, port = config.peer_endpoint.rpartition(":")
        problems = [_bind_problem(f"{base}:{int(port) + i}") for i in range(2)]
        what = f"peer_endpoint {config.peer_endpoint} and the next port"
        yield _judge_bind(what, next(filter(None, problems), 0), subject)
    if config.rdma_devices is not None:
        yield _judge_rdma(f"peer_transport {config.peer_transport}", subject.root)
    by_kept: dict[bytes, list[str]] = defaultdict(list)
    for peer in config.peers:
        try:
            addresses = addresses_of(peer)
        except OSError as problem_of_name:
            yield warning(f"{peer}: {problem_of_name.strerror}", "check the name; until it is "
                          "known, none of its hosts is asked")  # fmt: skip
            continue
        for address in addresses[:_MAX_PEERS_ASKED]:
            try:
                kept = kept_at(address, config.curve_keys, _CONNECT_TIMEOUT_S)
            except UnreadableError as problem:
                yield warning(f"{address}: {problem}", "upgrade all hosts to one version")
                continue
            if kept is not None:
                yield ok(f"{address}: answers")
                by_kept[kept].append(address)
            else:
                yield warning(
                    f"{address}: does not answer within {_CONNECT_TIMEOUT_S:g} s",
                    "check that a cache with this peer_endpoint runs there, that it has the same "
                    "curve_keys, and the network; until it answers it is not asked",
                )

    by_kept.pop(b"", None)  # without an engine yet
    for others in sorted(by_kept.values(), key=len, reverse=True)[1:]:
        yield warning(
            f"{', '.join(others)}: another model, or another layout of it, than most",
            "hosts find nothing of each other then: give those with one model a list of their own",
        )


def _judge_rdma(what: str, root: Path) -> Finding:
    if find_spec("mooncake") is None:
        return error(
            f"{what}: the package mooncake is not installed; blocks go by TCP",
            "pip install '.[mooncake]'",
        )
    if not list(root.glob("sys/class/infiniband/*")):
        return warning(
            f"{what}: this machine has no RDMA device, and Transfer Engine uses TCP",
            "set it to tcp, which is faster",
        )
    return ok(f"{what}: see that only the fleet reaches the ports (docs/guide/many_hosts.md)")


def _look_up_problem(url: str) -> str | None:
    """Look up an object in a separate process, since a store's client may hang."""
    command = [sys.executable, "-c", _LOOK_UP, url, str(_STORE_TIMEOUT_S)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROCESS_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    return done.stderr.strip().rsplit("\n", 1)[-1] or f"the client exited with {done.returncode}"
