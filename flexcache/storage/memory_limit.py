"""Memory that this process may use: installed memory, and the limits of its control groups.

A container is a control group. When its memory exceeds the limit, the kernel kills one of its
processes without a message; so a pool that cannot fit is refused in advance.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flexcache.errors import ConfigError
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 60  # version 1 reports a larger number for "no limit"
_PLUGGED = {
    "sys/bus/virtio/drivers/virtio_mem": "virtio*",
    "sys/bus/vmbus/drivers/hv_balloon": "*-*",
}
"""Devices by which a host plugs memory into a virtual machine, where their drivers have them."""


@dataclass(frozen=True, slots=True)
class _Version:
    """File locations and names of a control-group version."""

    base: str
    limit: str
    usage: str
    cache: str


_V1 = _Version(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes, and how much of it is used, not counting reclaimable page cache."""

    limit: int
    used: int


def installed_memory() -> int:
    """Return the machine's physical memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def largest_memory(root: Path = Path("/")) -> int:
    """Return the most memory that the machine may have, in bytes: more than `installed_memory`
    where its host lends it memory as it is used (a balloon), or may plug in more.

    Args:
        root: Root of the file system that contains the system's files.
    """
    # What a balloon holds back is missing in the installed memory, and present in its zones.
    zones = re.findall(r"^ +present +(\d+)$", _read(root / "proc/zoneinfo"), re.M)
    present = sum(map(int, zones)) * os.sysconf("SC_PAGE_SIZE")
    plugs = any(next((root / place).glob(name), None) for place, name in _PLUGGED.items())
    return max(_NO_LIMIT if plugs else 0, present, installed_memory())


def usable_memory(root: Path = Path("/")) -> int:
    """Return the most bytes that this process may use: the machine's or its container's limit.

    Args:
        root: Root of the file system that contains the system's files.
    """
    return min([installed_memory(), *(limit.limit for limit in memory_limits(root))])


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits of this process's control groups and their ancestors.

    Args:
        root: Root of the file system that contains the system's files.
    """
    return list(_limits(root))


def _limits(root: Path) -> Iterator[MemoryLimit]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        # In a container the path is often the host's; only the root is visible then.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            place = root / version.base / str(group).lstrip("/")
            limit = _number(_read(place / version.limit))
            if 0 < limit < _NO_LIMIT:
                usage = _number(_read(place / version.usage))
                cache = re.search(rf"^{version.cache} (\d+)$", _read(place / "memory.stat"), re.M)
                yield MemoryLimit(limit, max(0, usage - (int(cache[1]) if cache else 0)))


def check_pool_fits(wanted: int, *, in_control_group: bool = True, root: Path = Path("/")) -> None:
    """Refuse a pool that would make the kernel kill a process; warn about one that might.

    Args:
        wanted: Bytes of the pool.
        in_control_group: Whether control groups count its memory. They do not count reserved
            huge pages.

    Raises:
        ConfigError: The pool is larger than the machine's memory can be, or than a control group's
            limit.
    """
    remedy = "lower cpu_cache_gb or num_cpu_blocks"
    installed = installed_memory()
    if wanted > largest_memory(root):
        raise ConfigError(
            f"the DRAM tier of {wanted / 1e9:.1f} GB is larger than this machine's memory, "
            f"{installed / 1e9:.1f} GB: {remedy}"
        )
    if wanted > installed:
        log_event(
            logger, logging.WARNING, "memory_limit_near", pool_gb=round(wanted / 1e9, 1),
            left_gb=round(installed / 1e9, 1), limit_gb=round(installed / 1e9, 1),
            effect="the pool fits only if the host gives this virtual machine more memory in time",
            remedy=remedy,
        )  # fmt: skip
    limits = memory_limits(root) if in_control_group else []
    lowest = min((limit.limit for limit in limits), default=wanted)
    if wanted > lowest:
        raise ConfigError(
            f"the DRAM tier of {wanted / 1e9:.1f} GB is larger than the memory limit of this "
            f"container (control group), {lowest / 1e9:.1f} GB: {remedy}, or raise the limit"
        )
    left = min((limit.limit - limit.used for limit in limits), default=wanted)
    if wanted > left:
        log_event(
            logger, logging.WARNING, "memory_limit_near", pool_gb=round(wanted / 1e9, 1),
            left_gb=round(left / 1e9, 1), limit_gb=round(lowest / 1e9, 1),
            effect="the kernel may kill a process of this container",
        )  # fmt: skip


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int:
    """Return 0 for text that is not a number, such as ``max``."""
    return int(text) if text.isdecimal() else 0
