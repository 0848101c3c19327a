"""Limits of control groups, in a tree of files like the kernel's."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import pytest
import torch

from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.server.cache import ServedCache
from flexcache.storage import machine
from flexcache.storage.machine import (
    MemoryLimit,
    check_pool_fits,
    installed_memory,
    memory_limits,
    usable_memory,
)
from flexcache.storage.shards import Shards

V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def limited(root: Path, limit: int, used: int = 0, cache: int = 0) -> None:
    write(root, {
        "proc/self/cgroup": "0::/pods/one",
        f"{V2}/pods/one/memory.max": "max",
        f"{V2}/pods/memory.max": str(limit),
        f"{V2}/pods/memory.current": str(used),
        f"{V2}/pods/memory.stat": f"anon 1\nactive_file 5\ninactive_file {cache}",
    })  # fmt: skip


def test_the_limits_of_both_versions_are_found_with_their_usage(tmp_path: Path) -> None:
    limited(tmp_path, 5000, used=900, cache=400)
    write(tmp_path, {
        "proc/self/cgroup": "3:cpu:/x\n2:memory:/docker/1\n0::/pods/one",
        f"{V1}/docker/1/memory.limit_in_bytes": "4000",
        f"{V1}/docker/1/memory.usage_in_bytes": "1000",
        f"{V1}/docker/1/memory.stat": "cache 3\ntotal_inactive_file 300",
        f"{V1}/memory.limit_in_bytes": "9223372036854771712",
    })  # fmt: skip
    assert memory_limits(tmp_path) == [MemoryLimit(4000, 700), MemoryLimit(5000, 500)]


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    check_pool_fits(1000, root=tmp_path)


def test_a_pool_beyond_the_limit_of_a_group_above_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    limited(tmp_path, 2_000_000_000)
    with pytest.raises(ConfigError, match=r"3\.0 GB.*container.*2\.0 GB.*cpu_cache_gb"):
        check_pool_fits(3_000_000_000, root=tmp_path)
    check_pool_fits(3_000_000_000, in_control_group=False, root=tmp_path)


def test_a_pool_that_fits_once_the_machine_has_been_given_more_memory_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = installed_memory() + 1
    with pytest.raises(ConfigError, match="this machine's memory"):
        check_pool_fits(wanted, root=tmp_path)
    pages = wanted // os.sysconf("SC_PAGE_SIZE") + 1
    write(tmp_path, {"proc/zoneinfo": f"Node 0, zone  Normal\n        present  {pages}\n"
                                      f"        managed  7\nNode 0, zone  Movable\n"
                                      f"        present  0"})  # fmt: skip
    with caplog.at_level(logging.WARNING, "flexcache"):
        check_pool_fits(wanted, root=tmp_path)
    [line] = [r.getMessage() for r in caplog.records]
    assert "memory_limit_near" in line
    assert "gives this virtual machine more memory" in line
    with pytest.raises(ConfigError, match="this machine's memory"):
        check_pool_fits(2 * wanted, root=tmp_path)
    write(tmp_path, {"sys/bus/virtio/drivers/virtio_mem/virtio3/uevent": ""})
    check_pool_fits(2 * wanted, root=tmp_path)


def test_the_lowest_limit_says_how_much_memory_may_be_used(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == installed_memory() > 0
    limited(tmp_path, 4000)
    assert usable_memory(tmp_path) == 4000


@pytest.mark.parametrize(("cache", "warns"), [(0, True), (1_500_000_000, False)])
def test_a_pool_beyond_the_memory_left_warns_unless_page_cache_makes_room(
    tmp_path: Path, cache: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limited(tmp_path, 4_000_000_000, used=2_000_000_000, cache=cache)
    with caplog.at_level(logging.WARNING, "flexcache"):
        check_pool_fits(3_000_000_000, root=tmp_path)
    assert ["memory_limit_near" in r.getMessage() for r in caplog.records] == [True] * warns


@pytest.mark.parametrize(("hugepages", "fits"), [("transparent", False), ("reserved", True)])
def test_only_reserved_huge_pages_may_exceed_the_limit_of_a_container(
    hugepages: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_limits", lambda root: [MemoryLimit(1000, 0)])
    model = ModelConfig("m", 1, 1, 8, torch.uint8)
    config = CacheConfig(num_cpu_blocks=100, hugepages=hugepages)  # type: ignore[arg-type]
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="container"):
        ServedCache(model, config, Shards.of_model(model, 16))
