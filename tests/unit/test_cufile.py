"""The binding of libcufile, on a fake one that is strict about NVIDIA's contract."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path
from threading import Thread

import pytest
from disk_io import open_direct
from fake_gpu import FakeGpu, fake_gpu

from flexcache.errors import MissingDependencyError
from flexcache.transfer.direct.cufile import CuFile

PAGE = 4096
SIZE = 4 * PAGE


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        context = c_void_p()
        gpu.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        gpu.call("cuCtxSetCurrent", context)
        yield gpu


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "slots").write_bytes(bytes(range(256)) * (2 * SIZE // 256))
    fd = open_direct(tmp_path / "slots")
    yield fd
    os.close(fd)


class Rig:
    """An open driver, a registered file, and a registered buffer."""

    def __init__(self, gpu: FakeGpu, fd: int) -> None:
        self.library = CuFile.load()
        self.library.open_driver()
        self.memory = gpu.allocate(SIZE)
        self.library.register_memory(self.memory.address, SIZE)
        self.file = self.library.register_file(fd)

    def read(self, size: int = SIZE, at: int = 0, base_offset: int = 0) -> int:
        return self.library.read(self.file, self.memory.address, size, at, base_offset)

    def write(self, size: int = SIZE, at: int = 0, base_offset: int = 0) -> int:
        return self.library.write(self.file, self.memory.address, size, at, base_offset)

    def close(self) -> None:
        self.library.deregister_memory(self.memory.address)
        self.library.deregister_file(self.file)


@pytest.fixture
def rig(gpu: FakeGpu, fd: int) -> Rig:
    return Rig(gpu, fd)


def expect_violation(gpu: FakeGpu, text: str) -> None:
    """The test ends here: the fixture would fail it."""
    assert text in gpu.violation
    gpu.reset()


def test_bytes_go_from_the_file_to_the_device_and_back(gpu: FakeGpu, rig: Rig, fd: int) -> None:
    gpu.set_speed(late_us=300)
    assert rig.read(2 * PAGE, at=PAGE, base_offset=PAGE) == 2 * PAGE
    seen = rig.memory.seen
    assert bytes(seen[PAGE : 3 * PAGE]) == bytes(range(256)) * 32
    assert not seen[:PAGE].any()
    assert not seen[3 * PAGE :].any()
    seen[:PAGE] = 7
    assert rig.write(PAGE, at=3 * PAGE) == PAGE
    assert Path(f"/proc/self/fd/{fd}").read_bytes()[3 * PAGE : 4 * PAGE] == bytes([7]) * PAGE
    rig.close()
    assert (gpu.num_files, gpu.num_buffers, gpu.num_bounced) == (0, 0, 0)


def test_the_end_of_the_file_is_a_short_read_and_no_error(rig: Rig) -> None:
    assert rig.read(SIZE, at=2 * SIZE - PAGE) == PAGE
    assert rig.read(SIZE, at=2 * SIZE) == 0


@pytest.mark.parametrize("call", ["cuFileRead", "cuFileWrite"])
def test_an_error_of_the_file_system_has_its_number(gpu: FakeGpu, rig: Rig, call: str) -> None:
    gpu.refuse(call, errno.ENOSPC)
    with pytest.raises(OSError, match=f"{call}: No space left") as raised:
        rig.read() if call == "cuFileRead" else rig.write()
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuFileDriverOpen", 5001, "cuFileDriverOpen failed: nvidia-fs is not loaded"),
        ("cuFileHandleRegister", 5008, "this file system is not supported"),
        ("cuFileBufRegister", 5036, "not enough GPU memory can be pinned"),
        ("cuFileRead", 5030, "cuFileRead failed: internal error"),
        ("cuFileWrite", 5999, "an unknown error .5999."),
    ],
)
def test_an_error_of_the_library_is_named(
    gpu: FakeGpu, fd: int, call: str, code: int, text: str
) -> None:
    gpu.refuse(call, code)

    def use() -> None:
        rig = Rig(gpu, fd)
        rig.read()
        rig.write()

    with pytest.raises(RuntimeError, match=text):
        use()


def test_a_driver_that_another_part_of_the_process_has_opened_is_used(
    gpu: FakeGpu, fd: int
) -> None:
    CuFile.load().open_driver()
    gpu.refuse("cuFileDriverOpen", 5026)
    assert Rig(gpu, fd).read() == SIZE


def test_a_library_that_does_not_answer_is_not_waited_for(gpu: FakeGpu) -> None:
    gpu.freeze()
    with pytest.raises(RuntimeError, match="did not answer within 0 s"):
        CuFile.load().open_driver(patience_s=0.05)


def test_a_file_without_o_direct_is_refused(rig: Rig, tmp_path: Path) -> None:
    with (
        open(tmp_path / "slots", "r+b") as buffered,
        pytest.raises(RuntimeError, match="not open with O_DIRECT"),
    ):
        rig.library.register_file(buffered.fileno())


def test_a_machine_without_the_library_says_so() -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcufile.so.0")
        pytest.skip("it is installed here")
    with pytest.raises(MissingDependencyError, match=r"libcufile\.so\.0"):
        CuFile.load()


# -- what the fake must notice -------------------------------------------------------------------


def test_a_thread_without_the_context_of_the_memory_is_refused(rig: Rig) -> None:
    said: list[str] = []

    def read() -> None:
        try:
            rig.read()
        except RuntimeError as error:
            said.append(str(error))

    thread = Thread(target=read)
    thread.start()
    thread.join()
    [text] = said
    assert "another CUDA context is current" in text


def test_what_is_not_whole_pages_or_not_registered_is_counted(gpu: FakeGpu, rig: Rig) -> None:
    other = gpu.allocate(SIZE)
    rig.library.read(rig.file, other.address, SIZE, 0, 0)
    assert gpu.num_bounced == 1
    rig.read(SIZE - PAGE, base_offset=PAGE // 2)
    assert gpu.num_bounced == 2


def run_beside(gpu: FakeGpu, use: Callable[[], object]) -> Thread:
    """Run something on a thread that has this one's context."""
    context = c_void_p()
    gpu.call("cuCtxGetCurrent", byref(context))

    def run() -> None:
        gpu.call("cuCtxSetCurrent", context)
        use()

    thread = Thread(target=run)
    thread.start()
    return thread


def hold(gpu: FakeGpu, rig: Rig) -> Thread:
    """Begin a read that does not end before `thaw`."""
    gpu.freeze()
    thread = run_beside(gpu, rig.read)
    while not gpu.is_in_file_io(rig.memory):
        thread.join(0.001)
    return thread


def end(gpu: FakeGpu, thread: Thread) -> None:
    gpu.thaw()
    thread.join()


def test_a_stream_leaves_memory_alone_that_a_read_still_fills(gpu: FakeGpu, rig: Rig) -> None:
    stream = c_void_p()
    gpu.call("cuStreamCreateWithPriority", byref(stream), 1, 0)
    thread = hold(gpu, rig)
    gpu.fill(stream.value or 0, rig.memory, 1)
    gpu.wait_quiet()
    end(gpu, thread)
    expect_violation(gpu, "a stream and file I/O")


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda rig: rig.library.deregister_memory(rig.memory.address), "memory in use"),
        (lambda rig: rig.library.deregister_file(rig.file), "a file in use"),
    ],
)
def test_what_a_read_uses_stays_registered(
    gpu: FakeGpu, rig: Rig, misuse: Callable[[Rig], None], text: str
) -> None:
    thread = hold(gpu, rig)
    misuse(rig)
    end(gpu, thread)
    expect_violation(gpu, text)


def test_memory_that_a_read_still_fills_is_not_written_to_a_file(gpu: FakeGpu, rig: Rig) -> None:
    thread = hold(gpu, rig)
    other = run_beside(gpu, rig.write)
    while not gpu.violation:
        other.join(0.001)
    end(gpu, thread)
    other.join()
    expect_violation(gpu, "another transfer use the same device memory")


def test_registered_memory_is_not_freed(gpu: FakeGpu, rig: Rig) -> None:
    gpu.call("cuMemFree_v2", c_uint64(rig.memory.address))
    expect_violation(gpu, "freed while registered")


def test_registered_memory_goes_by_its_own_base(gpu: FakeGpu, rig: Rig) -> None:
    rig.library.read(rig.file, rig.memory.address + PAGE, PAGE, 0, 0)
    expect_violation(gpu, "another base")
