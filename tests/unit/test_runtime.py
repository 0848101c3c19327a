"""Endpoints: private by default, and never open to the network."""

from __future__ import annotations

import os
import resource
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from flexcache.errors import ConfigError
from flexcache.protocol.endpoints import (
    EndpointLock,
    check_endpoint,
    is_served,
    private_endpoint,
    runtime_dir,
)


def test_only_the_user_may_access_the_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        runtime_dir()


@pytest.mark.parametrize("unusable", ["missing", "/proc"])
def test_without_a_runtime_directory_the_temporary_directory_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    unusable: str,
) -> None:
    base = tmp_path / unusable  # an absolute path stays what it is
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_dir() == runtime_dir() == tmp_path / f"flexcache-{os.getuid()}"
    assert [str(base) in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ConfigError, match=r"/proc/flexcache-.*set XDG_RUNTIME_DIR"):
        runtime_dir()


def test_a_relative_runtime_directory_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_dir() == tmp_path / f"flexcache-{os.getuid()}"


def test_a_name_has_one_endpoint_and_unnamed_endpoints_are_unique() -> None:
    assert private_endpoint("engine") == private_endpoint("engine")
    assert private_endpoint() != private_endpoint()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://[::1]:1", "ipc:///tmp/x.sock"])
def test_local_endpoints_are_served(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc://@abstract",
        "ipc://relative.sock",
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://10.0.0.1:1",
        "udp://x",
        "tcp://127.0.0.1:0;10.0.0.1:1",
        "tcp://127.0.0.1:5555?;10.0.0.1:1",
        "tcp://127.0.0.1:5555\n",
        "tcp://127.0.0.1",
        "tcp://[127.0.0.1]:1",
        "ipc://" + "x" * 120,
        "",
    ],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        check_endpoint(endpoint)


def test_checking_whether_an_endpoint_is_served_does_not_keep_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcache.protocol.endpoints._PROBE_PATIENCE_S", 60.0)
    endpoint = f"ipc://{tmp_path}/s.sock"
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            is_served(endpoint)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(200):
            lock = EndpointLock(endpoint)
            assert is_served(endpoint)
            lock.release()
    finally:
        done.set()
        for asker in askers:
            asker.join()


def test_a_lock_left_by_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    (tmp_path / "s.sock.lock").write_text("1234")
    (tmp_path / "s.sock").touch()
    lock = EndpointLock(endpoint)
    with pytest.raises(ConfigError, match="in use by process"):
        EndpointLock(endpoint)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_full_runtime_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no byte can be written
    try:
        with pytest.raises(ConfigError, match=rf"{tmp_path}/s.sock.lock: File too large"):
            EndpointLock(endpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    EndpointLock(endpoint).release()
