"""`flexcache doctor` on healthy machines and on machines that really lack something."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ports
import pytest
from cluster import running_cluster
from paths import SUPPORT

from flexcache.doctor.endpoints import (
    check_event_endpoints,
    check_http,
    check_remote_store,
    check_server_endpoint,
)
from flexcache.doctor.subject import Finding, Level, Subject
from flexcache.protocol.endpoints import EndpointLock, private_endpoint
from flexcache.storage.block_io import io_uring_problem
from flexcache.storage.pool_directory import supports_direct_io

DOCTOR = (sys.executable, "-m", "flexcache.cli", "doctor", "--json")
FORBID_IO_URING = SUPPORT / "forbid_io_uring.py"


class Report:
    """The report of a doctor in its own process."""

    def __init__(self, command: Sequence[str], **environ: str) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, **environ}
        )
        self.code = done.returncode
        self.findings = json.loads(done.stdout)["findings"]

    def of(self, check: str) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["check"] == check]

    def the(self, check: str, text: str) -> dict[str, str]:
        (found,) = (finding for finding in self.of(check) if text in finding["text"])
        return found


def in_own_mounts(setup: str, command: Sequence[str]) -> list[str]:
    """Wrap the command so that ``setup`` first mounts things visible to it alone."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("may not mount anything here")
    return ["unshare", "-m", "sh", "-c", f"{setup} && exec {shlex.join(command)}"]


def without_privileges(command: Sequence[str]) -> list[str]:
    """Wrap the command so that it cannot read every directory, as root can."""
    if os.geteuid():
        return list(command)
    if shutil.which("setpriv") is None:
        pytest.skip("root may look at everything, and there is no setpriv to change that")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]


def test_a_healthy_machine(tmp_path: Path) -> None:
    if io_uring_problem() is not None or not supports_direct_io(tmp_path):
        pytest.skip("this machine has no io_uring or no O_DIRECT")
    report = Report([*DOCTOR, str(tmp_path)], FLEXCACHE_CPU_CACHE_GB="0.01")
    assert report.code == 0
    assert report.the("settings", "are valid")["level"] == "ok"
    assert report.the("io_uring", "works")["level"] == "ok"
    assert report.the("pool", "O_DIRECT works")["level"] == "ok"
    assert report.the("memory", "the DRAM tier takes 10.0 MB")["level"] == "ok"
    assert not any(finding["remedy"] for finding in report.findings if finding["level"] == "ok")


def test_io_uring_forbidden_by_a_container_is_named_with_the_remedy() -> None:
    report = Report([sys.executable, str(FORBID_IO_URING), *DOCTOR[1:]])
    assert report.code == 0  # threads do the work
    (found,) = report.of("io_uring")
    assert found["level"] == "warning"
    assert "a seccomp filter forbids it" in found["text"]
    assert "--security-opt seccomp=" in found["remedy"]
    assert "seccompProfile" in found["remedy"]


def test_io_uring_that_is_asked_for_and_forbidden_is_an_error() -> None:
    command = [sys.executable, str(FORBID_IO_URING), *DOCTOR[1:]]
    report = Report(command, FLEXCACHE_CPU_CACHE_GB="0.01", FLEXCACHE_IO_ENGINE="io_uring")
    assert report.code == 1
    assert report.of("io_uring")[0]["level"] == "error"


def test_a_directory_that_refuses_o_direct_is_named_with_the_remedy(tmp_path: Path) -> None:
    mount = f"mount -t ramfs ramfs {tmp_path}"
    report = Report(in_own_mounts(mount, [*DOCTOR, str(tmp_path)]))
    assert report.code == 0  # buffered I/O does the work
    found = report.the("pool", f"{tmp_path}: no O_DIRECT")
    assert (found["level"], "ext4, XFS" in found["remedy"]) == ("warning", True)
    found = report.the("file_system", f"{tmp_path} is on ramfs, in memory")
    assert (found["level"], "on a disk" in found["remedy"]) == ("warning", True)


def test_a_container_layer_is_named_with_the_remedy(tmp_path: Path) -> None:
    upper, lower, top = (tmp_path / name for name in ("upper", "lower", "top"))
    work = tmp_path / "work"
    for path in (upper, lower, top, work):
        path.mkdir()
    mount = f"mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={work} {top}"
    command = in_own_mounts(mount, [*DOCTOR, str(top)])
    if subprocess.run(in_own_mounts(mount, ["true"]), capture_output=True).returncode:
        pytest.skip("this kernel has no overlayfs")
    found = Report(command).the("file_system", f"{top} is on overlay")
    assert found["level"] == "warning"
    assert "docker run -v" in found["remedy"]


def test_a_small_dev_shm_is_named_with_the_remedy() -> None:
    report = Report(in_own_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm", DOCTOR))
    (found,) = report.of("shared_memory")
    assert found["level"] == "warning"
    assert "/dev/shm: 67.1 MB of 67.1 MB free: too small for vLLM" in found["text"]
    assert "--shm-size" in found["remedy"]
    assert "medium: Memory" in found["remedy"]


def test_a_disk_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    report = Report(
        in_own_mounts(f"mount -t tmpfs -o size=16m tmpfs {disk}", DOCTOR),
        FLEXCACHE_CPU_CACHE_GB="0.01",
        FLEXCACHE_SSD_CACHE_GB="0.02",
        FLEXCACHE_SSD_CACHE_DIRS=str(disk),
    )
    assert report.code == 1
    found = report.the("space", "the SSD tier grows by 20.0 MB")
    assert (found["level"], found["remedy"]) == ("error", "lower ssd_cache_gb, or free some space")


def test_a_directory_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o000)
    path = str(hidden / "kv")
    report = Report(without_privileges([*DOCTOR, path]))
    assert report.code == 1
    assert report.the("pool", f"{path}: Permission denied")["level"] == "error"
    assert not [finding for finding in report.findings if "this is a bug" in finding["remedy"]]
    settings = {"CPU_CACHE_GB": "0.01", "SSD_CACHE_GB": "0.1", "SSD_CACHE_DIRS": path}
    environ = {f"FLEXCACHE_{name}": value for name, value in settings.items()}
    report = Report(without_privileges(DOCTOR), **environ)
    assert report.the("settings", f"ssd_cache_dirs = '{path}'")["level"] == "error"


def test_invalid_settings_are_an_error_and_the_rest_is_still_checked() -> None:
    report = Report(DOCTOR, FLEXCACHE_CPU_CACHE_GB="-1")
    assert report.code == 1
    found = report.the("settings", "cpu_cache_gb = -1.0")
    assert found["remedy"] == (
        "must be a number greater than 0 and at most 1e+09 (from FLEXCACHE_CPU_CACHE_GB)"
    )
    assert report.of("kernel")


def test_the_text_report_has_the_remedy_on_a_second_line() -> None:
    command = [part for part in DOCTOR if part != "--json"]
    environ = {**os.environ, "FLEXCACHE_CPU_CACHE_GB": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert "error   the settings are not valid: cpu_cache_gb = -1.0\n" in done.stdout
    assert "        -> must be a number greater than 0 and at most 1e+09 (from FLEX" in done.stdout


# -- addresses and stores, in this process --------------------------------------------------------


def subject_with(**settings: str) -> Subject:
    environ = {f"FLEXCACHE_{name.upper()}": value for name, value in settings.items()}
    return Subject(environ={"FLEXCACHE_CPU_CACHE_GB": "0.01", **environ})


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def one(findings: Iterator[Finding]) -> Finding:
    (found,) = findings
    return found


def test_an_endpoint_names_the_process_that_serves_it() -> None:
    endpoint = private_endpoint("doctor")
    subject = subject_with(endpoint=endpoint)
    assert one(check_server_endpoint(subject)).text == f"{endpoint}: free"
    with running_cluster() as cluster:
        served = one(check_server_endpoint(subject_with(endpoint=cluster.manager.endpoint)))
    assert served.level is Level.OK
    assert f"served by process {os.getpid()}" in served.text


def test_a_server_that_does_not_answer_is_an_error() -> None:
    endpoint = private_endpoint("doctor")
    lock = EndpointLock(endpoint)
    try:
        found = one(check_server_endpoint(subject_with(endpoint=endpoint)))
    finally:
        lock.release()
    assert found.level is Level.ERROR
    assert "does not answer" in found.text


def test_a_port_that_another_process_has_is_an_error(taken_port: int, free_port: int) -> None:
    cases: Mapping[int, Level] = {taken_port: Level.ERROR, free_port: Level.OK}
    for port, level in cases.items():
        found = [
            one(check_http(subject_with(http_endpoint=str(port)))),
            one(check_server_endpoint(subject_with(endpoint=f"tcp://127.0.0.1:{port}"))),
            one(check_event_endpoints(subject_with(kv_events_endpoint=f"tcp://*:{port}"))),
            one(check_event_endpoints(subject_with(kv_events_endpoint=f"tcp://127.0.0.1:{port}"))),
        ]
        assert [finding.level for finding in found] == [level] * 4
        assert all(str(port) in finding.text for finding in found)


def test_a_socket_in_a_missing_directory_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    subject = subject_with(kv_events_endpoint=f"ipc://{tmp_path}/none/events")
    found = one(check_event_endpoints(subject))
    assert (found.level, "directory" in found.remedy) == (Level.ERROR, True)


def test_events_sent_to_a_broker_need_a_running_one(taken_port: int, free_port: int) -> None:
    for port, level in ((taken_port, Level.OK), (free_port, Level.WARNING)):
        # Written so, it is not known for this host, where a publisher would bind it.
        subject = subject_with(kv_events_endpoint=f"tcp://LocalHost:{port}")
        assert one(check_event_endpoints(subject)).level is level


def test_a_shared_directory_is_checked_and_not_created(tmp_path: Path) -> None:
    found = one(check_remote_store(subject_with(remote_url=f"file://{tmp_path}")))
    assert found == Finding(Level.OK, f"file://{tmp_path}: answers")
    found = one(check_remote_store(subject_with(remote_url=f"file://{tmp_path}/share")))
    assert found.level is Level.WARNING
    assert "no such directory" in found.text
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_queried(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unused")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    url = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{free_port}&region=here"
    found = one(check_remote_store(subject_with(remote_url=url)))
    assert found.level is Level.WARNING
    assert found.text.startswith("s3://bucket/prefix: ")


def test_a_missing_mooncake_master_is_named(taken_port: int, free_port: int) -> None:
    pytest.importorskip("mooncake")
    for port, level in ((taken_port, Level.OK), (free_port, Level.WARNING)):
        found = one(check_remote_store(subject_with(remote_url=f"mooncake://127.0.0.1:{port}")))
        assert found.level is level, found
