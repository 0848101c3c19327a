"""Calls to the CUDA driver, against one in host memory; and pinning, with its failures."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import CONTEXT, NOT_SUPPORTED, STREAM, Attributes, FakeCuda

from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_driver import CudaDriver, SourceOrder
from flexcache.transfer.workers.copy_pin import PinnedSegment


def bound(cuda: FakeCuda) -> CudaDriver:
    driver = CudaDriver(cuda)
    driver.bind(driver.context_of(STREAM))
    return driver


def scattered(count: int) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """Source and target memory, copies between them, and what the target must become."""
    random = np.random.default_rng(count)
    source = random.integers(0, 256, 64 * 1024, dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = random.integers(1, 64, count)
    to = random.permutation(1024)[:count] * 64
    start = random.permutation(1024)[:count] * 64
    expected = target.copy()
    for t, s, n in zip(to, start, sizes, strict=True):
        expected[t : t + n] = source[s : s + n]
    return source, target, (target.ctypes.data + to, source.ctypes.data + start, sizes), expected


def test_the_structure_has_the_size_in_the_driver_header() -> None:
    """As `sizeof` and `offsetof` say of CUDA 12.8's and 13.5's header."""
    assert ctypes.sizeof(Attributes) == 24
    assert (Attributes.dstLocHint.offset, Attributes.flags.offset) == (12, 20)


@pytest.mark.parametrize("version", [12_080, 13_000])
@pytest.mark.parametrize("count", [1, 2, 500])
@pytest.mark.parametrize("order", SourceOrder)
def test_all_copies_of_an_op_are_one_call(version: int, count: int, order: SourceOrder) -> None:
    cuda = FakeCuda(version)
    driver = bound(cuda)
    _source, target, runs, expected = scattered(count)
    driver.copy_batch(*runs, order, STREAM)
    assert np.array_equal(target, expected)
    assert driver.has_batch_copy
    assert cuda.batches == [(count, order, 1)]
    assert cuda.num_single_copies == 0


@pytest.mark.parametrize("version", [11_080, 12_070, 13_000])
def test_single_copies_are_one_call_each_on_any_driver(version: int) -> None:
    cuda = FakeCuda(version)
    driver = bound(cuda)
    _source, target, runs, expected = scattered(300)
    driver.copy_singly(*runs, STREAM)
    assert np.array_equal(target, expected)
    assert driver.has_batch_copy is (version >= 12_080)
    assert (cuda.num_single_copies, cuda.batches) == (300, [])


def test_no_copies_make_no_call() -> None:
    cuda = FakeCuda()
    nothing = np.empty(0, np.int64)
    bound(cuda).copy_batch(nothing, nothing, nothing, SourceOrder.STREAM, STREAM)
    bound(cuda).copy_singly(nothing, nothing, nothing, STREAM)
    assert (cuda.num_single_copies, cuda.batches) == (0, [])


def test_strided_address_arrays_are_accepted() -> None:
    cuda = FakeCuda()
    _source, target, runs, expected = scattered(100)
    spread = [np.repeat(array, 3)[::3] for array in runs]
    assert not spread[0].flags.c_contiguous
    bound(cuda).copy_batch(*spread, SourceOrder.STREAM, STREAM)
    assert np.array_equal(target, expected)


def test_a_refused_copy_is_named_with_the_drivers_reason() -> None:
    driver = bound(FakeCuda(refused_copy=3))
    *_, runs, _expected = scattered(8)
    with pytest.raises(RuntimeError, match=r"8 copies, number 3 failed: CUDA_ERROR_INVALID_VALUE"):
        driver.copy_batch(*runs, SourceOrder.STREAM, STREAM)


def test_an_error_of_the_whole_batch_names_no_copy() -> None:
    driver = bound(FakeCuda())
    *_, runs, _expected = scattered(8)
    with pytest.raises(RuntimeError, match=r"8 copies failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.copy_batch(*runs, SourceOrder.STREAM, 0)  # the legacy stream


def test_a_thread_that_was_not_bound_gets_an_error_the_driver_has_no_name_for() -> None:
    *_, runs, _expected = scattered(2)
    driver = CudaDriver(FakeCuda())
    with pytest.raises(RuntimeError, match=r"an unknown error \(201\)"):
        driver.copy_batch(*runs, SourceOrder.ANY, STREAM)
    with pytest.raises(RuntimeError, match=r"an unknown error \(201\)"):
        driver.copy_singly(*runs, STREAM)


def test_a_bound_thread_has_the_streams_context_and_disturbs_no_capture() -> None:
    cuda = FakeCuda()
    bound(cuda)
    assert cuda.context == CONTEXT
    assert cuda.capture_mode == 2  # CU_STREAM_CAPTURE_MODE_RELAXED


# -- pinning -------------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(5000, 10) as segment:
        segment.map()
        yield segment


def test_a_segment_is_pinned_in_pieces_that_no_block_lies_across(segment: HostSegment) -> None:
    cuda = FakeCuda()
    seen: list[int] = []
    pinned = PinnedSegment(
        bound(cuda), segment, 3 * segment.stride + 100, lambda: seen.append(len(cuda.registered))
    )
    assert seen == list(range(1, len(pinned.starts) + 1))
    pieces = [3, 3, 3, 1]
    assert list(cuda.registered.values()) == [n * segment.stride for n in pieces]
    assert list(cuda.registered) == pinned.starts.tolist()
    assert pinned.starts[0] == segment.address
    assert (np.diff(pinned.starts) == 3 * segment.stride).all()
    assert pinned.is_reachable
    pinned.close()
    pinned.close()
    assert not cuda.registered
    assert not pinned.is_reachable


def test_a_block_that_is_larger_than_a_step_is_one_piece(segment: HostSegment) -> None:
    cuda = FakeCuda()
    PinnedSegment(bound(cuda), segment, step=1)
    assert set(cuda.registered.values()) == {segment.stride}
    assert len(cuda.registered) == segment.num_blocks


def test_a_segment_that_cannot_be_pinned_whole_is_not_pinned_at_all_and_says_so_once(
    segment: HostSegment, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(most_registered=7 * segment.stride)
    with caplog.at_level(logging.INFO):
        pinned = PinnedSegment(bound(cuda), segment, step=2 * segment.stride)
    assert not cuda.registered
    assert not pinned.is_reachable
    assert pinned.starts.size == 0
    (line,) = [record.message for record in caplog.records]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in line
    assert "pinned_gb=%s" % (6 * segment.stride / 1e9) in line
    assert "cpu_cache_gb" in line
    assert "cgroup" in line
    assert "ulimit" not in line  # the driver's pinning is not what that limits
    pinned.close()


def test_memory_that_the_device_sees_elsewhere_is_not_for_kernels(segment: HostSegment) -> None:
    pinned = PinnedSegment(bound(FakeCuda(mapping_offset=4096)), segment, step=segment.size)
    assert pinned.starts.size == 1
    assert not pinned.is_reachable


def test_memory_that_the_device_cannot_map_is_pinned_all_the_same(segment: HostSegment) -> None:
    cuda = FakeCuda(refuses={"cuMemHostGetDevicePointer": NOT_SUPPORTED})
    pinned = PinnedSegment(bound(cuda), segment, step=segment.size)
    assert pinned.starts.tolist() == [segment.address]
    assert not pinned.is_reachable
    pinned.close()
    assert not cuda.registered


@pytest.mark.parametrize("is_half_way", [True, False])
def test_a_piece_that_stays_pinned_does_not_keep_the_others(
    segment: HostSegment, is_half_way: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(stuck={segment.address})
    if is_half_way:
        cuda.most_registered = 7 * segment.stride
    PinnedSegment(bound(cuda), segment, step=2 * segment.stride).close()
    assert list(cuda.registered) == [segment.address]
    (line,) = (r.getMessage() for r in caplog.records if "host_pool_still_pinned" in r.getMessage())
    assert f'pieces="1 of {3 if is_half_way else 5}"' in line


def test_pieces_share_no_page_where_pages_are_larger_than_a_block(
    segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GH200 with a kernel of 64 KiB pages."""
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    cuda = FakeCuda(page_bytes=64 << 10, page_origin=segment.address)
    pinned = PinnedSegment(bound(cuda), segment, step=1)
    assert list(cuda.registered.values()) == [64 << 10, 16 << 10]
    assert pinned.starts.size == 2
    pinned.close()
