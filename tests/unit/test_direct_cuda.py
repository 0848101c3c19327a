"""`CudaDirectIO` on a fake GPU and a fake libcufile: bytes, order, and what fails.

Copies land late, and so do the bytes of file I/O; that they never meet is checked by the fakes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import until
from disk_io import open_direct
from fake_gpu import FakeDigests, FakeGpu, FakeTorchCuda, fake_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexcache.errors import MissingDependencyError, NoDirectPathError
from flexcache.storage.block_io import Direction
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.transfer.copier import CopyLane, CopyPermit
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.cufile import CuFile
from flexcache.transfer.direct.ops import Transfer

PAGE = 4096
NUM_LAYERS, RUN = 3, 2000  # a block's run in each layer; three of them do not fill two pages
BLOCK = NUM_LAYERS * RUN
LENGTH = 2 * PAGE
NUM_BLOCKS = 12
DEPTH = 3
READ, WRITE = Direction.READ, Direction.WRITE


class Rig:
    """Direct I/O, a file of slots behind a page, and the KV tensor of a model with three layers.

    Attributes:
        kv: The tensor's bytes: layers, blocks, a block's run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, path: Path) -> None:
        self.gpu = gpu
        self.torch = FakeTorchCuda(gpu)
        self.torch.install(monkeypatch)
        self.kernel = FakeDigests(self.torch)
        monkeypatch.setitem(sys.modules, "flexcache.transfer.direct.digest_kernel", self.kernel)
        monkeypatch.setitem(sys.modules, "flexcache.transfer.copy_kernel", None)
        self.random = np.random.default_rng(0)
        path.write_bytes(self.random.bytes(PAGE + NUM_BLOCKS * LENGTH))
        self.fd = open_direct(path)
        self.path = path
        self.device = torch.device("cuda", 1)
        self._kv = gpu.allocate(NUM_LAYERS * NUM_BLOCKS * RUN, 1)
        self.kv = self._kv.seen.reshape(NUM_LAYERS, NUM_BLOCKS, RUN)
        self.kv[:] = self.random.integers(0, 256, self.kv.shape, np.uint8)
        self.copier = CudaCopier(self.device)
        self.segment = HostSegment.create(BLOCK, 4)
        self.segment.map()
        self.copier.attach(self.segment)
        self.permit_words = np.zeros(2, np.uint64)
        self.permit = CopyPermit(memoryview(self.permit_words))
        self._tokens = count()
        self.io: CudaDirectIO | None = None

    def open(self) -> CudaDirectIO:
        self.io = CudaDirectIO(self.device, self.copier, [self.fd], LENGTH, DEPTH, self.permit)
        return self.io

    def transfer(
        self, direction: Direction, block: int, slot: int, expected: int = 0, task_id: int = 5
    ) -> Transfer:
        layers = np.arange(NUM_LAYERS, dtype=np.int64)
        return Transfer(
            next(self._tokens), task_id, direction, self.fd, PAGE + slot * LENGTH, LENGTH,
            self._kv.address + (layers * NUM_BLOCKS + block) * RUN, np.full(NUM_LAYERS, RUN),
            expected,
        )  # fmt: skip

    def finish(self, number: int) -> dict[int, Transfer]:
        """Wait until this many transfers have ended."""
        assert self.io is not None
        ended: dict[int, Transfer] = {}
        io = self.io

        def have_all_ended() -> bool:
            ended.update((each.token, each) for each in io.reap())
            io.check()
            return len(ended) == number

        until(have_all_ended)
        return ended

    def run(self, *transfers: Transfer) -> list[Transfer]:
        assert self.io is not None
        self.io.submit(transfers)
        ended = self.finish(len(transfers))
        return [ended[each.token] for each in transfers]

    def block(self, block: int) -> bytes:
        return self.kv[:, block].tobytes()

    def slot(self, slot: int) -> bytes:
        return self.path.read_bytes()[PAGE + slot * LENGTH :][:LENGTH]

    def sum_of(self, slot: int) -> int:
        return checksum([memoryview(self.slot(slot))])

    def close(self) -> None:
        if self.io is not None:
            self.io.close()
        self.copier.close()
        self.segment.close()
        os.close(self.fd)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, tmp_path: Path) -> Iterator[Rig]:
    gpu.set_speed(late_us=200)
    rig = Rig(monkeypatch, gpu, tmp_path / "slots")
    yield rig
    rig.close()
    assert gpu.num_files == 0
    assert gpu.num_buffers == int(gpu.is_lost)


def test_blocks_are_written_with_their_checksums_and_read_back(rig: Rig) -> None:
    rig.open()
    written = [rig.block(block) for block in range(DEPTH)]
    ended = rig.run(*(rig.transfer(WRITE, block, 7 - block) for block in range(DEPTH)))
    for block, each in enumerate(ended):
        assert each.error is None
        assert rig.slot(7 - block) == written[block].ljust(LENGTH, b"\0")
        assert each.checksum == rig.sum_of(7 - block)
    before = rig.kv.copy()
    ended = rig.run(
        *(rig.transfer(READ, 9 - block, 7 - block, ended[block].checksum) for block in range(DEPTH))
    )
    assert [each.error for each in ended] == [None] * DEPTH
    for block in range(DEPTH):
        assert rig.block(9 - block) == written[block]
    assert np.array_equal(rig.kv[:, :7], before[:, :7])
    assert np.array_equal(rig.kv[:, 10:], before[:, 10:])
    assert rig.gpu.num_bounced == 0


moves = st.tuples(st.sampled_from([READ, WRITE]), st.integers(0, NUM_BLOCKS - 1))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(st.lists(moves, min_size=1, max_size=DEPTH), max_size=6))
def test_any_transfers_leave_what_a_model_says(
    rig: Rig, batches: list[list[tuple[Direction, int]]]
) -> None:
    """Block ``n`` is written to slot ``n`` and read from it; each third checksum is a wrong one."""
    if rig.io is None:
        rig.open()
    for batch in batches:
        blocks, slots = rig.kv.copy(), [rig.slot(slot) for slot in range(NUM_BLOCKS)]
        directions = {block: direction for direction, block in batch}
        ended = rig.run(
            *(
                rig.transfer(direction, block, block, rig.sum_of(block) ^ (block % 3 == 0))
                for block, direction in directions.items()
            )
        )
        for (block, direction), each in zip(directions.items(), ended, strict=True):
            is_wrong = direction is READ and block % 3 == 0
            assert each.error == ("checksum mismatch" if is_wrong else None)
            if direction is WRITE:
                slots[block] = blocks[:, block].tobytes().ljust(LENGTH, b"\0")
            elif not is_wrong:
                read = np.frombuffer(slots[block][:BLOCK], np.uint8)
                blocks[:, block] = read.reshape(NUM_LAYERS, RUN)
        assert np.array_equal(rig.kv, blocks)
        assert [rig.slot(slot) for slot in range(NUM_BLOCKS)] == slots
        rig.kv[:] = rig.random.integers(0, 256, rig.kv.shape, np.uint8)


def test_a_write_begins_when_its_block_and_checksum_are_there(rig: Rig) -> None:
    io = rig.open()
    before = rig.slot(0)
    rig.gpu.freeze()
    io.submit([rig.transfer(WRITE, 0, 0)])
    rig.gpu.wait_quiet()
    assert not io.reap()
    assert rig.slot(0) == before
    rig.gpu.thaw()
    [ended] = rig.finish(1).values()
    assert rig.slot(0) == rig.block(0).ljust(LENGTH, b"\0")
    assert ended.checksum == rig.sum_of(0)


def test_a_read_has_ended_when_its_bytes_are_in_the_tensors(rig: Rig) -> None:
    io = rig.open()
    rig.gpu.forget_copy_calls()
    rig.kernel.after = rig.gpu.freeze
    io.submit([rig.transfer(READ, 4, 0, rig.sum_of(0))])
    ended: list[Transfer] = []

    def is_being_copied() -> bool:
        ended.extend(io.reap())
        return bool(rig.gpu.copy_calls)

    until(is_being_copied)
    ended += io.reap()
    assert not ended
    rig.gpu.thaw()
    rig.finish(1)
    assert rig.block(4) == rig.slot(0)[:BLOCK]


# -- nothing wrong gets into the KV tensors ------------------------------------------------------


def test_a_block_with_another_checksum_never_reaches_the_tensors(rig: Rig) -> None:
    rig.open()
    [written] = rig.run(rig.transfer(WRITE, 0, 0))
    with open(rig.path, "r+b") as file:
        file.seek(PAGE + 17)
        file.write(bytes([rig.slot(0)[17] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    before = rig.kv.copy()
    [ended] = rig.run(rig.transfer(READ, 4, 0, written.checksum))
    assert ended.error == "checksum mismatch"
    assert ended.is_bad
    assert np.array_equal(rig.kv, before)


@pytest.mark.parametrize("call", ["cuFileRead", "cuFileWrite"])
def test_bytes_that_the_library_spoils_are_found_out(rig: Rig, call: str) -> None:
    rig.open()
    rig.gpu.corrupt(call, to_device=call == "cuFileRead")
    [written] = rig.run(rig.transfer(WRITE, 0, 0))
    assert written.error is None
    [ended] = rig.run(rig.transfer(READ, 4, 0, written.checksum))
    assert ended.error == "checksum mismatch"


def test_a_revoked_task_does_not_write(rig: Rig) -> None:
    rig.open()
    before = rig.slot(2)
    rig.permit_words[0] = 5
    ended, other = rig.run(rig.transfer(WRITE, 0, 2), rig.transfer(WRITE, 1, 3, task_id=6))
    assert ended.error is not None
    assert "revoked" in ended.error
    assert rig.slot(2) == before
    assert other.error is None


def test_what_is_revoked_while_it_is_read_stays_out_of_the_tensors(rig: Rig) -> None:
    io = rig.open()
    expected = rig.sum_of(0)
    rig.gpu.freeze()
    io.submit([rig.transfer(READ, 4, 0, expected)])
    until(lambda: rig.gpu.num_transfers)
    rig.permit_words[1] = 5
    rig.gpu.thaw()
    before = rig.kv.copy()
    [ended] = rig.finish(1).values()
    assert ended.error is not None
    assert "revoked" in ended.error
    assert np.array_equal(rig.kv, before)


# -- what fails ----------------------------------------------------------------------------------


def test_an_io_that_fails_ends_alone(rig: Rig) -> None:
    rig.open()
    rig.gpu.refuse("cuFileRead", errno.EIO, from_call=2)
    transfers = [rig.transfer(READ, slot, slot, rig.sum_of(slot)) for slot in range(2)]
    rig.gpu.freeze()
    assert rig.io is not None
    rig.io.submit(transfers)
    rig.gpu.thaw()
    errors = [ended.error for ended in rig.finish(2).values()]
    assert sorted(map(str, errors)) == ["None", "cuFileRead: Input/output error"]
    rig.gpu.refuse_nothing()
    [ended] = rig.run(rig.transfer(READ, 1, 1, rig.sum_of(1)))
    assert ended.error is None


def test_a_full_disk_is_an_error_of_the_write(rig: Rig) -> None:
    rig.open()
    rig.gpu.refuse("cuFileWrite", errno.ENOSPC)
    [ended] = rig.run(rig.transfer(WRITE, 0, 0))
    assert ended.error == "cuFileWrite: No space left on device"
    assert (ended.checksum, ended.is_bad) == (0, False)


def test_a_file_that_ends_early_is_an_error_of_the_read(rig: Rig) -> None:
    rig.open()
    os.truncate(rig.path, PAGE + LENGTH // 2)
    [ended] = rig.run(rig.transfer(READ, 0, 0))
    assert ended.error == f"{LENGTH // 2} of {LENGTH} bytes moved"
    assert ended.is_bad


@pytest.mark.parametrize(
    ("call", "code", "is_bad"),
    [
        ("cuFileRead", errno.EIO, True),
        ("cuFileRead", errno.ENOMEM, False),
        ("cuFileRead", 5011, False),
        ("cuMemcpyBatchAsync", 1, False),
    ],
)
def test_only_what_the_file_says_makes_a_block_bad(
    rig: Rig, call: str, code: int, is_bad: bool
) -> None:
    rig.open()
    rig.gpu.refuse(call, code)
    [ended] = rig.run(rig.transfer(READ, 0, 0, rig.sum_of(0)))
    assert ended.error is not None
    assert ended.is_bad is is_bad


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_a_launch_that_fails_ends_its_transfers_alone(rig: Rig, direction: Direction) -> None:
    rig.open()
    rig.kernel.error = torch.OutOfMemoryError("no memory for sums")
    [ended] = rig.run(rig.transfer(direction, 0, 0, rig.sum_of(0)))
    assert ended.error == "OutOfMemoryError: no memory for sums"
    [ended] = rig.run(rig.transfer(direction, 0, 0, rig.sum_of(0)))
    assert ended.error is None


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_copies_that_are_refused_end_their_transfers(rig: Rig, direction: Direction) -> None:
    rig.open()
    rig.gpu.refuse("cuMemcpyBatchAsync", 1)
    [ended] = rig.run(rig.transfer(direction, 0, 0, rig.sum_of(0)))
    assert ended.error is not None
    assert "cuMemcpyBatchAsync" in ended.error


def test_a_lost_device_is_told_to_the_owner_and_closing_does_not_raise(rig: Rig) -> None:
    io = rig.open()
    io.submit([rig.transfer(WRITE, 0, 0)])
    rig.gpu.set_faults(is_lost=True)
    with pytest.raises(RuntimeError):
        rig.finish(1)
    io.close()


def test_closing_waits_for_what_is_in_flight(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = ThreadPoolExecutor.shutdown

    def thaw_and_wait(executor: ThreadPoolExecutor, wait: bool) -> None:
        if wait:
            rig.gpu.thaw()
        shutdown(executor, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", thaw_and_wait)
    io = rig.open()
    rig.gpu.freeze()
    io.submit([rig.transfer(READ, 4, 0, rig.sum_of(0))])
    until(lambda: rig.gpu.num_transfers)
    io.close()
    assert not rig.gpu.num_transfers


def test_closing_again_does_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    io = rig.open()
    io.close()
    rig.copier.close()
    io.close()
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def thaw_when_settling(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute no copies until something waits for them."""
    streams, settle = rig.copier.streams, rig.copier.streams.settle

    def thaw_and_settle(lane: CopyLane) -> None:
        rig.gpu.thaw()
        settle(lane)

    rig.gpu.freeze()
    monkeypatch.setattr(streams, "settle", thaw_and_settle)


def test_closing_waits_for_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    io = rig.open()
    thaw_when_settling(rig, monkeypatch)
    io.submit([rig.transfer(WRITE, 0, 0)])
    io.close()
    rig.gpu.thaw()


def test_a_launch_that_fails_leaves_no_copies_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = rig.open()
    rig.kernel.error = RuntimeError("out of resources")
    thaw_when_settling(rig, monkeypatch)
    assert rig.run(rig.transfer(WRITE, 0, 0))[0].error == "out of resources"
    rig.gpu.freeze()
    io.submit([rig.transfer(READ, 1, 1, rig.sum_of(1))])  # to the same place of the buffer
    until(lambda: rig.gpu.num_transfers)
    rig.gpu.thaw()
    rig.finish(1)


# -- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuFileDriverOpen", 5001, "nvidia-fs is not loaded"),
        ("cuFileBufRegister", 5036, "not enough GPU memory"),
        ("cuFileHandleRegister", 5008, "this file system is not supported"),
        ("cuFileRead", 5030, "cuFileRead failed: internal error"),
    ],
)
def test_what_refuses_is_named(rig: Rig, call: str, code: int, text: str) -> None:
    rig.gpu.refuse(call, code)
    with pytest.raises(NoDirectPathError, match=text):
        rig.open()


def test_a_path_through_host_memory_says_so(rig: Rig) -> None:
    """It is correct: what it is good for depends on what there is besides."""
    io = rig.open()
    assert not io.through_host
    io.close()
    rig.gpu.be_compatible()
    assert "compatibility mode: nvidia-fs is not loaded" in rig.open().through_host


def test_without_triton_there_is_no_direct_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flexcache.transfer.direct.digest_kernel", None)
    with pytest.raises(NoDirectPathError, match="verified on the GPU with Triton"):
        rig.open()


def test_without_the_library_there_is_no_direct_path(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> CuFile:
        raise MissingDependencyError("libcufile cannot be loaded")

    monkeypatch.setattr(CuFile, "load", load)
    with pytest.raises(NoDirectPathError, match="libcufile cannot be loaded"):
        rig.open()


@pytest.mark.parametrize("what", ["reads", "copies", "copies back", "checksums"])
def test_what_does_not_do_what_it_should_is_not_used(rig: Rig, what: str) -> None:
    match what:
        case "reads":
            rig.gpu.corrupt("cuFileRead", to_device=True)
        case "checksums":
            rig.kernel.is_wrong = True
        case _:
            rig.gpu.corrupt("cuMemcpyBatchAsync", to_device=True)
    with pytest.raises(NoDirectPathError, match="wrong"):
        rig.open()


def test_a_file_without_o_direct_has_no_direct_path(rig: Rig) -> None:
    os.close(rig.fd)
    rig.fd = os.open(rig.path, os.O_RDWR)
    with pytest.raises(NoDirectPathError, match="not open with O_DIRECT"):
        rig.open()
