"""Calls to the CUDA driver, against a fake one; and pinning, with its failures."""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from fake_gpu import FakeGpu, fake_gpu

from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.cuda_driver import CudaDriver, PinnedSegment, SourceOrder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


def bound(gpu: FakeGpu) -> tuple[CudaDriver, int]:
    """Return the driver, bound to a context on this thread, and a stream of it."""
    driver = CudaDriver(gpu.library)
    driver.bind(driver.open_context(0))
    return driver, driver.make_stream(is_urgent=False)


def scattered(gpu: FakeGpu, count: int) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """Device memory, copies to it, and what it must become."""
    random = np.random.default_rng(count)
    source = random.integers(0, 256, 64 * 1024, dtype=np.uint8)
    target = gpu.allocate(len(source))
    sizes = random.integers(1, 64, count)
    to = random.permutation(1024)[:count] * 64
    start = random.permutation(1024)[:count] * 64
    expected = target.seen.copy()
    for t, s, n in zip(to, start, sizes, strict=True):
        expected[t : t + n] = source[s : s + n]
    sources.append(source)
    return target.seen, (target.address + to, source.ctypes.data + start, sizes), expected


sources: list[np.ndarray] = []
"""Keeps the memory that copies read."""


@pytest.mark.parametrize("version", [12_080, 13_000])
@pytest.mark.parametrize("count", [1, 2, 500])
@pytest.mark.parametrize("order", SourceOrder)
def test_all_copies_of_an_op_are_one_call(
    gpu: FakeGpu, version: int, count: int, order: SourceOrder
) -> None:
    gpu.set_version(version)
    driver, stream = bound(gpu)
    target, runs, expected = scattered(gpu, count)
    driver.copy_batch(*runs, order, stream)
    gpu.wait_idle()
    assert np.array_equal(target, expected)
    assert driver.has_batch_copy
    assert [(c.num_runs, c.order, c.flags) for c in gpu.copy_calls] == [(count, order, 1)]
    assert gpu.num_single_copies == 0


@pytest.mark.parametrize("version", [11_080, 12_070, 13_000])
def test_single_copies_are_one_call_each_on_any_driver(gpu: FakeGpu, version: int) -> None:
    gpu.set_version(version)
    driver, stream = bound(gpu)
    target, runs, expected = scattered(gpu, 300)
    driver.copy_singly(*runs, stream, is_pinned=False)
    gpu.wait_idle()
    assert np.array_equal(target, expected)
    assert driver.has_batch_copy is (version >= 12_080)
    assert (gpu.num_single_copies, gpu.batches) == (300, [])


def test_no_copies_make_no_call(gpu: FakeGpu) -> None:
    nothing = np.empty(0, np.int64)
    driver, stream = bound(gpu)
    driver.copy_batch(nothing, nothing, nothing, SourceOrder.STREAM, stream)
    driver.copy_singly(nothing, nothing, nothing, stream, is_pinned=False)
    assert gpu.copy_calls == []


def test_strided_address_arrays_are_accepted(gpu: FakeGpu) -> None:
    driver, stream = bound(gpu)
    target, runs, expected = scattered(gpu, 100)
    spread = [np.repeat(array, 3)[::3] for array in runs]
    assert not spread[0].flags.c_contiguous
    driver.copy_batch(*spread, SourceOrder.STREAM, stream)
    gpu.wait_idle()
    assert np.array_equal(target, expected)


def test_a_refused_copy_is_named_with_the_drivers_reason(gpu: FakeGpu) -> None:
    driver, stream = bound(gpu)
    gpu.set_faults(refused_run=3)
    _, runs, _ = scattered(gpu, 8)
    with pytest.raises(RuntimeError, match=r"8 copies, number 3 failed: CUDA_ERROR_INVALID_VALUE"):
        driver.copy_batch(*runs, SourceOrder.STREAM, stream)


def test_an_error_of_the_whole_batch_names_no_copy(gpu: FakeGpu) -> None:
    driver, _ = bound(gpu)
    _, runs, _ = scattered(gpu, 8)
    with pytest.raises(RuntimeError, match=r"8 copies failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.copy_batch(*runs, SourceOrder.STREAM, 0)  # the legacy stream


def test_an_error_that_the_driver_has_no_name_for_has_its_number(gpu: FakeGpu) -> None:
    driver, stream = bound(gpu)
    gpu.refuse("cuMemcpyAsync", 12345)
    _, runs, _ = scattered(gpu, 2)
    with pytest.raises(RuntimeError, match=r"an unknown error \(12345\)"):
        driver.copy_singly(*runs, stream, is_pinned=False)


def test_a_thread_that_was_not_bound_gets_an_error(gpu: FakeGpu) -> None:
    driver, stream = bound(gpu)
    _, runs, _ = scattered(gpu, 2)
    errors: list[str] = []

    def copy() -> None:
        for call in (
            partial(driver.copy_batch, *runs, SourceOrder.ANY),
            partial(driver.copy_singly, *runs, is_pinned=False),
        ):
            try:
                call(stream)
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert len(errors) == 2
    assert all("CUDA_ERROR_INVALID_CONTEXT" in error for error in errors)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_single_copies_of_pinned_memory_keep_the_interpreter_lock(
    gpu: FakeGpu, is_pinned: bool
) -> None:
    """With a lock that is never asked for, another thread runs only while a call gives it away."""
    driver, stream = bound(gpu)
    _, runs, _ = scattered(gpu, 500)
    gpu.set_speed(call_us=100)
    turns, is_over = [0], False

    def count() -> None:
        while not is_over:
            turns[0] += 1
            time.sleep(0)  # gives the lock back

    interval = sys.getswitchinterval()
    counting = threading.Thread(target=count)
    try:
        counting.start()
        sys.setswitchinterval(600)
        time.sleep(0.05)  # the other thread may still wait with the interval of before
        before = turns[0]
        for _ in range(1 if is_pinned else 100):  # the other thread may not be scheduled at once
            driver.copy_singly(*runs, stream, is_pinned=is_pinned)
            after = turns[0]
            if after != before:
                break
    finally:
        sys.setswitchinterval(interval)
        is_over = True
        counting.join()
    assert (after == before) is is_pinned


def test_an_urgent_stream_has_the_highest_priority(gpu: FakeGpu) -> None:
    driver, stream = bound(gpu)
    urgent = driver.make_stream(is_urgent=True)
    _, runs, _ = scattered(gpu, 1)
    for each in (stream, urgent):
        driver.copy_batch(*runs, SourceOrder.STREAM, each)
    assert [call.priority for call in gpu.copy_calls] == [0, -5]


# -- pinning -------------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(5000, 10) as segment:
        segment.map()
        yield segment


def test_a_segment_is_pinned_in_pieces_that_no_block_lies_across(
    gpu: FakeGpu, segment: HostSegment
) -> None:
    seen: list[int] = []
    pinned = PinnedSegment(
        bound(gpu)[0], segment, 3 * segment.stride + 100, lambda: seen.append(len(gpu.registered))
    )
    assert seen == list(range(1, len(pinned.starts) + 1))
    pieces = [3, 3, 3, 1]
    assert list(gpu.registered.values()) == [n * segment.stride for n in pieces]
    assert list(gpu.registered) == pinned.starts.tolist()
    assert pinned.starts[0] == segment.address
    assert (np.diff(pinned.starts) == 3 * segment.stride).all()
    assert pinned.is_reachable
    pinned.close()
    pinned.close()
    assert not gpu.registered
    assert not pinned.is_reachable


def test_a_block_that_is_larger_than_a_step_is_one_piece(
    gpu: FakeGpu, segment: HostSegment
) -> None:
    PinnedSegment(bound(gpu)[0], segment, step=1)
    assert set(gpu.registered.values()) == {segment.stride}
    assert len(gpu.registered) == segment.num_blocks


def test_of_a_segment_that_cannot_be_pinned_whole_a_part_stays_pinned_and_is_named(
    gpu: FakeGpu, segment: HostSegment, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.set_faults(most_pinned=7 * segment.stride)
    with caplog.at_level(logging.INFO):
        pinned = PinnedSegment(bound(gpu)[0], segment, step=2 * segment.stride)
    # Three pieces were possible; the engine may need the memory of one.
    assert list(gpu.registered) == [segment.address, segment.address + 2 * segment.stride]
    assert pinned.end == segment.address + 4 * segment.stride
    assert pinned.starts.tolist() == [*gpu.registered, pinned.end]
    assert pinned.is_reachable
    assert pinned.is_partial
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("host_pool_partly_pinned")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in line
    assert "pinned_gb=%s" % (4 * segment.stride / 1e9) in line
    pinned.close()
    assert not gpu.registered


@pytest.mark.parametrize("most", [0, 2])
def test_a_segment_of_which_only_a_piece_can_be_pinned_is_not_pinned_at_all(
    gpu: FakeGpu, segment: HostSegment, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.set_faults(most_pinned=most * segment.stride)
    pinned = PinnedSegment(bound(gpu)[0], segment, step=2 * segment.stride)
    assert not gpu.registered
    assert not pinned.is_reachable
    assert not pinned.is_partial
    assert pinned.starts.size == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("host_pool_not_pinned")
    assert "cpu_cache_gb" in line
    assert "cgroup" in line
    assert "ulimit" not in line  # the driver's pinning is not what that limits
    pinned.close()


def test_memory_that_the_device_sees_elsewhere_is_not_for_kernels(
    gpu: FakeGpu, segment: HostSegment
) -> None:
    gpu.set_faults(mapping_offset=4096)
    pinned = PinnedSegment(bound(gpu)[0], segment, step=segment.size)
    assert pinned.starts.size == 1
    assert not pinned.is_reachable


def test_memory_that_the_device_cannot_map_is_pinned_all_the_same(
    gpu: FakeGpu, segment: HostSegment
) -> None:
    gpu.refuse("cuMemHostGetDevicePointer")
    pinned = PinnedSegment(bound(gpu)[0], segment, step=segment.size)
    assert pinned.starts.tolist() == [segment.address]
    assert not pinned.is_reachable
    pinned.close()
    assert not gpu.registered


@pytest.mark.parametrize("is_half_way", [True, False])
def test_a_piece_that_stays_pinned_does_not_keep_the_others(
    gpu: FakeGpu, segment: HostSegment, is_half_way: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.keep_registered(segment.address)
    if is_half_way:
        gpu.set_faults(most_pinned=7 * segment.stride)
    PinnedSegment(bound(gpu)[0], segment, step=2 * segment.stride).close()
    assert list(gpu.registered) == [segment.address]
    (line,) = (r.getMessage() for r in caplog.records if "host_pool_still_pinned" in r.getMessage())
    assert f'pieces="1 of {2 if is_half_way else 5}"' in line


def test_pieces_share_no_page_where_pages_are_larger_than_a_block(
    gpu: FakeGpu, segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GH200 with a kernel of 64 KiB pages."""
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    gpu.set_faults(page_bytes=64 << 10)
    pinned = PinnedSegment(bound(gpu)[0], segment, step=1)
    assert list(gpu.registered.values()) == [64 << 10, 16 << 10]
    assert pinned.starts.size == 2
    pinned.close()
