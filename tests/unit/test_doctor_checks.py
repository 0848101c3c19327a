"""The doctor's checks on simulated machines: their files, versions and settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_stats import SERVER_STATS
from task_builders import World

from flexcache.doctor import checks as agreement
from flexcache.doctor import endpoints
from flexcache.doctor import machine as memory
from flexcache.doctor.checks import (
    CHECKS,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    check_settings,
    check_transfer_config,
    examine,
    judge_engine,
)
from flexcache.doctor.directories import judge_file_system
from flexcache.doctor.endpoints import check_ssd_compression
from flexcache.doctor.machine import explain_io_uring, judge_kernel
from flexcache.doctor.subject import Finding, Level, Subject, VllmOptions
from flexcache.stats import Stats
from flexcache.storage.machine import mount_of

EPERM = "PermissionError: [Errno 1] Operation not permitted"
ENOSYS = "OSError: [Errno 38] Function not implemented"
ENOMEM = "OSError: [Errno 12] Cannot allocate memory"
OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("release", "level"),
    [("5.2.1", ERROR), ("5.4.0-150-generic", WARNING), ("5.14.0-el9", OK), ("6.18", OK)],
)
def test_old_kernels_are_named(release: str, level: Level) -> None:
    found = judge_kernel(release)
    assert found.level is level
    assert release in found.text
    assert bool(found.remedy) is (level is not OK)


@pytest.mark.parametrize(
    ("problem", "sysctl", "is_filtered", "release", "why", "remedy"),
    [
        (EPERM, "2", True, "6.1", "io_uring_disabled is 2", "io_uring_disabled=0"),
        (EPERM, "1", False, "6.1", "io_uring_disabled is 1", "io_uring_group"),
        (EPERM, "0", True, "6.1", "seccomp", "--security-opt"),
        (ENOSYS, "", True, "6.1", "seccomp", "--security-opt"),
        (ENOSYS, "", False, "4.18.0", "too old", "5.1 or later"),
        (ENOMEM, "", False, "5.10", "before Linux 5.12", "ulimit -l"),
        (
            "flexcache.errors.MissingDependencyError: io_uring needs the package liburing",
            "0", False, "6.1", "needs the package liburing", "pip install '.[uring]'",
        ),
        (
            "the liburing binding dies by SIGILL on this CPU; liburing==2024.5.3 builds for it",
            "0", False, "6.1", "SIGILL", "pip install liburing==2024.5.3",
        ),
        ("something new", "0", False, "6.1", "something new", "log"),
    ],
)  # fmt: skip
def test_why_io_uring_does_not_work(
    problem: str, sysctl: str, is_filtered: bool, release: str, why: str, remedy: str
) -> None:
    said = explain_io_uring(problem, sysctl=sysctl, is_filtered=is_filtered, release=release)
    assert why in said[0]
    assert remedy in said[1]


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, OK), ("0.27.1", WARNING), ("0.28.0", OK), ("0.33.2+cpu", OK), ("0.34.0", WARNING),
     ("1.0", WARNING), ("dev", WARNING)],
)  # fmt: skip
def test_versions_of_vllm(version: str | None, level: Level) -> None:
    assert judge_engine(VLLM, version).level is level


@pytest.mark.parametrize(("version", "level"), [("1.1.0", WARNING), ("1.2.1", OK), ("2.0", OK)])
def test_versions_of_tensorrt_llm(version: str, level: Level) -> None:
    assert judge_engine(TENSORRT_LLM, version).level is level


@pytest.mark.parametrize(
    ("version", "level"), [(None, OK), ("0.5.23", OK), ("0.5.22", WARNING), ("0.6.0", WARNING)]
)
def test_other_releases_of_sglang_are_named(version: str | None, level: Level) -> None:
    assert judge_engine(SGLANG, version).level is level


@pytest.mark.parametrize(
    ("kind", "level", "remedy"),
    [
        ("ext4", OK, ""),
        ("xfs", OK, ""),
        ("overlay", WARNING, "mount a volume"),
        ("tmpfs", WARNING, "raise cpu_cache_gb"),
        ("nfs4", WARNING, "remote_url = file:///DIR"),
    ],
)
def test_file_systems(kind: str, level: Level, remedy: str) -> None:
    found = judge_file_system(Path("/kv"), kind, "device")
    assert found.level is level
    assert remedy in found.remedy


def test_a_directory_is_on_the_nearest_mount_and_of_two_in_one_place_on_the_later(
    tmp_path: Path,
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:5 / {tmp_path} rw shared:1 - tmpfs one rw\n"
        f"3 2 0:6 / {tmp_path} rw - overlay two rw\n"
        "4 1 0:7 / /elsewhere rw - proc proc rw\n"
    )
    found = mount_of(tmp_path / "deep" / "down", table)
    assert found is not None
    assert (found.file_system, found.device, found.number) == ("overlay", "two", "0:6")
    found = mount_of(tmp_path.parent, table)
    assert found is not None
    assert found.file_system == "ext4"
    assert mount_of(tmp_path, tmp_path / "none") is None


# -- memory ----------------------------------------------------------------------------------------


class Machine:
    """A machine's files below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def with_settings(self, **settings: str) -> Subject:
        environ = {f"FLEXCACHE_{name.upper()}": value for name, value in settings.items()}
        return Subject(environ=environ, root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("wanted_gb", "level"), [("1", OK), ("5", WARNING), ("9", ERROR)])
def test_the_pool_and_the_memory(machine: Machine, wanted_gb: str, level: Level) -> None:
    machine.write("proc/meminfo", "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 4000000 kB\n")
    (found,) = memory.check_memory(machine.with_settings(cpu_cache_gb=wanted_gb))
    assert found.level is level
    assert "8.2 GB of memory, 4.1 GB available" in found.text


def test_reserved_huge_pages_are_not_among_the_available_memory(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 8000000 kB\nMemAvailable: 1000000 kB\n")
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/memory.max", "2000000000")
    subject = machine.with_settings(cpu_cache_gb="5", hugepages="reserved")
    for check in (memory.check_memory, memory.check_container_limit):
        assert levels(check(subject)) == [OK]


def test_unknown_memory_is_not_mistaken_for_no_memory(
    machine: Machine,
) -> None:
    (found,) = memory.check_memory(machine.with_settings(cpu_cache_gb="5"))
    assert (found.level, found.remedy) == (WARNING, "mount /proc")


V2 = ("0::/kubepods/pod1\n", "sys/fs/cgroup/kubepods/pod1/memory.max")
V2_ABOVE = ("0::/kubepods/pod1\n", "sys/fs/cgroup/kubepods/memory.max")
V2_INSIDE = ("0::/\n", "sys/fs/cgroup/memory.max")
V1 = ("4:cpu:/x\n3:memory:/docker/1\n", "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes")
V1_INSIDE = ("3:memory:/docker/1\n", "sys/fs/cgroup/memory/memory.limit_in_bytes")


@pytest.mark.parametrize("place", [V2, V2_ABOVE, V2_INSIDE, V1, V1_INSIDE])
@pytest.mark.parametrize(
    ("limit", "level"), [("20000000000", OK), ("11000000000", WARNING), ("9000000000", ERROR)]
)
def test_the_limit_of_a_container_is_found_wherever_it_is_set(
    machine: Machine, place: tuple[str, str], limit: str, level: Level
) -> None:
    groups, file = place
    machine.write("proc/self/cgroup", groups)
    machine.write(file, limit + "\n")
    (found,) = memory.check_container_limit(machine.with_settings(cpu_cache_gb="10"))
    assert found.level is level
    assert ("resources.limits.memory" in found.remedy) is (level is not OK)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_a_control_group_without_a_limit_is_not_a_container_limit(
    machine: Machine, text: str
) -> None:
    machine.write("proc/self/cgroup", "0::/\n1:memory:/\n")
    machine.write("sys/fs/cgroup/memory.max", text)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", text)
    (found,) = memory.check_container_limit(machine.with_settings(cpu_cache_gb="10"))
    assert (found.level, found.text.split()[0]) == (OK, "no")


def test_a_missing_dev_shm_is_a_warning_with_a_remedy(machine: Machine) -> None:
    (found,) = memory.check_shared_memory(machine.with_settings())
    assert found.level is WARNING
    assert "--shm-size" in found.remedy


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, OK),
        ({"remote_url": "mooncake://h:1"}, OK),
        ({"remote_url": "mooncake://h:1?protocol=rdma"}, WARNING),
        ({"peers": "tcp://127.0.0.1:1"}, OK),
        ({"peers": "tcp://127.0.0.1:1", "peer_transport": "rdma"}, WARNING),
    ],
)
def test_locked_memory_matters_for_rdma_and_not_for_a_gpu(
    machine: Machine, settings: dict[str, str], level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    machine.write("dev/nvidiactl", "")
    subject = machine.with_settings(cpu_cache_gb="1", **settings)
    (found,) = memory.check_locked_memory(subject)
    assert found.level is level


@pytest.mark.parametrize(
    ("module", "device", "level"),
    [("mooncake", "", ERROR), ("", "", WARNING), ("", "mlx5_0", OK)],
)
def test_rdma_between_peers_needs_a_package_and_a_card(
    machine: Machine, module: str, device: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "find_spec", lambda name: None if name == module else machine)
    if device:
        machine.write(f"sys/class/infiniband/{device}", "")
    settings = {"peer_transport": "rdma", "peer_endpoint": "tcp://127.0.0.1:0"}
    _, found = endpoints.check_peers(machine.with_settings(cpu_cache_gb="1", **settings))
    assert found.level is level


@pytest.mark.parametrize(
    ("free_pages", "level", "said"), [(512, OK, "takes 512"), (511, ERROR, "takes 512")]
)
def test_reserved_huge_pages_must_be_enough(
    machine: Machine, free_pages: int, level: Level, said: str
) -> None:
    machine.write("proc/meminfo", f"HugePages_Free: {free_pages}\nHugepagesize: 2048 kB\n")
    subject = machine.with_settings(cpu_cache_gb="1.073741824", hugepages="reserved")
    (found,) = memory.check_huge_pages(subject)
    assert found.level is level
    assert said in found.text
    assert ("vm.nr_hugepages=512" in found.remedy) is (level is ERROR)


@pytest.mark.parametrize(
    ("enabled", "kernel", "text"),
    [
        ("advise", "5.15", "gets them"),
        ("never", "6.1", "asks for them"),
        ("never", "5.15", "none for shared memory"),
        ("deny", "6.1", "none for shared memory"),
    ],
)
def test_transparent_huge_pages_are_reported(
    machine: Machine, enabled: str, kernel: str, text: str
) -> None:
    machine.write("proc/sys/kernel/osrelease", f"{kernel}.0-1-generic\n")
    machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", f"always [{enabled}] x\n")
    (found,) = memory.check_huge_pages(machine.with_settings(cpu_cache_gb="1"))
    assert found.level is OK
    assert text in found.text


# -- agreement -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "vllms", "level"),
    [
        (None, None, OK),
        (None, 32, OK),
        ("32", 32, OK),
        ("32", None, WARNING),
        ("32", 16, ERROR),
    ],
)
def test_the_block_size_is_vllms(
    machine: Machine, ours: str | None, vllms: int | None, level: Level
) -> None:
    own = {} if ours is None else {"FLEXCACHE_TOKENS_PER_BLOCK": ours}
    environ = {"FLEXCACHE_CPU_CACHE_GB": "1", "FLEXCACHE_ENDPOINT": "ipc:///nowhere/s", **own}
    subject = Subject(environ=environ, vllm=VllmOptions(block_size=vllms))
    assert levels(agreement.check_block_size(subject)) == [level]


@pytest.mark.parametrize("held", [16, 32])
def test_the_block_size_is_the_servers(held: int) -> None:
    subject = Subject(environ={}, vllm=VllmOptions(block_size=16))
    cache = World().stats()
    identity = msgspec.structs.replace(cache.identity, tokens_per_block=held)
    cache = msgspec.structs.replace(cache, identity=identity)
    vars(subject)["server"] = Stats(server=SERVER_STATS, counters={}, engines={}, cache=cache)
    expected = [OK] if held == 16 else [OK, ERROR]
    assert levels(agreement.check_block_size(subject)) == expected


SERVER_FILE = """
cpu_cache_gb = 0.01
num_ssd_blocks = 8
ssd_cache_dirs = ["{directory}"]
tokens_per_block = {tokens}
[model]
model_id = "m"
num_layers = 1
num_kv_heads = 1
head_size = 128
dtype = "bfloat16"
"""


@pytest.mark.parametrize(("tokens", "expected"), [(16, [OK]), (32, [OK, ERROR])])
def test_blocks_on_disk_must_have_the_models_size(
    tmp_path: Path, tokens: int, expected: list[Level]
) -> None:
    from flexcache.storage.disk_pool import DiskPool

    directory = tmp_path / "kv"
    DiskPool([str(directory)], 8192, 8, False, "refuse").close()  # 16 tokens of 512 bytes
    file = tmp_path / "server.toml"
    file.write_text(SERVER_FILE.format(directory=directory, tokens=tokens))
    subject = Subject(file, environ={}, vllm=VllmOptions(block_size=tokens))
    assert levels(agreement.check_block_size(subject)) == expected


def test_the_block_size_of_a_servers_own_model_is_no_setting_of_vllms(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(SERVER_FILE.format(directory=tmp_path / "kv", tokens=16))
    environ = {"FLEXCACHE_TOKENS_PER_BLOCK": ""}
    assert levels(agreement.check_block_size(Subject(file, environ=environ))) == [OK]


def test_empty_variables_are_no_settings() -> None:
    environ = {"FLEXCACHE_QUOTAS": "", "FLEXCACHE_CONFIG": "", "FLEXCACHE_ROUTER_PORT": "8000"}
    assert not Subject(environ=environ).has_settings


def test_a_model_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    content = SERVER_FILE.format(directory=tmp_path / "kv", tokens=16)
    file.write_text(content.replace("num_layers = 1", "num_layers = -1"))
    [found] = check_settings(Subject(file, environ={}))
    assert found.level is ERROR
    assert "num_layers" in found.text


@pytest.mark.parametrize(
    ("quotas", "reason"),
    [
        ("a=10MB", "promises 152.5 times the ssd tier"),
        ("a=1MB", "promises 15.25 times the ssd tier"),
        ("a=11MB/50%", "promises 1.1 times the dram tier"),
        ("a=1MB/0.001MB", "promises less than a block of the ssd tier to a"),
        ("a=1MB/1%", ""),
    ],
)
def test_a_servers_sizes_must_fit_its_model(tmp_path: Path, quotas: str, reason: str) -> None:
    file = tmp_path / "server.toml"
    content = SERVER_FILE.format(directory=tmp_path / "kv", tokens=16)
    file.write_text(f'quotas = "{quotas}"\n{content}')
    [found] = check_settings(Subject(file, environ={}))
    assert (found.level, reason in found.text + found.remedy) == (ERROR if reason else OK, True)


@pytest.mark.parametrize(
    ("version", "algo", "seed", "shares", "level"),
    [
        ("0.32.0", "sha256", None, True, OK),
        ("0.28.0", "sha256", None, True, WARNING),
        ("0.28.0", "sha256", None, False, OK),
        ("0.28.0", "sha256", "0", True, OK),
        ("0.28.0", "sha256", "random", True, WARNING),
        ("0.32.0", "xxhash", None, True, WARNING),
    ],
)
def test_hashes_must_match_where_blocks_are_shared(
    version: str, algo: str, seed: str | None, shares: bool, level: Level,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(agreement, "vllm_version", lambda: version)
    environ = {"FLEXCACHE_CPU_CACHE_GB": "1"}
    if seed is not None:
        environ["PYTHONHASHSEED"] = seed
    if shares:
        environ["FLEXCACHE_ENDPOINT"] = "ipc:///nowhere/s"
    subject = Subject(environ=environ, vllm=VllmOptions(hash_algo=algo))
    (found,) = agreement.check_hash_seed(subject)
    assert found.level is level
    assert ("PYTHONHASHSEED" in found.remedy) is (level is WARNING)


GOOD = {
    "kv_connector": "FlexCacheConnectorV1",
    "kv_connector_module_path": "flexcache.integration.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [OK]),
        ({"kv_load_failure_policy": "fail"}, [WARNING]),
        ({"kv_connector": "Other"}, [ERROR]),
        ({"kv_role": "kv_producer", "kv_load_failure_policy": "fail"}, [ERROR, WARNING]),
    ],
)
def test_vllms_connector_settings_are_checked(
    change: dict[str, str], expected: list[Level]
) -> None:
    found = list(check_transfer_config(Subject(vllm=VllmOptions(transfer={**GOOD, **change}))))
    assert levels(found) == expected
    assert all(finding.remedy for finding in found if finding.level is not OK)


def test_an_omitted_load_failure_policy_is_vllms_default() -> None:
    given = {key: value for key, value in GOOD.items() if key != "kv_load_failure_policy"}
    (found,) = check_transfer_config(Subject(vllm=VllmOptions(transfer=given)))
    assert found.level is WARNING
    assert "'fail'" in found.text


@pytest.mark.parametrize(
    ("policy", "child", "expected"),
    [
        ("recompute", {"kv_load_failure_policy": "fail"}, [OK]),
        ("fail", {}, [WARNING]),
        ("recompute", {"kv_connector_module_path": None}, [ERROR]),
        ("recompute", {"kv_role": "kv_consumer"}, [OK]),
        ("recompute", {"kv_connector": "Other"}, [ERROR, ERROR]),
    ],
)
def test_beside_other_connectors_the_parents_policy_counts(
    policy: str, child: dict[str, Any], expected: list[Level]
) -> None:
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {**GOOD, **child}]
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": children},
    }
    found = list(check_transfer_config(Subject(vllm=VllmOptions(transfer=given))))
    assert levels(found) == expected


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ({"module_path": "flexcache.integration.vllm.secondary_tier"}, [OK]),
        ({}, [ERROR]),
    ],
)
def test_it_may_be_a_tier_below_vllms_own_offloading(
    tier: dict[str, Any], expected: list[Level]
) -> None:
    entry = {"type": "FlexCacheSecondaryTier", "ssd_cache_gb": 7, **tier}
    given = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": "/files"}, entry],
        },
    }
    vllm = VllmOptions(transfer=given)
    assert levels(list(check_transfer_config(Subject(vllm=vllm)))) == expected
    assert vllm.extra_config == {"ssd_cache_gb": 7}


def test_extra_config_counts_as_settings() -> None:
    extra = {"kv_connector_extra_config": {"cpu_cache_gb": 3}}
    subject = Subject(environ={}, vllm=VllmOptions(transfer={**GOOD, **extra}))
    assert subject.pool_bytes == 3_000_000_000


def test_a_check_that_raises_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(subject: Subject) -> Iterable[Finding]:
        raise RuntimeError("odd machine")

    monkeypatch.setitem(CHECKS, "memory", fail)
    found = dict(examine(Subject(environ={})))
    assert found["memory"].level is WARNING
    assert "RuntimeError: odd machine" in found["memory"].text
    assert found.keys() >= {"kernel", "shared_memory", "server"}


@pytest.mark.parametrize(
    ("codec", "expected"), [("none", []), ("lz4", ["ok"]), ("zstd", ["error"])]
)
def test_the_package_of_the_codec_on_ssd_must_be_installed(
    codec: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    environ = {
        "FLEXCACHE_NUM_CPU_BLOCKS": "8", "FLEXCACHE_NUM_SSD_BLOCKS": "8",
        "FLEXCACHE_SSD_CACHE_DIRS": str(tmp_path), "FLEXCACHE_SSD_COMPRESSION": codec,
    }  # fmt: skip
    found = list(check_ssd_compression(Subject(environ=environ)))
    assert [finding.level.value for finding in found] == expected
    assert all((".[compression]" in each.remedy) == (each.level is ERROR) for each in found)
