"""The host pool's segments: equal for all processes that map them, in ordinary and huge pages."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexcache.errors import ConfigError, RegistrationError
from flexcache.storage.host_pool import HostSegment

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
