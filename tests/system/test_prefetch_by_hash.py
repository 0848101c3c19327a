"""`POST /cache/prefetch` with the hash of a block as KV events have it: how routers ask."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, ops, running_cluster, until
from ports import free_port

from flexcache.cache.journal import Change, Medium, Stored
from flexcache.events.wire import low_64_bits

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

NUM_BLOCKS = 24
TOKENS = np.arange(NUM_BLOCKS * 16)
BLOCKS = list(range(NUM_BLOCKS))
KEYS = [bytes([number]) * 32 for number in range(1, NUM_BLOCKS + 1)]
"""An engine's, as vLLM's: 32 bytes each."""
NAMESPACE = ("vllm", "sha256")


def ask(port: int, path: str, content: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def put(cluster: Cluster, keys: Sequence[bytes] | None) -> None:
    """Store a prompt in every tier, and clear DRAM."""
    task_id, _ = cluster.manager.put_async(
        TOKENS, cluster.slots(BLOCKS), namespace=NAMESPACE, block_keys=keys
    )
    cluster.manager.wait([task_id], WAIT_S, completely=True)


def get(cluster: Cluster, keys: Sequence[bytes] | None) -> int:
    """Return how many blocks a get finds."""
    task_id, mask = cluster.manager.get_async(
        TOKENS, cluster.slots(BLOCKS), namespace=NAMESPACE, block_keys=keys
    )
    cluster.manager.wait([task_id], WAIT_S, completely=True)
    return int(mask.sum()) // 16


def told_names(changes: Sequence[Change]) -> list[int]:
    """Return the names of the blocks below DRAM, in the order of their prompt."""
    stored = [each for each in changes if isinstance(each, Stored)]
    below = [each for each in stored if each.medium is Medium.STORAGE]
    return [low_64_bits(key) for each in below for key in each.keys]


@pytest.mark.parametrize("keys", [KEYS, None], ids=["an engine's keys", "keys of tokens"])
def test_a_block_and_those_before_it_are_loaded(
    tmp_path: Path, keys: Sequence[bytes] | None
) -> None:
    port = free_port()
    with running_cluster(
        [tmp_path], http_endpoint=str(port), kv_events=True, num_cpu_blocks=48
    ) as cluster:
        put(cluster, keys)
        names = told_names(cluster.manager.take_changes())
        assert len(names) == NUM_BLOCKS
        ask(port, "/cache/clear", {"tier": "CPU"})
        before = ops(cluster)

        assert ask(port, "/cache/prefetch", {"block_hash": names[9]}) == (202, {"blocks": 10})
        until(lambda: cluster.manager.stats()["ended_tasks"].get("prefetch_success") == 1)
        assert ops(cluster)["DISK2H"] - before.get("DISK2H", 0) == 10
        assert ask(port, "/cache/prefetch", {"block_hash": names[-1]}) == (202, {"blocks": 14})
        until(lambda: cluster.manager.stats()["ended_tasks"].get("prefetch_success") == 2)
        assert ops(cluster)["DISK2H"] - before.get("DISK2H", 0) == NUM_BLOCKS

        assert ask(port, "/cache/prefetch", {"block_hash": names[-1]}) == (202, {"blocks": 0})

        bytes_before = cluster.read(BLOCKS)
        cluster.wipe(BLOCKS)
        assert get(cluster, keys) == NUM_BLOCKS
        assert cluster.read(BLOCKS) == bytes_before
        assert ops(cluster)["DISK2H"] - before.get("DISK2H", 0) == NUM_BLOCKS  # none again
        assert cluster.manager.stats()["early_loads"]["early"] == NUM_BLOCKS

        assert ask(port, "/cache/prefetch", {"block_hash": names[-1] ^ 1}) == (202, {"blocks": 0})
        assert ask(port, "/cache/clear", {"tier": None})[0] == 200
        assert ask(port, "/cache/prefetch", {"block_hash": names[-1]}) == (202, {"blocks": 0})


def test_blocks_of_an_earlier_server_have_the_names_that_their_restoring_told(
    tmp_path: Path,
) -> None:
    with running_cluster([tmp_path], kv_events=True) as cluster:
        put(cluster, KEYS)
        names = told_names(cluster.manager.take_changes())
    port = free_port()
    with running_cluster([tmp_path], http_endpoint=str(port), kv_events=True) as cluster:
        assert sorted(told_names(cluster.manager.take_changes())) == sorted(names)
        assert ask(port, "/cache/prefetch", {"block_hash": names[-1]}) == (202, {"blocks": 24})
        until(lambda: cluster.manager.stats()["ended_tasks"].get("prefetch_success") == 1)
        assert get(cluster, KEYS) == NUM_BLOCKS


def test_requests_that_make_no_sense_are_refused_by_name(tmp_path: Path) -> None:
    port = free_port()
    with running_cluster([tmp_path], http_endpoint=str(port)):
        status, answer = ask(port, "/cache/prefetch", {"block_hash": 7})
        assert status == 400
        assert "publishes no KV events" in answer["error"]
        for body in ({}, {"block_hash": 7, "token_ids": [1]}):
            status, answer = ask(port, "/cache/prefetch", body)
            assert status == 400
            assert "one of token_ids, block_keys and block_hash" in answer["error"]
