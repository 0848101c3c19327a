"""Huge pages for a file in shared memory, where the kernel grants them.

A disk transfers memory in pieces that are contiguous. A block of 2 MiB in ordinary pages may be 512
of them, more than some disks take in one request; in a huge page it is one.

The kernel uses huge pages for shared memory by itself only if `shmem_enabled` says so, and on most
systems that is `never`. Since Linux 6.1 a process may ask for them all the same, unless it is
`deny`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from flexcache.storage.alignment import PAGE_BYTES

HUGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_huge(fd: int, start: int, length: int) -> bool:
    """Put huge pages under a part of a file in shared memory, as far as whole ones fit.

    Its bytes stay as they are, also while other processes use them. The first page of each is made
    in the usual way, so that the huge one is on the NUMA node that the file's policy names.

    Args:
        start: A multiple of `HUGE_BYTES`.

    Returns:
        Whether to continue with other parts: False if the kernel has none left, or refuses.
    """
    length = length // HUGE_BYTES * HUGE_BYTES
    if not length:
        return True
    with _aligned_mapping(fd, start, length) as address:
        if address is None:
            return False
        advise(address, length, MADV_HUGEPAGE)  # all that it takes with `advise`
        for offset in range(0, length, HUGE_BYTES):
            advise(address + offset, PAGE_BYTES, MADV_POPULATE_WRITE)
        if advise(address, length, _MADV_COLLAPSE):
            return True
        return ctypes.get_errno() == errno.EAGAIN  # a page was in use: it stays ordinary


def advise(address: int, length: int, advice: int) -> bool:
    """Tell the kernel what to do with memory; whether it has done so."""
    return not _LIBC.madvise(address, length, advice)


@contextmanager
def _aligned_mapping(fd: int, start: int, length: int) -> Iterator[int | None]:
    """Map a part of a file where huge pages may be: at a multiple of their size."""
    room = length + HUGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    begin = _LIBC.mmap(None, room, 0, private, -1, 0)
    if begin == _FAILED:
        yield None
        return
    try:
        aligned = -(-begin // HUGE_BYTES) * HUGE_BYTES
        access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        mapped = _LIBC.mmap(aligned, length, access, shared, fd, start)
        yield None if mapped == _FAILED else aligned
    finally:
        _LIBC.munmap(begin, room)
