"""The host pool's segments: equal for all processes that map them, in ordinary and huge pages."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexcache.errors import ConfigError, RegistrationError
from flexcache.storage.host_pool import HUGE_BYTES, HostSegment, make_huge

BLOCK_BYTES, NUM_BLOCKS = 5000, 300
_RESERVED = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@pytest.fixture(params=["transparent", "reserved"])
def segment(request: pytest.FixtureRequest) -> Iterator[HostSegment]:
    try:
        made = HostSegment.create(BLOCK_BYTES, NUM_BLOCKS, request.param)
    except ConfigError as error:
        pytest.skip(str(error))  # no huge pages are reserved here
    with made:
        made.map()
        yield made


def test_one_mapping_reads_what_another_wrote(segment: HostSegment) -> None:
    with HostSegment.open(segment.ref()) as other:
        other.map()
        assert other.address != segment.address
        for index in (0, 1, NUM_BLOCKS - 1):
            segment.block(index)[:] = bytes([index % 251 + 1]) * segment.stride
            assert other.block(index) == segment.block(index)


def test_blocks_are_padded_to_whole_pages_and_do_not_overlap(segment: HostSegment) -> None:
    assert segment.stride == 8192
    assert segment.size == NUM_BLOCKS * segment.stride
    segment.block(1)[:] = b"\xff" * segment.stride
    assert not any(segment.block(0)) and not any(segment.block(2))


def test_no_page_is_missing_once_it_is_mapped(segment: HostSegment) -> None:
    before = resource.getrusage(resource.RUSAGE_THREAD)
    for index in range(NUM_BLOCKS):
        segment.block(index)[0] = segment.block(index)[-1] = 1
    after = resource.getrusage(resource.RUSAGE_THREAD)
    faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
    assert faults < NUM_BLOCKS // 10  # the interpreter has some of its own


def test_each_step_of_populating_calls_back(segment: HostSegment) -> None:
    steps: list[int] = []
    with HostSegment.open(segment.ref()) as other:
        other.map(lambda: steps.append(other.address))
    assert len(steps) == 1  # it is one step's size


def test_too_few_reserved_pages_are_an_error_that_says_how_many_it_takes() -> None:
    free = int((_RESERVED / "free_hugepages").read_text()) if _RESERVED.exists() else 0
    wanted = free + 1000
    before = len(os.listdir("/proc/self/fd"))
    says = f"needs {wanted} pages" if _RESERVED.exists() else "hugepages = 'reserved'"
    with pytest.raises(ConfigError, match=says):
        HostSegment.create(2 << 20, wanted, "reserved")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_that_its_creator_has_replaced_is_refused(segment: HostSegment) -> None:
    ref = segment.ref()
    segment.close()
    other = HostSegment.create(BLOCK_BYTES, NUM_BLOCKS)
    with other, pytest.raises(RegistrationError):
        HostSegment.open(ref)


def test_a_segment_in_use_keeps_its_bytes_when_another_process_fills_in_the_rest() -> None:
    block_bytes, num_blocks = 1 << 20, 5  # two huge pages and a half
    with HostSegment.create(block_bytes, num_blocks) as segment:
        segment.map(populate=False)
        segment.block(1)[:] = b"\x17" * block_bytes
        segment.block(4)[-1] = 5
        with HostSegment.open(segment.ref()) as other:
            other.map()
            assert other.block(1) == segment.block(1) == b"\x17" * block_bytes
            assert (other.block(4)[-1], any(other.block(4)[:-1])) == (5, False)
            assert not any(any(other.block(index)) for index in (0, 2, 3))
            other.block(2)[0] = 7
            assert segment.block(2)[0] == 7


def test_blocks_lie_together_in_memory_where_the_kernel_grants_huge_pages() -> None:
    num_blocks = 4
    with HostSegment.create(HUGE_BYTES, num_blocks) as segment:
        if not make_huge(segment.fd, 0, segment.size):
            pytest.skip("no huge pages for shared memory here")
        frames = _frames(segment)
        if not frames.any():
            pytest.skip("only root sees where pages are")
        together = (np.diff(frames.reshape(num_blocks, -1)) == 1).all(axis=1)
        # The kernel may have left those alone of which a page was in use.
        assert together.sum() >= num_blocks / 2


def test_without_huge_pages_a_segment_has_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(fd: int, start: int, length: int) -> bool:
        asked.append(start)
        return False

    monkeypatch.setattr("flexcache.storage.host_pool.make_huge", refuse)
    with HostSegment.create(HUGE_BYTES, 4) as segment:
        if os.fstat(segment.fd).st_blksize > mmap.PAGESIZE:
            pytest.skip("shared memory has huge pages here without being asked for them")
        segment.map()
        assert asked == [0]
        assert os.fstat(segment.fd).st_blocks * 512 == segment.size


def _frames(segment: HostSegment) -> np.ndarray:
    """Return the physical page of each of the segment's pages; zeros unless the caller is root."""
    segment.map()
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(segment.address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(segment.size // mmap.PAGESIZE * 8), np.uint64)
    return (entries & np.uint64((1 << 55) - 1)).astype(np.int64)
