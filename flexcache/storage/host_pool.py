"""Host memory of the DRAM tier: one shared segment per stored copy of the KV.

A segment is an anonymous in-memory file (memfd), not a named one: it does not count against the
size of /dev/shm, which is small in containers, and it disappears with its last user, however that
one dies. Other processes map it through its creator's /proc entry, children through the inherited
descriptor.

    segment of rank r:   | block 0 | pad | block 1 | pad | ...      stride = block, page-aligned

A block is one contiguous run per rank, so that it is one I/O for the disk and, if the engine's
layout allows it, one copy for the GPU.

On a host with several NUMA nodes its pages are made by the rank that copies from them, on the node
of the rank's device.

Huge pages let a disk transfer one piece instead of many. A segment uses the system's reserved ones,
or asks the kernel for huge pages as it fills itself, and takes ordinary ones where none are left
(`make_huge`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import msgspec
import numpy as np

from flexcache.errors import ConfigError, RegistrationError
from flexcache.logs import log_event
from flexcache.processes import tell_of_forks
from flexcache.storage import machine
from flexcache.storage.pieces import PAGE_BYTES, align_up

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# Huge pages for a file in shared memory, where the kernel grants them.
#
# A disk transfers memory in pieces that are contiguous. A block of 2 MiB in ordinary pages may be
# 512 of them, more than some disks take in one request; in a huge page it is one.
#
# The kernel uses huge pages for shared memory by itself only if `shmem_enabled` says so, and on
# most systems that is `never`. Since Linux 6.1 a process may ask for them all the same, unless it
# is `deny`.

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
    # Python's `mmap` does not give that, so this is a second mapping, and the pool's own still has
    # small page table entries. Copies gain nothing from huge pages; disks do.
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


_POPULATE_STEP = 64 << 20
_POPULATE_THREADS = min(4, os.cpu_count() or 1)
_NAME = "flexcache-host-pool"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SegmentRef(msgspec.Struct, frozen=True):
    """Reference by which another process on this host finds a segment."""

    path: str
    inode: int
    stride: int
    num_blocks: int


class HostSegment:
    """One rank's share of the host pool: made by the server, or opened from a reference."""

    def __init__(self, fd: int, stride: int, num_blocks: int) -> None:
        self.fd = fd
        self.stride = stride
        self.num_blocks = num_blocks
        self.size = stride * num_blocks
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self.address = 0
        tell_of_forks(self)

    @classmethod
    def create(
        cls, block_bytes: int, num_blocks: int, hugepages: str = "transparent"
    ) -> HostSegment:
        """Make a segment.

        Args:
            hugepages: As `CacheConfig.hugepages`.

        Raises:
            ConfigError: Too few huge pages are reserved; the message says how many are needed.
        """
        stride = align_up(block_bytes)
        if hugepages == "reserved":
            return cls(_reserved_memory(stride * num_blocks), stride, num_blocks)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, stride * num_blocks)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, stride, num_blocks)

    @classmethod
    def open(cls, ref: SegmentRef) -> HostSegment:
        """Open a segment that a running process of the same user made."""
        try:
            fd = os.open(ref.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegistrationError(f"host pool at {ref.path}: {error.strerror}") from None
        if os.fstat(fd).st_ino != ref.inode or not _is_whole(fd, ref.stride * ref.num_blocks):
            os.close(fd)
            raise RegistrationError(f"host pool at {ref.path} is no longer the server's")
        return cls(fd, ref.stride, ref.num_blocks)

    def ref(self) -> SegmentRef:
        return SegmentRef(
            path=f"/proc/{os.getpid()}/fd/{self.fd}",
            inode=os.fstat(self.fd).st_ino,
            stride=self.stride,
            num_blocks=self.num_blocks,
        )

    def map(
        self, after_each_step: Callable[[], None] = lambda: None, *, node: int | None = None,
        populate: bool = True,
    ) -> None:  # fmt: skip
        """Map the segment and fault its pages in, so that no copy has to wait for one.

        The kernel clears the pages: with ordinary ones that takes about a second for 2 GB per
        thread, with huge ones a fifth of it, but four seconds where it has to move other pages out
        of their way first. Does not hold the interpreter lock.

        Args:
            node: The NUMA node for pages that do not exist yet, best effort; None: any.
            populate: False leaves the pages to other processes, or to first use.
        """
        size = os.fstat(self.fd).st_size  # in whole pages, which may be huge
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self.address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        advise(self.address, size, MADV_HUGEPAGE)
        if node is not None:
            self._prefer(node)
        if populate:
            self._populate(node, after_each_step)

    def _prefer(self, node: int) -> None:
        refusal = machine.prefer_node(self.address, len(self._map or b""), node)
        if refusal:
            log_event(
                logger, logging.WARNING, "host_pool_not_bound", node=node, error=refusal,
                effect="its pages are on the device's NUMA node only as far as this rank makes "
                "them",
                remedy="docker run --cap-add SYS_NICE",
            )  # fmt: skip
        else:
            log_event(logger, logging.INFO, "host_pool_bound", node=node)

    def _populate(self, node: int | None, after_each_step: Callable[[], None]) -> None:
        size = len(self._map or b"")
        file = os.fstat(self.fd)
        asks_no_more = threading.Event()
        if file.st_blksize > mmap.PAGESIZE or file.st_blocks * 512 >= size:
            asks_no_more.set()  # its pages are huge, or all there

        def populate(start: int) -> None:
            length = min(_POPULATE_STEP, size - start)
            if not asks_no_more.is_set() and not make_huge(self.fd, start, length):
                asks_no_more.set()
            # Kernels before 5.14 do not know this advice: pages are then faulted in at first use.
            advise(self.address + start, length, MADV_POPULATE_WRITE)

        settle = None if node is None else partial(machine.stay_on, node)
        with ThreadPoolExecutor(_POPULATE_THREADS, initializer=settle) as threads:
            for _ in threads.map(populate, range(0, size, _POPULATE_STEP)):
                after_each_step()

    def block(self, index: int) -> memoryview:
        """Return the block's bytes, including padding. The segment must be mapped."""
        assert self._view is not None
        start = index * self.stride
        return self._view[start : start + self.stride]

    def close(self) -> None:
        """Release the mapping and the descriptor. Idempotent."""
        if self._view is not None:
            self._view.release()
            self._view = None
        if self._map is not None:
            # An I/O that is being torn down may still export a slice: the mapping then goes
            # with the last of them.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def forked(self) -> None:
        self.close()  # else the pool's memory lives as long as the child

    def __enter__(self) -> HostSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _reserved_memory(size: int) -> int:
    """Create a file of reserved huge pages of the default size, for this process only."""
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(f"hugepages = 'reserved': {error.strerror}") from None
    page_bytes = os.fstat(fd).st_blksize
    size = align_up(size, page_bytes)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mmap.mmap(fd, size).close()  # the file keeps the pages that its first mapping reserves
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"hugepages = 'reserved': {error.strerror}; a segment needs {size // page_bytes} pages "
            f"of {page_bytes >> 10} KiB: raise vm.nr_hugepages, or set 'transparent'"
        ) from None
    return fd


def _is_whole(fd: int, size: int) -> bool:
    """Return whether a file in memory has this size and keeps it: copies must not meet its end."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # it is no such file
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd).st_size >= size
