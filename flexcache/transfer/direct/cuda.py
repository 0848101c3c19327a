"""Direct I/O for KV tensors in a GPU's memory: by NVIDIA's GPUDirect Storage, past DRAM.

A block goes through a buffer in the GPU's memory, of which alone cuFile knows:

    read     file --cuFile--> buffer --is the checksum right?--> KV tensors
    write    KV tensors --> buffer --checksum, then cuFile--> file

So each is one I/O of whole pages, whatever the layout of the KV tensors, and no byte of a block
reaches them before the block is verified. The checksum is the SSD tier's own (`digest_kernel`).

Never run on a GPU.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import torch

from flexcache.errors import DeviceLostError, NoDirectPathError, StorageError, TaskRevokedError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.block_io import Direction
from flexcache.storage.pieces import PAGE_BYTES, align_up, checksum
from flexcache.transfer.copier import Addresses, CopyLane, CopyPermit, Runs
from flexcache.transfer.copy_ways import describe
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.direct.cufile import CuFile, DeviceFiles
from flexcache.transfer.direct.ops import Transfer

logger = logging.getLogger(__name__)

Transfers = list[Transfer]
Then = Callable[[Transfers], None]

_LANES = {Direction.READ: CopyLane.LOADS, Direction.WRITE: CopyLane.STORES}


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Transfers whose next step was queued on the device together, and what follows it."""

    transfers: Transfers
    done: torch.cuda.Event
    then: Then


class CudaDirectIO:
    """Reads and writes by cuFile; see `DirectIO`.

    Args:
        copier: The attached copier of the device, which is closed after this.
        fds: The files that transfers will name, open with O_DIRECT.
        block_bytes: The length of every transfer.
        depth: At least two.
        permit: Checked before bytes are copied from or to KV tensors.

    Raises:
        NoDirectPathError: Something is missing, refused, or does not do what it should.
    """

    def __init__(
        self, device: torch.device, copier: CudaCopier, fds: Sequence[int], block_bytes: int,
        depth: int, permit: CopyPermit,
    ) -> None:  # fmt: skip
        self.depth = depth
        self.through_host = ""
        self._device = device
        self._copier = copier
        self._streams = copier.streams
        self._block_bytes = block_bytes
        self._permit = permit
        self._free = [block_bytes * place for place in range(depth)]
        self._on_their_way: list[Transfer] = []
        self._lanes = list(_LANES.values())
        """Those to wait for when closing."""
        self._batches: list[_Batch] = []
        self._ended: list[Transfer] = []
        try:
            self._kernel = _load_kernel()
            library = CuFile.load()
            self._streams.bind()
            self._memory = self._make_buffer()
            self._spaces = {
                direction: self._kernel.workspace(depth, block_bytes, device)
                for direction in _LANES
            }
            self._address = align_up(self._memory.data_ptr())
            self._zeros = self._address + depth * block_bytes
            self._files = DeviceFiles(
                library, fds, self._address, depth * block_bytes, depth, self._streams.bind
            )
            self.through_host = self._files.through_host
        except Exception as error:
            raise NoDirectPathError(describe(error)) from error
        try:
            self._test(fds)
        except Exception as error:
            self.close()
            raise NoDirectPathError(describe(error)) from error
        log_event(
            logger, logging.INFO, "gpu_direct_io_opened", device=device, files=len(fds),
            gpu_bytes=sum(each.nbytes for each in (self._memory, *self._spaces.values())),
        )  # fmt: skip

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.place = self._free.pop()
            self._on_their_way.append(transfer)
            # It fills the buffer alone: its task is asked about before the bytes go on.
            if transfer.direction is Direction.READ:
                self._files.start(transfer)
        writes = [each for each in transfers if each.direction is Direction.WRITE]
        self._queue(self._permitted(writes), self._gather)

    def reap(self) -> list[Transfer]:
        arrived = []
        for transfer in self._files.take_ended():
            if transfer.error is None and transfer.direction is Direction.READ:
                arrived.append(transfer)
                continue
            if transfer.error is not None:
                # raises if the device is lost
                torch.cuda.Event().record(self._streams[_LANES[transfer.direction]])
            self._end(transfer)
        self._queue(arrived, self._sum_up)
        done = [batch for batch in self._batches if batch.done.query()]
        self._batches = [batch for batch in self._batches if batch not in done]
        for batch in done:
            batch.then(batch.transfers)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            try:
                self._streams.settle(lane)
            except DeviceLostError as error:
                log_event(logger, logging.WARNING, "gpu_direct_io_not_settled", error=error)
        self._files.close()

    def check(self) -> None:
        """Raise `AssertionError` unless all is consistent."""
        places = [*self._free, *(transfer.place for transfer in self._on_their_way)]
        assert sorted(places) == [self._block_bytes * place for place in range(self.depth)]
        queued = [each for batch in self._batches for each in batch.transfers]
        assert len(queued) == len(set(queued))
        assert set(self._on_their_way) >= set(queued)

    # -- steps, queued on the device; each returns what follows ------------------------------------

    def _queue(self, transfers: Transfers, step: Callable[[Transfers], Then]) -> None:
        """Queue a step of transfers of one direction. If it fails, they end.

        Raises:
            DeviceLostError: The device no longer works.
        """
        if not transfers:
            return
        lane = _LANES[transfers[0].direction]
        try:
            self._streams.bind()
            with torch.cuda.stream(self._streams[lane]):
                then, done = step(transfers), torch.cuda.Event()
                done.record()
        except DeviceLostError:
            raise
        except Exception as error:  # torch's, Triton's, the driver's
            self._streams.settle(lane)
            self._end_all(transfers, describe(error))
        else:
            self._batches.append(_Batch(transfers, done, then))

    def _gather(self, transfers: Transfers) -> Then:
        """Copy blocks that are to be written into the buffer."""
        self._copy(transfers, OpKind.D2H)
        return self._sum_up(transfers)

    def _sum_up(self, transfers: Transfers) -> Then:
        """Compute the checksums of blocks in the buffer."""
        places = np.array([self._place(transfer) for transfer in transfers], np.int64)
        space = self._spaces[transfers[0].direction]
        lanes = self._kernel.start(places, self._block_bytes, space)
        return partial(self._take_checksums, lanes)

    def _scatter(self, transfers: Transfers) -> Then:
        """Copy blocks that were read to where they belong."""
        self._copy(transfers, OpKind.H2D)
        return self._end_all

    def _take_checksums(self, lanes: torch.Tensor, transfers: Transfers) -> None:
        """Write what is to be written; let in what was read and is right."""
        found = self._kernel.finish(lanes, self._block_bytes).tolist()
        right = []
        for transfer, each in zip(transfers, found, strict=True):
            if transfer.direction is Direction.WRITE:
                transfer.checksum = each
                self._files.start(transfer)
            elif each == transfer.expected:
                right.append(transfer)
            else:
                transfer.fail("checksum mismatch", is_bad=True)
                self._end(transfer)
        self._queue(self._permitted(right), self._scatter)

    def _copy(self, transfers: Transfers, kind: OpKind) -> None:
        """Queue copies between KV tensors and the buffer, named as if the buffer were the host."""
        runs = [self._runs(transfer, padded=kind is OpKind.D2H) for transfer in transfers]
        in_kv, in_buffer, sizes = map(np.concatenate, zip(*runs, strict=True))
        to, start = (in_kv, in_buffer) if kind is OpKind.H2D else (in_buffer, in_kv)
        self._copier.start(Runs(to, start, sizes), kind, None)

    def _runs(self, transfer: Transfer, padded: bool) -> tuple[Addresses, Addresses, Addresses]:
        """Return where a block's runs are among the KV tensors and in the buffer, and their sizes.

        Args:
            padded: Whether zeros follow them.
        """
        in_kv, sizes = transfer.addresses, transfer.sizes
        padding = transfer.length - int(sizes.sum())
        if padded and padding:
            in_kv, sizes = np.append(in_kv, self._zeros), np.append(sizes, padding)
        return in_kv, self._place(transfer) + np.cumsum(sizes) - sizes, sizes

    # -- ends --------------------------------------------------------------------------------------

    def _permitted(self, transfers: Transfers) -> Transfers:
        """Return those that may use KV tensors; the others end."""
        permitted = []
        for transfer in transfers:
            self._permit.task_id = transfer.task_id
            if self._permit.is_revoked:
                transfer.fail(str(TaskRevokedError()))
                self._end(transfer)
            else:
                permitted.append(transfer)
        return permitted

    def _end_all(self, transfers: Transfers, error: str | None = None) -> None:
        for transfer in transfers:
            transfer.error = error
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        if transfer.error is not None:
            # Of bytes that are not in the file.
            transfer.checksum = 0
        self._on_their_way.remove(transfer)
        self._free.append(transfer.place)
        self._ended.append(transfer)

    def _place(self, transfer: Transfer) -> int:
        return self._address + transfer.place

    # -- opening -----------------------------------------------------------------------------------

    def _make_buffer(self) -> torch.Tensor:
        """Return memory for the blocks in flight, a page of zeros behind them, and to align it."""
        # Not straight into the KV tensors: cuFile pins the memory that it moves directly, in a
        # window (BAR1) that is smaller than many GPUs' memory; an engine may unmap its KV (sleep
        # mode); and what is unaligned or small it bounces through memory of its own, as most
        # layouts would make of a block. The copy within the GPU costs next to nothing.
        size = self.depth * self._block_bytes
        with torch.cuda.stream(self._streams[CopyLane.STORES]):
            memory = torch.empty(size + 2 * PAGE_BYTES, dtype=torch.uint8, device=self._device)
            memory[size:].copy_(torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8))
        self._streams.settle(CopyLane.STORES)
        return memory

    def _test(self, fds: Sequence[int]) -> None:
        """Read the first page of each file, and copy the last of them to fill the second block of
        the buffer.

        Writing is not tested, since no place in the files is free for it: what is written wrongly
        is found out by its checksum when it is read.

        Raises:
            StorageError: A page could not be read, or the device has another checksum for it.
        """
        page = [self._test_read(fd) for fd in fds][-1]
        num_pages = self._block_bytes // PAGE_BYTES
        first = np.full(num_pages, self._address, np.int64)
        second = first + self._block_bytes + np.arange(num_pages, dtype=np.int64) * PAGE_BYTES
        runs = Runs(second, first, np.full(num_pages, PAGE_BYTES, np.int64))
        for kind in (OpKind.D2H, OpKind.H2D):
            self._copier.start(runs, kind, None)
            self._streams.settle(CopyLane.of(kind, urgent=False))
            found = self._checksum_of(self._block_bytes, self._block_bytes)
            if found != checksum([memoryview(page * num_pages)]):
                raise StorageError("copies within the GPU are wrong, or their checksum is")

    def _test_read(self, fd: int) -> bytes:
        """Read the first page of a file to the beginning of the buffer; return it."""
        before, nowhere = _read_page(fd), np.empty(0, np.int64)
        transfer = Transfer(None, 0, Direction.READ, fd, 0, PAGE_BYTES, nowhere, nowhere)
        self._files.move(transfer)
        if transfer.error is not None:
            raise StorageError(transfer.error)
        page = _read_page(fd)
        # The server may have written it meanwhile.
        right = [checksum([memoryview(each)]) for each in (before, page)]
        if self._checksum_of(0, PAGE_BYTES) not in right:
            raise StorageError("a page read by cuFile is wrong, or its checksum by the GPU is")
        return page

    def _checksum_of(self, offset: int, length: int) -> int:
        places = np.array([self._address + offset], np.int64)
        with torch.cuda.stream(self._streams[CopyLane.LOADS]):
            lanes = self._kernel.start(places, length, self._spaces[Direction.READ])
        self._streams.settle(CopyLane.LOADS)
        return int(self._kernel.finish(lanes, length)[0])


def _read_page(fd: int) -> bytes:
    with mmap.mmap(-1, PAGE_BYTES) as page:  # aligned, as direct I/O demands
        os.preadv(fd, [page], 0)
        return page[:]


def _load_kernel() -> ModuleType:
    try:
        from flexcache.transfer.direct import digest_kernel
    except ImportError as error:
        raise NoDirectPathError(f"blocks are verified on the GPU with Triton: {error}") from None
    return digest_kernel
