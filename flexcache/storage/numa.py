"""Memory near a device: on a host with several NUMA nodes, copies to and from a far one are slower.

The kernel is asked directly, since libnuma is not installed everywhere. Containers often forbid it
(Docker, without the capability SYS_NICE). A page that is touched first on a CPU of the node is
there too, so threads that do this are sent there in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

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
