"""Several requests at once on a CPU, whose copies a thread of native code makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cluster import until

from flexcache import KVStatus
from flexcache.bench.dram import CpuEngine
from flexcache.client import link
from flexcache.transfer.cpu_copier import CopyQueue

NUM_REQUESTS = 16
NUM_BLOCKS = 32
WAIT_S = 60.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuEngine]:
    """An engine whose rank is woken by copies alone: it sends no pings meanwhile."""
    monkeypatch.setattr(link, "_PING_INTERVAL_S", 3600.0)
    with CpuEngine(8, 16 << 10, NUM_BLOCKS, seed=1, num_cpu_blocks=2 * NUM_BLOCKS) as made:
        yield made


def queue_of(engine: CpuEngine) -> CopyQueue:
    attachment = engine._rank._attachment
    assert attachment is not None
    queue = attachment.worker._copier._queue  # type: ignore[attr-defined]
    assert isinstance(queue, CopyQueue)
    return queue


def test_the_rank_is_woken_when_queued_copies_have_ended(engine: CpuEngine) -> None:
    order, other = engine.order(), engine.order()
    queue, num_queued = queue_of(engine), 0
    deadline = time.monotonic() + WAIT_S
    while num_queued < 20 * NUM_REQUESTS:
        assert time.monotonic() < deadline
        prompts = [engine.prompt(NUM_BLOCKS // NUM_REQUESTS) for _ in range(NUM_REQUESTS)]
        stored = engine.memory.clone()
        engine.store(prompts, order)
        engine.memory.zero_()
        engine.load(prompts, other)
        engine.check_blocks(other, stored, order)
        num_queued = sum(queue._num_given)


def test_a_client_that_closes_while_copies_are_queued_leaves_none_behind(
    engine: CpuEngine,
) -> None:
    for _ in range(3):  # until the queue is ready
        engine.store([engine.prompt(1) for _ in range(NUM_BLOCKS)], engine.order())
    started = [
        engine.manager.put_async(engine.prompt(1), np.arange(16) + 16 * block)[0]
        for block in range(NUM_BLOCKS)
    ]
    engine._rank.close()
    engine.memory.zero_()
    answers = engine.manager.wait(started, WAIT_S)
    assert all(answer.status is not KVStatus.TIMEOUT for answer in answers.values())
    until(lambda: not [each for each in threading.enumerate() if "copies" in each.name])
