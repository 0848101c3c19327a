"""Real stores on loopback, to be killed and restarted: a Mooncake master, an S3 server."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ports import free_ports

START_S = 60.0
PATIENT = {"remote_lookup_timeout_s": 20.0, "remote_timeout_s": 60.0, "server_timeout_s": 60.0}
"""Settings of an engine above a store: a busy machine is no slow store."""
_MOONCAKE_SEGMENT = """
import sys
from flexcache.storage.remote import open_remote_store
store = open_remote_store(sys.argv[1], timeout_s=20)
print("up", flush=True)
sys.stdin.read()
"""


def missing(module: str, *programs: str) -> str | None:
    """Return why a store cannot be tested here: an optional package or its needs are missing."""
    for name in (module, *programs):
        if importlib.util.find_spec(name) is None and _program(name) is None:
            return f"{name} is not installed"
    loading = subprocess.run(
        [sys.executable, "-c", f"import {module}"], stderr=subprocess.PIPE, text=True
    )
    if loading.returncode:
        return f"{module} cannot be loaded: {loading.stderr.splitlines()[-1]}"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


class StoreServer:
    """A server process; `restart` gives it the same ports and, if it keeps any, the same data."""

    def __init__(
        self, url: str, command: Sequence[str], is_up: Callable[[], bool], directory: Path
    ) -> None:
        self.url = url
        self._command = command
        self._is_up = is_up
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT
            )
        give_up = time.monotonic() + START_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError((self._directory / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """Stop it by SIGSTOP: it answers nothing, and its sockets stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # until its last thread has stopped

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def _server(
    make: Callable[[Path], tuple[str, Sequence[str], Callable[[], bool]]],
) -> Iterator[StoreServer]:
    with tempfile.TemporaryDirectory(prefix="fc-store-") as name:
        directory = Path(name)
        server = StoreServer(*make(directory), directory)
        try:
            yield server
        finally:
            server.kill()


def mooncake_master(
    segment_gb: float = 0.25, tenants: Sequence[str] = ()
) -> AbstractContextManager[StoreServer]:
    """Run a master. Each client that opens its URL contributes a segment of that size.

    Args:
        tenants: Those that may write; empty: the master does not tell tenants apart.
    """

    def make(directory: Path) -> tuple[str, Sequence[str], Callable[[], bool]]:
        port, metrics_port = free_ports(2)
        command = [
            _program("mooncake_master") or "mooncake_master",
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--default_kv_lease_ttl=10000",  # ms: longer than a busy machine holds up a read
        ]
        if tenants:
            policy = directory / "tenants"
            registered = [{"name": name, "quota": 100_000_000} for name in tenants]
            policy.write_text(json.dumps({"version": 1, "tenants": registered}))
            command += ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}"]
        url = f"mooncake://127.0.0.1:{port}?segment_gb={segment_gb}"
        return url, command, lambda: _accepts(port)

    return _server(make)


@contextmanager
def mooncake_segment(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that only contributes its segment, and outlives engines."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MOONCAKE_SEGMENT, url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != b"up\n":  # the client prints as well
            assert line, "the process ended"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def s3_server() -> Iterator[StoreServer]:
    """Run SeaweedFS, with its credentials in our environment meanwhile."""
    credentials = {"AWS_ACCESS_KEY_ID": "flexcache", "AWS_SECRET_ACCESS_KEY": "flexcache"}

    def make(directory: Path) -> tuple[str, Sequence[str], Callable[[], bool]]:
        names = ("master", "volume", "filer", "s3")
        ports = dict(zip([*names, *(f"{n}.port.grpc" for n in names)], free_ports(8), strict=True))
        (directory / "identities.json").write_text(_identities(credentials))
        command = [_program("weed") or "weed", "server", "-s3", f"-dir={directory}"]
        command += [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.config={directory}/identities.json",
        ]
        command += [f"-{n}={p}" if "." in n else f"-{n}.port={p}" for n, p in ports.items()]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += ["-master.electionTimeout=1s"]  # a restart then takes 5 s instead of 15
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        url = f"s3://flexcache/blocks?endpoint={endpoint}&region=us-east-1"
        return url, command, lambda: _takes_an_object(endpoint)

    before = {name: os.environ.get(name) for name in credentials}
    os.environ.update(credentials)
    try:
        with _server(make) as server:
            yield server
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def store_server(kind: str, segment_gb: float = 0.25) -> Iterator[StoreServer]:
    """Run ``s3``, or ``mooncake`` of that size, whose objects outlive its users."""
    if kind == "s3":
        with s3_server() as server:
            yield server
    else:
        with mooncake_master(segment_gb) as server, mooncake_segment(server.url):
            server.url = f"{server.url.partition('?')[0]}?segment_gb=0"
            yield server


@contextmanager
def store_at(kind: str, directory: Path) -> Iterator[str]:
    """Run a store, or skip the test; yield its URL. A ``file`` store is below the directory."""
    import pytest  # benchmarks, which import this module, do without

    if kind == "file":
        yield f"file://{directory}/store"
        return
    absent = missing("obstore", "weed") if kind == "s3" else missing("mooncake", "mooncake_master")
    if absent:
        pytest.skip(absent)
    with store_server(kind) as server:
        yield server.url


def _identities(credentials: dict[str, str]) -> str:
    keys = {
        "accessKey": credentials["AWS_ACCESS_KEY_ID"],
        "secretKey": credentials["AWS_SECRET_ACCESS_KEY"],
    }
    return json.dumps(
        {"identities": [{"name": "test", "credentials": [keys], "actions": ["Admin"]}]}
    )


def _takes_an_object(endpoint: str) -> bool:
    """Put a first object. It creates the bucket, which takes the server a while after startup."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    try:
        store = S3Store(
            "flexcache",
            endpoint=endpoint,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        obstore.put(store, "probe", b"up")
        return bytes(obstore.get(store, "probe").bytes()) == b"up"
    except (BaseError, OSError):
        return False


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
