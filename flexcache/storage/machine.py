"""Machine as storage finds it: memory limits, NUMA nodes, mounts, private directories."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
from dataclasses import dataclass
from errno import ENOTDIR
from pathlib import Path, PurePosixPath

from flexcache.errors import ConfigError
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# Memory that this process may use: installed memory, and the limits of its control groups.
#
# A container is a control group. When its memory exceeds the limit, the kernel kills one of its
# processes without a message; so a pool that cannot fit is refused in advance.

_NO_LIMIT = 1 << 60  # version 1 reports a larger number for "no limit"
_PLUGGED = {
    "sys/bus/virtio/drivers/virtio_mem": "virtio*",
    "sys/bus/vmbus/drivers/hv_balloon": "*-*",
}
"""Devices by which a host plugs memory into a virtual machine, where their drivers have them."""


_GROUPS_1 = (
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
)  # fmt: skip
_GROUPS_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
"""Control groups of a version: where they are, the files of limit and usage, the page cache."""


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
    zones = re.findall(r"^ +present +(\d+)$", read_text(root / "proc/zoneinfo"), re.M)
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
    limits = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit_file, usage_file, cache_name = _GROUPS_1 if controllers else _GROUPS_2
        # In a container the path is often the host's; only the root is visible then.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            place = root / base / str(group).lstrip("/")
            limit = _number(read_text(place / limit_file))
            if 0 < limit < _NO_LIMIT:
                usage = _number(read_text(place / usage_file))
                cache = re.search(rf"^{cache_name} (\d+)$", read_text(place / "memory.stat"), re.M)
                limits.append(MemoryLimit(limit, max(0, usage - (int(cache[1]) if cache else 0))))
    return limits


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
    # What is used only causes a warning: page cache counts, and is released when room is needed.
    left = min((limit.limit - limit.used for limit in limits), default=wanted)
    if wanted > left:
        log_event(
            logger, logging.WARNING, "memory_limit_near", pool_gb=round(wanted / 1e9, 1),
            left_gb=round(left / 1e9, 1), limit_gb=round(lowest / 1e9, 1),
            effect="the kernel may kill a process of this container",
        )  # fmt: skip


def read_text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int:
    """Return 0 for text that is not a number, such as ``max``."""
    return int(text) if text.isdecimal() else 0


# ------------------------------------------------------------------------------------------------
# Memory near a device: on a host with several NUMA nodes, copies to and from a far one are slower.
#
# The kernel is asked directly, since libnuma is not installed everywhere. Containers often forbid
# it (Docker, without the capability SYS_NICE). A page that is touched first on a CPU of the node is
# there too, so threads that do this are sent there in any case.

SYSFS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1  # uses another node when this one is full
_MASK_BITS = 1024
_LIBC = ctypes.CDLL(None, use_errno=True)


def count_nodes() -> int:
    """Return how many nodes have memory; 1 if that is unknown."""
    return max(1, len(_read_list(SYSFS / "devices/system/node/has_memory")))


def node_of_pci(address: str) -> int | None:
    """Return the node of a PCI device (``0000:3b:00.0``); None if it is unknown."""
    path = SYSFS / "bus/pci/devices" / address.lower() / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def prefer_node(address: int, size: int, node: int) -> str:
    """Have pages of a mapping made on a node, whichever process touches them first.

    Pages that exist stay where they are. Applies to the whole file if it is one in shared memory.

    Returns:
        Why the kernel refused; "" if it did not.
    """
    if _MBIND is None:
        return f"not known how on {platform.machine()}"
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    failed = _LIBC.syscall(
        ctypes.c_long(_MBIND), ctypes.c_void_p(address), ctypes.c_size_t(size),
        ctypes.c_int(_MPOL_PREFERRED), mask, ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip
    return os.strerror(ctypes.get_errno()) if failed else ""


def stay_on(node: int) -> None:
    """Keep the calling thread on CPUs of a node, if it may use any."""
    cpus = _read_list(SYSFS / f"devices/system/node/node{node}/cpulist") & os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, cpus)


def _read_list(path: Path) -> set[int]:
    """Read the kernel's lists of numbers, such as ``0-3,8``; empty if there is none."""
    try:
        parts = path.read_text().strip().split(",")
        bounds = [part.split("-") for part in parts if part]
        return {number for pair in bounds for number in range(int(pair[0]), int(pair[-1]) + 1)}
    except (OSError, ValueError):
        return set()


MOUNT_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. ``number`` is the ``major:minor`` of its block device."""

    number: str
    mounted_on: str
    file_system: str
    device: str


def mount_of(directory: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """Return the file system that a directory is on; None if the system does not report it."""
    directory = directory.resolve()
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    return max(
        (mount for mount in map(_parse, reversed(lines)) if _holds(mount, directory)),
        key=lambda mount: len(mount.mounted_on),  # of two at one place the later hides the earlier
        default=None,
    )


def _holds(mount: Mount, directory: Path) -> bool:
    return directory.is_relative_to(mount.mounted_on)


def _parse(line: str) -> Mount:
    head, _, tail = line.partition(" - ")
    fields, (kind, source, *_) = head.split(), tail.split()
    return Mount(fields[2], fields[4], kind, source)


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Make a directory, and those above it, with this mode; existing ones stay as they are.

    Raises:
        OSError: It cannot be made, or something else is there.
    """
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    try:
        path.mkdir(mode & 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(path)) from None
        return  # another process made it a moment ago
    if mode & 0o077:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(mode)
