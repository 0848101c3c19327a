"""Direct I/O for KV tensors in host memory.

A block goes through a page-aligned buffer, as direct I/O demands. So no byte of it reaches the KV
tensors before it is verified, and none after its task was revoked.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np

from flexcache.errors import TaskRevokedError
from flexcache.storage.block_io import Completion, Direction, Request
from flexcache.storage.block_io.threads import ThreadedBlockIO
from flexcache.storage.checksum import checksum
from flexcache.transfer.workers.copy_cpu import Addresses, load_copy_runs
from flexcache.transfer.workers.direct_transfer import BAD_BLOCK_ERRORS, Transfer, Transferred
from flexcache.transfer.workers.permit import CopyPermit


class CpuDirectIO:
    """Reads and writes on threads; see `direct_io.DirectIO`.

    Args:
        block_bytes: The most that a transfer moves.
        permit: Checked before bytes are copied into KV tensors.
    """

    def __init__(self, block_bytes: int, depth: int, permit: CopyPermit) -> None:
        self.depth = depth
        self.through_host = ""  # there is no other memory
        self._block_bytes = block_bytes
        self._permit = permit
        self._io = ThreadedBlockIO(depth)
        self._copy = load_copy_runs()
        memory = mmap.mmap(-1, depth * block_bytes, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)  # a write by the parent would move pages in mid-read
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # a device takes one large piece faster than many
        self._buffers = memoryview(memory)
        self._buffers_address = int(np.frombuffer(self._buffers, np.uint8).ctypes.data)
        self._free = list(range(depth))
        self._in_flight: dict[int, tuple[Transfer, int]] = {}  # and its buffer
        self._ended: list[Transferred] = []

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            buffer = self._free.pop()
            try:
                self._start(transfer, buffer)
            except TaskRevokedError as error:
                self._free.append(buffer)
                self._ended.append(Transferred(transfer.token, str(error)))

    def _start(self, transfer: Transfer, buffer: int) -> None:
        self._require_permit(transfer)
        if transfer.direction is Direction.WRITE:
            self._gather(transfer, buffer)
        self._in_flight[transfer.token] = transfer, buffer
        pieces = [self._bytes(transfer, buffer)]
        self._io.submit(
            [Request(transfer.token, transfer.direction, transfer.fd, transfer.offset, pieces)]
        )

    def reap(self) -> list[Transferred]:
        ended, self._ended = self._ended, []
        return ended + [self._end(completion) for completion in self._io.reap()]

    def _end(self, completion: Completion) -> Transferred:
        transfer, buffer = self._in_flight.pop(completion.token)
        try:
            return self._judge(transfer, buffer, completion)
        finally:
            self._free.append(buffer)

    def _judge(self, transfer: Transfer, buffer: int, completion: Completion) -> Transferred:
        token, result = transfer.token, completion.result
        problem = completion.problem(transfer.length)
        if problem is not None:
            is_bad = result >= 0 or -result in BAD_BLOCK_ERRORS
            return Transferred(token, problem, is_bad=is_bad)
        found = checksum([self._bytes(transfer, buffer)])
        if transfer.direction is Direction.WRITE:
            return Transferred(token, None, found)
        if found != transfer.expected:
            return Transferred(token, "checksum mismatch", is_bad=True)
        try:
            self._scatter(transfer, buffer)
        except TaskRevokedError as error:
            return Transferred(token, str(error))
        return Transferred(token, None)

    def _require_permit(self, transfer: Transfer) -> None:
        self._permit.task_id = transfer.task_id
        self._permit.check()

    def _bytes(self, transfer: Transfer, buffer: int) -> memoryview:
        """Return the memory that the file's bytes are read into or written from."""
        start = buffer * self._block_bytes
        return self._buffers[start : start + transfer.length]

    def _gather(self, transfer: Transfer, buffer: int) -> None:
        places = self._places(transfer, buffer)
        self._copy(places, transfer.addresses, transfer.sizes, self._permit)
        num_used = int(transfer.sizes.sum())
        self._bytes(transfer, buffer)[num_used:] = bytes(transfer.length - num_used)

    def _scatter(self, transfer: Transfer, buffer: int) -> None:
        self._require_permit(transfer)
        places = self._places(transfer, buffer)
        self._copy(transfer.addresses, places, transfer.sizes, self._permit)

    def _places(self, transfer: Transfer, buffer: int) -> Addresses:
        """Return where each run is in a buffer."""
        start = self._buffers_address + buffer * self._block_bytes
        places: Addresses = start + np.cumsum(transfer.sizes) - transfer.sizes
        return places

    def close(self) -> None:
        self._io.close()
