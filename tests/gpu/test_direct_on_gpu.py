"""Blocks between a GPU and files, past DRAM, and their checksums on the GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_io import open_direct
from fake_gpu import FakeDigests
from gpu_machines import FakeMachine, Machine

from flexcache.errors import NoDirectPathError
from flexcache.storage.block_io import Direction
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.transfer.copier import CopyPermit
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.ops import Transfer

PAGE = 4096
NUM_LAYERS, NUM_BLOCKS, DEPTH = 4, 8, 4
RUN = 65_536 - 1024  # of a block in a layer: the last page of four of them is not full


@pytest.fixture
def digests(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The checksum kernels."""
    if isinstance(machine, FakeMachine):
        fake: Any = FakeDigests(torch.cuda)
        monkeypatch.setitem(sys.modules, "flexcache.transfer.direct.digest_kernel", fake)
        return fake
    pytest.importorskip("triton")
    from flexcache.transfer.direct import digest_kernel

    return digest_kernel


@pytest.mark.parametrize("num_pages", [1, 3, 512])
@pytest.mark.parametrize("num_pieces", [1, 5, 64])
def test_the_gpu_has_the_checksums_of_the_host(
    machine: Machine, digests: Any, num_pages: int, num_pieces: int
) -> None:
    length = num_pages * PAGE
    pieces = torch.empty((num_pieces, length), dtype=torch.uint8, device=machine.device)
    pieces.random_(0, 256)
    torch.cuda.synchronize()
    addresses = pieces.data_ptr() + np.random.default_rng(0).permutation(num_pieces) * length
    space = digests.workspace(num_pieces, length, machine.device)
    lanes = digests.start(addresses, length, space)
    torch.cuda.synchronize()
    on_host = pieces.cpu().numpy()
    rows = (addresses - pieces.data_ptr()) // length
    expected = [checksum([memoryview(on_host[row])]) for row in rows]
    assert digests.finish(lanes, length).tolist() == expected


class Rig:
    """Direct I/O between a file of slots and the layers of a model.

    Attributes:
        kv: Layers, blocks, bytes.
    """

    def __init__(self, machine: Machine, path: Path) -> None:
        self.kv = torch.empty(
            (NUM_LAYERS, NUM_BLOCKS, RUN), dtype=torch.uint8, device=machine.device
        )
        self.length = -(-NUM_LAYERS * RUN // PAGE) * PAGE
        self.path = path
        path.write_bytes(bytes(PAGE + NUM_BLOCKS * self.length))
        self.fd = open_direct(path)
        self.segment = HostSegment.create(PAGE, 1)
        self.segment.map()
        self.copier = CudaCopier(machine.device)
        self.copier.attach(self.segment)
        self._tokens = count()
        try:
            self.io = CudaDirectIO(
                machine.device, self.copier, [self.fd], self.length, DEPTH, CopyPermit()
            )
        except NoDirectPathError as error:
            self.release()
            pytest.skip(f"no direct path: {error}")

    def transfer(self, direction: Direction, block: int, slot: int, expected: int = 0) -> Transfer:
        layers = np.arange(NUM_LAYERS, dtype=np.int64)
        return Transfer(
            next(self._tokens), 1, direction, self.fd, PAGE + slot * self.length, self.length,
            self.kv.data_ptr() + (layers * NUM_BLOCKS + block) * RUN, np.full(NUM_LAYERS, RUN),
            expected,
        )  # fmt: skip

    def run(self, *transfers: Transfer) -> list[Transfer]:
        self.io.submit(transfers)
        ended: dict[int, Transfer] = {}
        while len(ended) < len(transfers):
            ended |= {each.token: each for each in self.io.reap()}
        return [ended[each.token] for each in transfers]

    def slot(self, slot: int) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), self.length, PAGE + slot * self.length)

    def close(self) -> None:
        self.io.close()
        self.release()

    def release(self) -> None:
        self.copier.close()
        self.segment.close()
        os.close(self.fd)


@pytest.fixture
def rig(machine: Machine, digests: Any, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(machine, tmp_path / "slots")
    yield rig
    rig.close()


def test_blocks_go_to_a_file_and_back(rig: Rig) -> None:
    rig.kv.random_(0, 256)
    torch.cuda.synchronize()
    before = rig.kv.cpu()
    written = rig.run(*(rig.transfer(Direction.WRITE, block, 7 - block) for block in range(DEPTH)))
    for block, each in enumerate(written):
        expected = before[:, block].contiguous().numpy().tobytes().ljust(rig.length, b"\0")
        assert each.error is None
        assert rig.slot(7 - block) == expected
        assert each.checksum == checksum([memoryview(expected)])
    rig.kv.fill_(0)
    torch.cuda.synchronize()
    read = rig.run(
        *(
            rig.transfer(Direction.READ, 2 * block, 7 - block, each.checksum)
            for block, each in enumerate(written)
        )
    )
    assert [each.error for each in read] == [None] * DEPTH
    after = rig.kv.cpu()
    assert torch.equal(after[:, ::2], before[:, :DEPTH])
    assert not after[:, 1::2].any()


def test_a_block_that_is_not_right_stays_out_of_the_layers(rig: Rig) -> None:
    rig.kv.random_(0, 256)
    torch.cuda.synchronize()
    [written] = rig.run(rig.transfer(Direction.WRITE, 0, 0))
    before = rig.kv.cpu()
    [read] = rig.run(rig.transfer(Direction.READ, 3, 0, written.checksum ^ 1))
    assert read.error == "checksum mismatch"
    assert torch.equal(rig.kv.cpu(), before)
