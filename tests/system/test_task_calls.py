"""An adapter's calls about several tasks at once, with a manager and a rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster

from flexcache.errors import ClosedError
from flexcache.ids import KVStatus
from flexcache.integration.adapter import TaskCalls

NUM_BLOCKS = 2


def match_puts(cluster: Cluster, count: int) -> list[int]:
    """Match puts of prompts of two blocks each."""
    num_tokens = NUM_BLOCKS * cluster.config.tokens_per_block
    prompts = [np.arange(num_tokens) + 1000 * number for number in range(count)]
    return [cluster.manager.put_match(prompt)[0] for prompt in prompts]


def statuses(cluster: Cluster, task_ids: Sequence[int]) -> list[KVStatus]:
    cluster.clients[0].open_gates(task_ids)
    responses = cluster.manager.wait(task_ids, WAIT_S)
    return [responses[task_id].status for task_id in task_ids]


def test_a_task_that_has_ended_is_not_launched_with_the_others() -> None:
    with running_cluster() as cluster:
        calls = TaskCalls(cluster.manager, cluster.config.tokens_per_block)
        first, ended, last = task_ids = match_puts(cluster, 3)
        calls.cancel(ended)
        assert calls.launch_all({first: [[0, 1]], ended: [[2, 3]], last: [[4, 5]]}) == [first, last]
        assert statuses(cluster, task_ids) == [
            KVStatus.SUCCESS, KVStatus.CANCELLED, KVStatus.SUCCESS,
        ]  # fmt: skip


def test_a_load_that_a_rank_never_begins_counts_as_lost_and_is_cancelled() -> None:
    with running_cluster() as cluster:
        calls = TaskCalls(cluster.manager, cluster.config.tokens_per_block)
        tokens = np.arange(NUM_BLOCKS * cluster.config.tokens_per_block)
        assert cluster.put(tokens, [0, 1]).mask.all()
        task_id, mask = cluster.manager.get_match(tokens)
        assert calls.launch(task_id, [[2, 3]])
        assert not calls.has_arrived(task_id, int(mask.sum()))  # its gate stays shut
        response = cluster.manager.wait([task_id], WAIT_S)[task_id]
        assert response.status is KVStatus.CANCELLED


def test_a_task_with_a_wrong_number_of_blocks_does_not_keep_the_others_from_being_launched() -> (
    None
):
    with running_cluster() as cluster:
        calls = TaskCalls(cluster.manager, cluster.config.tokens_per_block)
        first, wrong, last = task_ids = match_puts(cluster, 3)
        assert calls.launch_all({first: [[0, 1]], wrong: [[2]], last: [[4, 5]]}) == [first, last]
        assert not calls.launch(wrong, [[2, 3]])
        assert statuses(cluster, task_ids) == [
            KVStatus.SUCCESS, KVStatus.CANCELLED, KVStatus.SUCCESS,
        ]  # fmt: skip


def test_tasks_that_a_cache_does_not_take_are_cancelled_for_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise ClosedError("the cache was shut down")

    with running_cluster() as cluster:
        calls = TaskCalls(cluster.manager, cluster.config.tokens_per_block)
        task_ids = match_puts(cluster, 2)
        monkeypatch.setattr(cluster.manager._transport, "launch", refuse)
        assert not calls.launch_all({task_ids[0]: [[0, 1]], task_ids[1]: [[2, 3]]})
        failures = [each.getMessage() for each in caplog.records if "launch_failed" in each.message]
        assert len(failures) == 2
        assert all("shut down" in failure for failure in failures)
        assert statuses(cluster, task_ids) == [KVStatus.CANCELLED] * 2
