"""The fake GPU itself: what it must notice, or the tests on it would prove nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_uint64, c_void_p

import numpy as np
import pytest
import torch
from fake_gpu import SCRIBBLE, FakeGpu, FakeTorchCuda, Memory, fake_gpu

PAGE = 4096
SIZE = 4 * PAGE


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


class Host:
    """Host memory that begins at a page, pinned if asked for."""

    def __init__(self, gpu: FakeGpu, size: int = SIZE, *, pinned: bool = True) -> None:
        self.map = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = self.bytes.ctypes.data
        if pinned:
            gpu.call("cuMemHostRegister_v2", c_void_p(self.address), c_size_t(size), 3)


def bind(gpu: FakeGpu, device: int = 0) -> None:
    """Give the calling thread a context."""
    context = c_void_p()
    gpu.call("cuDevicePrimaryCtxRetain", byref(context), device)
    gpu.call("cuCtxSetCurrent", context)


def make_stream(gpu: FakeGpu) -> int:
    stream = c_void_p()
    gpu.call("cuStreamCreateWithPriority", byref(stream), 1, 0)
    return stream.value or 0


def copy(gpu: FakeGpu, to: int, start: int, size: int, stream: int) -> None:
    gpu.call("cuMemcpyAsync", c_uint64(to), c_uint64(start), c_size_t(size), c_void_p(stream))


def synchronize(gpu: FakeGpu, stream: int) -> None:
    gpu.call("cuStreamSynchronize", c_void_p(stream))


def expect_violation(gpu: FakeGpu, text: str) -> None:
    """The test ends here: the fixture would fail it."""
    assert text in gpu.violation
    gpu.reset()


def test_nothing_but_its_streams_can_touch_device_memory(gpu: FakeGpu) -> None:
    memory = gpu.allocate(SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    assert libc.write(writer, c_void_p(memory.address), c_size_t(8)) == -1
    assert ctypes.get_errno() == 14  # EFAULT
    os.close(reader)
    os.close(writer)
    bind(gpu)
    gpu.fill(make_stream(gpu), memory, 9)
    gpu.wait_idle()
    assert (memory.seen == 9).all()


def test_work_of_a_stream_is_done_in_order_and_later_than_the_call(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu), make_stream(gpu)
    kernel = gpu.hold(stream)
    gpu.fill(stream, memory, 5)
    copy(gpu, host.address, memory.address, SIZE, stream)
    gpu.fill(stream, memory, 6)
    assert not host.bytes.any()
    gpu.fire(kernel)
    synchronize(gpu, stream)
    assert (host.bytes == 5).all()
    assert (memory.seen == 6).all()


def test_a_copy_within_the_device_is_one_too(gpu: FakeGpu) -> None:
    bind(gpu)
    first, second, stream = gpu.allocate(SIZE), gpu.allocate(SIZE), make_stream(gpu)
    gpu.fill(stream, first, 4)
    copy(gpu, second.address, first.address, SIZE, stream)
    synchronize(gpu, stream)
    assert (second.seen == 4).all()
    other = gpu.allocate(SIZE, device=1)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        copy(gpu, other.address, first.address, SIZE, stream)
    expect_violation(gpu, "nor within a device")


def test_a_call_is_made_in_its_turn(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, stream = gpu.allocate(SIZE), make_stream(gpu)
    said: list[int] = []
    kernel = gpu.hold(stream)
    gpu.fill(stream, memory, 5)
    gpu.queue(stream, lambda: said.append(int(memory.seen[0])))
    gpu.fill(stream, memory, 6)
    assert not said
    gpu.fire(kernel)
    synchronize(gpu, stream)
    assert said == [5]


def test_a_call_that_raises_is_noticed(gpu: FakeGpu) -> None:
    bind(gpu)
    gpu.queue(make_stream(gpu), [].pop)
    gpu.wait_idle()
    [error] = gpu.call_errors
    assert isinstance(error, IndexError)
    gpu.call_errors.clear()


def test_a_stream_that_waits_for_an_event_goes_on_when_it_fires(gpu: FakeGpu) -> None:
    bind(gpu)
    first, second, memory = make_stream(gpu), make_stream(gpu), gpu.allocate(SIZE)
    event = c_void_p()
    gpu.call("cuEventCreate", byref(event), 2)
    kernel = gpu.hold(first)
    gpu.call("cuEventRecord", event, c_void_p(first))
    gpu.call("cuStreamWaitEvent", c_void_p(second), event, 0)
    gpu.fill(second, memory, 3)
    gpu.wait_quiet()
    assert gpu.loaded.cuEventQuery(event) == 600
    assert not memory.seen.any()
    gpu.fire(kernel)
    synchronize(gpu, second)
    assert gpu.loaded.cuEventQuery(event) == 0
    assert (memory.seen == 3).all()


def test_frozen_copies_stay_where_they_are_until_they_thaw(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu), make_stream(gpu)
    host.bytes[:] = 8
    gpu.freeze()
    copy(gpu, memory.address, host.address, SIZE, stream)
    assert not memory.seen.any()
    gpu.thaw()
    synchronize(gpu, stream)
    assert (memory.seen == 8).all()


def test_a_call_that_copies_to_pageable_memory_returns_when_it_has(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu, pinned=False), make_stream(gpu)
    gpu.set_speed(late_us=5_000)
    gpu.fill(stream, memory, 4)
    copy(gpu, host.address, memory.address, SIZE, stream)
    assert (host.bytes == 4).all()
    host.bytes[:] = 1
    copy(gpu, memory.address, host.address, SIZE, stream)  # staged before the call returns
    host.bytes[:] = 2
    synchronize(gpu, stream)
    assert (memory.seen == 1).all()


def test_a_copy_over_the_end_of_a_pinned_piece_is_noticed(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu, pinned=False), make_stream(gpu)
    for start in (0, SIZE // 2):
        address = c_void_p(host.address + start)
        gpu.call("cuMemHostRegister_v2", address, c_size_t(SIZE // 2), 3)
    copy(gpu, memory.address, host.address, SIZE // 2, stream)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        copy(gpu, memory.address, host.address + PAGE, SIZE // 2, stream)
    expect_violation(gpu, "cross an end of pinned memory")


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        ("unpin", "memory in use is unpinned"),
        ("unmap", "memory was unmapped while pinned"),
        ("destroy", "a stream with work is destroyed"),
        ("free", "device memory in use is freed"),
        ("between hosts", "not between host and device"),
        ("beyond", "cross an end of device memory"),
        ("nowhere", "are nowhere"),
        ("capture", "a stream that is captured"),
    ],
)
def test_misuse_is_noticed(gpu: FakeGpu, misuse: str, text: str) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu), make_stream(gpu)
    held = gpu.hold(stream)
    copy(gpu, memory.address, host.address, SIZE, stream)
    match misuse:
        case "unpin":
            gpu.call("cuMemHostUnregister", c_void_p(host.address))
        case "unmap":
            gpu.fire(held)
            synchronize(gpu, stream)
            address = host.address
            del host.bytes
            host.map.close()
            gpu.call("cuMemHostUnregister", c_void_p(address))
        case "destroy":
            gpu.call("cuStreamDestroy_v2", c_void_p(stream))
        case "free":
            gpu.call("cuMemFree_v2", c_uint64(memory.address))
        case "capture":
            gpu.begin_capture(stream)
            gpu.fill(stream, memory, 1)
        case _:
            targets = {"between hosts": host.address, "beyond": memory.address + 8, "nowhere": 64}
            with pytest.raises(RuntimeError):
                copy(gpu, targets[misuse], host.address, SIZE, stream)
    gpu.fire(held)
    expect_violation(gpu, text)


def test_a_kernel_loses_the_device_where_it_touches_what_is_not_pinned(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu, pinned=False), make_stream(gpu)
    table = gpu.allocate(24)
    table.seen.view(np.int64)[:] = memory.address, host.address, SIZE
    gpu.launch(stream, table)
    gpu.wait_idle()
    assert gpu.is_lost
    expect_violation(gpu, "a kernel touched")


def test_threads_have_a_context_each_and_none_at_first(gpu: FakeGpu) -> None:
    bind(gpu, 1)
    memory, host = gpu.allocate(SIZE, 1), Host(gpu)
    stream, codes = make_stream(gpu), []

    def use() -> None:
        arguments = c_uint64(memory.address), c_uint64(host.address), c_size_t(8), c_void_p(stream)
        codes.append(gpu.loaded.cuMemcpyAsync(*arguments))
        bind(gpu, 0)
        codes.append(gpu.loaded.cuMemcpyAsync(*arguments))
        bind(gpu, 1)
        codes.append(gpu.loaded.cuMemcpyAsync(*arguments))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert codes == [201, 201, 0]
    assert gpu.contexts == {0, 1}
    synchronize(gpu, stream)  # while the host's memory is there


def test_a_capture_is_void_after_a_forbidden_call_of_another_thread(gpu: FakeGpu) -> None:
    bind(gpu)
    stream, event = make_stream(gpu), c_void_p()
    gpu.call("cuEventCreate", byref(event), 2)
    gpu.begin_capture(stream)
    assert gpu.loaded.cuEventQuery(event) == 900
    assert not gpu.end_capture(stream)
    mode = ctypes.c_int(2)
    gpu.call("cuThreadExchangeStreamCaptureMode", byref(mode))
    assert mode.value == 0
    gpu.begin_capture(stream)
    assert gpu.loaded.cuEventQuery(event) == 0
    assert gpu.end_capture(stream)
    gpu.call("cuThreadExchangeStreamCaptureMode", byref(mode))


def test_calls_fail_from_the_wanted_one_on_and_a_late_error_is_for_ever(gpu: FakeGpu) -> None:
    bind(gpu)
    memory, host, stream = gpu.allocate(SIZE), Host(gpu), make_stream(gpu)
    gpu.refuse("cuMemcpyAsync", 1, from_call=3)
    for _ in range(2):
        copy(gpu, memory.address, host.address, 8, stream)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        copy(gpu, memory.address, host.address, 8, stream)
    gpu.refuse_nothing()
    gpu.wait_idle()
    gpu.set_faults(lost_after_copies=1)
    for _ in range(2):
        copy(gpu, memory.address, host.address, 8, stream)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
            synchronize(gpu, stream)


def test_torch_hands_out_its_streams_again_after_32(gpu: FakeGpu) -> None:
    cuda = FakeTorchCuda(gpu)
    device = torch.device("cuda", 0)
    given = [cuda.Stream(device).cuda_stream for _ in range(33)]
    assert len(set(given)) == 32
    assert given[32] == given[0]


def test_a_reset_leaves_the_thread_without_a_context(gpu: FakeGpu) -> None:
    bind(gpu)
    gpu.reset()
    context = c_void_p()
    gpu.call("cuCtxGetCurrent", byref(context))
    assert context.value is None


def test_memory_that_torch_gets_back_is_used_again_in_the_order_of_its_stream(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeTorchCuda(gpu)
    cuda.install(monkeypatch)
    device, found = torch.device("cuda", 0), []
    staged = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True).fill_(3)
    with cuda.stream(cuda.Stream(device)):
        stream = cuda.current_stream().handle
        held = gpu.hold(stream)
        table = staged.to(device, non_blocking=True)
        seen = table.seen()
        gpu.queue(stream, lambda: found.append(int(seen.max())))
        del table
    gpu.wait_quiet()
    assert not seen.any()
    gpu.fire(held)
    gpu.wait_idle()
    assert found == [3]
    assert (seen == SCRIBBLE).all()


def test_what_waits_on_the_hosts_compute_has_waited_when_the_call_returns(gpu: FakeGpu) -> None:
    cuda = FakeTorchCuda(gpu, computes_on_host=True)
    memory = gpu.allocate(SIZE)
    stream = cuda.Stream(torch.device("cuda", 0))
    kernel, event = gpu.hold(stream.handle), cuda.Event()
    gpu.fill(stream.handle, Memory(*memory), 2)
    event.record(stream)
    threading.Timer(0.05, gpu.fire, (kernel,)).start()
    event.wait()
    assert (memory.seen == 2).all()
