"""The DRAM tier's memory: one shared segment per stored copy of the KV.

A segment is an anonymous file in memory (memfd), not a named one: it does not count against the
size of /dev/shm, which containers keep small, and is gone with its last user however that dies.
Other processes map it through the maker's /proc entry, children through the inherited descriptor.

    segment of rank r:   | block 0 | pad | block 1 | pad | ...      stride = block, page-aligned

A block is one contiguous run per rank, so that it is one I/O for the disk and, where the engine's
layout allows, one copy for the GPU.

Huge pages save address look-ups, and make one piece of what a disk would get as many. A segment is
of the system's reserved ones, or of ordinary pages that the kernel is asked to join where
/sys/kernel/mm/transparent_hugepage/shmem_enabled lets it; most systems do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import msgspec
import numpy as np

from flexcache.errors import ConfigError, RegistrationError
from flexcache.storage.alignment import align_up

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_STEP = 64 << 20
_POPULATE_THREADS = min(4, os.cpu_count() or 1)
_LIBC = ctypes.CDLL(None)
_NAME = "flexcache-host-pool"


class SegmentRef(msgspec.Struct, frozen=True):
    """How another process of this host finds a segment."""

    path: str
    inode: int
    stride: int
    num_blocks: int


class HostSegment:
    """One rank's share of the host pool. Made by the server, or mapped from its reference."""

    def __init__(self, fd: int, stride: int, num_blocks: int) -> None:
        self.fd = fd
        self.stride = stride
        self.num_blocks = num_blocks
        self.size = stride * num_blocks
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self.address = 0

    @classmethod
    def create(
        cls, block_bytes: int, num_blocks: int, hugepages: str = "transparent"
    ) -> HostSegment:
        """Make a segment.

        Args:
            hugepages: As `CacheConfig.hugepages`.

        Raises:
            ConfigError: Too few huge pages are reserved; says how many it takes.
        """
        stride = align_up(block_bytes)
        if hugepages == "reserved":
            return cls(_reserved_memory(stride * num_blocks), stride, num_blocks)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, stride * num_blocks)
        return cls(fd, stride, num_blocks)

    @classmethod
    def open(cls, ref: SegmentRef) -> HostSegment:
        """Open a segment that a living process of the same user made."""
        try:
            fd = os.open(ref.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegistrationError(f"host pool at {ref.path}: {error.strerror}") from None
        if os.fstat(fd).st_ino != ref.inode:
            os.close(fd)
            raise RegistrationError(f"host pool at {ref.path} is not the server's any more")
        return cls(fd, ref.stride, ref.num_blocks)

    def ref(self) -> SegmentRef:
        return SegmentRef(
            path=f"/proc/{os.getpid()}/fd/{self.fd}",
            inode=os.fstat(self.fd).st_ino,
            stride=self.stride,
            num_blocks=self.num_blocks,
        )

    def map(self, after_each_step: Callable[[], None] = lambda: None) -> None:
        """Map the segment and fault its pages in, so that no copy has to wait for one.

        The system clears the pages meanwhile: with ordinary ones that takes a second for 2 GB per
        thread or so, with reserved huge ones a fifth of it. Does not hold the interpreter lock.
        """
        size = os.fstat(self.fd).st_size  # of whole pages, which may be huge
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self.address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        self._advise(0, size, _MADV_HUGEPAGE)

        def populate(start: int) -> None:
            # A kernel before 5.14 does not know the advice: pages then come at first use.
            self._advise(start, min(_POPULATE_STEP, size - start), _MADV_POPULATE_WRITE)

        with ThreadPoolExecutor(_POPULATE_THREADS) as threads:
            for _ in threads.map(populate, range(0, size, _POPULATE_STEP)):
                after_each_step()

    def _advise(self, start: int, length: int, advice: int) -> None:
        _LIBC.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(length), advice)

    def block(self, index: int) -> memoryview:
        """The block's run of bytes, padding included. The segment must be mapped."""
        assert self._view is not None
        start = index * self.stride
        return self._view[start : start + self.stride]

    def close(self) -> None:
        """Give the mapping and the descriptor back. Idempotent."""
        if self._view is not None:
            self._view.release()
            self._view = None
        if self._map is not None:
            # A slice may still be exported by an I/O that is being torn down: the mapping then
            # goes with the last of them.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> HostSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _reserved_memory(size: int) -> int:
    """Create a file of reserved huge pages of the system's default size, for this process alone."""
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_HUGETLB)
    except OSError as error:
        raise ConfigError(f"hugepages = 'reserved': {error.strerror}") from None
    page_bytes = os.fstat(fd).st_blksize
    size = align_up(size, page_bytes)
    try:
        os.ftruncate(fd, size)
        mmap.mmap(fd, size).close()  # the file keeps what its first mapping sets apart
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"hugepages = 'reserved': {error.strerror}; a segment takes {size // page_bytes} pages "
            f"of {page_bytes >> 10} KiB: raise vm.nr_hugepages, or set 'transparent'"
        ) from None
    return fd
