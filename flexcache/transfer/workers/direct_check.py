"""Self-test of direct I/O on a GPU, on the first page of each file and in the buffer of its own.

Writing is not tested, since no place in the files is free for it: what is written wrongly is found
out by its checksum when it is read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from flexcache.errors import StorageError
from flexcache.ids import OpKind
from flexcache.storage.alignment import PAGE_BYTES
from flexcache.storage.block_io import Direction
from flexcache.storage.checksum import checksum
from flexcache.transfer.workers.device_files import DeviceFiles
from flexcache.transfer.workers.direct_transfer import Addresses, Transfer

ChecksumOf = Callable[[int, int], int]
Copy = Callable[[Addresses, Addresses, Addresses, OpKind], object]

_KINDS = (OpKind.D2H, OpKind.H2D)
_NOWHERE = np.empty(0, np.int64)


def check_reads(files: DeviceFiles, fds: Sequence[int], checksum_of: ChecksumOf) -> bytes:
    """Read the first page of each file to the beginning of the buffer; return the last one.

    Args:
        checksum_of: Returns the device's checksum of the buffer from an offset, of a length.

    Raises:
        StorageError: A page could not be read, or the device has another checksum for it.
    """
    page = b""
    for fd in fds:
        before = _read_page(fd)
        transfer = Transfer(0, 0, Direction.READ, fd, 0, PAGE_BYTES, _NOWHERE, _NOWHERE)
        error = files.move(transfer, 0).error
        if error is not None:
            raise StorageError(error)
        page = _read_page(fd)
        # The server may have written it meanwhile.
        if checksum_of(0, PAGE_BYTES) not in (
            checksum([memoryview(each)]) for each in (before, page)
        ):
            raise StorageError("a page read by cuFile is wrong, or its checksum by the GPU is")
    return page


def check_copies(
    page: bytes, address: int, block_bytes: int, copy: Copy, checksum_of: ChecksumOf
) -> None:
    """Fill the second block of the buffer with copies of a page that is in the first.

    Args:
        address: Of the buffer.
        copy: Makes copies within the device and waits until they have landed.

    Raises:
        StorageError: The block has another checksum.
    """
    num_pages = block_bytes // PAGE_BYTES
    to = address + block_bytes + np.arange(num_pages, dtype=np.int64) * PAGE_BYTES
    sizes = np.full(num_pages, PAGE_BYTES, np.int64)
    for kind in _KINDS:
        copy(to, np.full(num_pages, address, np.int64), sizes, kind)
        if checksum_of(block_bytes, block_bytes) != checksum([memoryview(page * num_pages)]):
            raise StorageError("copies within the GPU are wrong, or their checksum is")


def _read_page(fd: int) -> bytes:
    with mmap.mmap(-1, PAGE_BYTES) as page:  # aligned, as direct I/O demands
        os.preadv(fd, [page], 0)
        return page[:]
