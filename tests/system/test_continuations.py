"""Prompts put and got in pieces, in process and through a server: `parent_key`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster, until

from flexcache import KVStatus
from flexcache.protocol.endpoints import is_served, private_endpoint

SIZE = 16
KEYS = [bytes([i]) * 32 for i in range(1, 25)]
TOKENS = np.arange(24 * SIZE)


@pytest.fixture(params=["in process", "through a server"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "in process":
        with running_cluster([tmp_path]) as cluster:
            yield cluster
        return
    endpoint = private_endpoint(f"pieces-{tmp_path.name}")
    with running_cluster([tmp_path], endpoint=endpoint) as cluster:
        yield cluster
    until(lambda: not is_served(endpoint))


class Pieces:
    """Moves blocks ``[begin, end)`` of one prompt, as a continuation where ``begin`` is not 0."""

    def __init__(self, cluster: Cluster, namespace: str | None = None) -> None:
        self._cluster = cluster
        self._manager = cluster.manager
        self._namespace = namespace

    def put(self, begin: int, end: int, gpu_blocks: Sequence[int]) -> int:
        """Return how many blocks were stored."""
        task_id, mask = self._manager.put_async(
            TOKENS[begin * SIZE : end * SIZE], self._cluster.slots(gpu_blocks),
            namespace=self._namespace, **self._keys(begin, end),
        )  # fmt: skip
        return self._end(task_id, mask)

    def get(self, begin: int, end: int, gpu_blocks: Sequence[int]) -> int:
        """Return how many blocks were loaded, to the first of ``gpu_blocks``."""
        task_id, mask = self._manager.get_async(
            TOKENS[begin * SIZE : end * SIZE], self._cluster.slots(gpu_blocks),
            namespace=self._namespace, **self._keys(begin, end),
        )  # fmt: skip
        return self._end(task_id, mask)

    def prefetch(self, begin: int, end: int) -> None:
        task_id = self._manager.prefetch_async(
            TOKENS[begin * SIZE : end * SIZE], namespace=self._namespace, **self._keys(begin, end)
        )
        response = self._manager.wait([task_id], WAIT_S)[task_id]
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == (end - begin) * SIZE

    def _keys(self, begin: int, end: int) -> dict:  # type: ignore[type-arg]
        return {"block_keys": KEYS[begin:end], "parent_key": KEYS[begin - 1] if begin else None}

    def _end(self, task_id: int, mask: np.ndarray) -> int:
        response = self._manager.wait([task_id], WAIT_S, completely=True)[task_id]
        assert response.mask.shape == mask.shape
        assert np.array_equal(response.mask, mask)
        return int(mask.sum()) // SIZE


def test_pieces_make_a_prompt_and_a_prompt_has_pieces(cluster: Cluster) -> None:
    pieces = Pieces(cluster)
    assert pieces.put(0, 4, range(4)) == 4
    assert pieces.put(4, 7, range(4, 7)) == 3
    assert pieces.put(7, 8, [7]) == 1
    assert pieces.put(4, 8, range(4, 8)) == 0
    before = cluster.read(range(8))
    assert pieces.get(0, 8, range(16, 24)) == 8
    assert cluster.read(range(16, 24)) == before
    assert pieces.get(5, 8, range(24, 27)) == 3
    assert cluster.read(range(24, 27)) == cluster.read([5, 6, 7])
    assert pieces.get(8, 9, [30]) == 0
    assert cluster.num_leased() == 0


def test_pieces_come_back_from_the_ssd(cluster: Cluster) -> None:
    pieces, manager = Pieces(cluster), cluster.manager
    pieces.put(0, 5, range(5))
    pieces.put(5, 9, range(5, 9))
    manager.clear("CPU")
    assert pieces.get(5, 9, range(20, 24)) == 4
    assert cluster.read(range(20, 24)) == cluster.read(range(5, 9))
    pieces.prefetch(3, 8)  # and what precedes them, without which they could not be found
    assert manager.stats()["tiers"]["CPU"]["indexed"] == 8
    pieces.prefetch(6, 9)
    assert manager.stats()["tiers"]["CPU"]["indexed"] == 9


def test_a_put_without_its_parent_stores_nothing_and_is_counted(cluster: Cluster) -> None:
    pieces, manager = Pieces(cluster), cluster.manager
    assert pieces.put(4, 7, range(4, 7)) == 0
    assert manager.stats()["engine"]["dropped_blocks"] == {"parent_missing": 3}
    assert pieces.get(4, 7, range(20, 23)) == 0
    pieces.put(0, 4, range(4))
    assert Pieces(cluster, "another tenant").put(4, 7, range(4, 7)) == 0
    assert Pieces(cluster, "another tenant").get(2, 4, [20, 21]) == 0
    assert manager.stats()["engine"]["dropped_blocks"] == {"parent_missing": 6}
    assert pieces.put(4, 7, range(4, 7)) == 3


def test_a_mask_counts_from_the_first_block_of_the_continuation(cluster: Cluster) -> None:
    pieces, manager = Pieces(cluster), cluster.manager
    pieces.put(0, 8, range(8))
    wanted = np.ones(4 * SIZE, dtype=np.bool_)
    wanted[:SIZE] = False
    found = manager.get_match_by_tier(
        TOKENS[4 * SIZE : 8 * SIZE], wanted, block_keys=KEYS[4:8], parent_key=KEYS[3]
    )
    assert found is not None
    task_id, mask, sources = found
    assert np.array_equal(mask, wanted)
    assert {tier.value: n for tier, n in sources.items()} == {"CPU": 3 * SIZE}
    manager.launch([task_id], [cluster.slots([20, 21, 22])])
    assert np.array_equal(manager.wait([task_id], WAIT_S)[task_id].mask, wanted)
    assert cluster.read([20, 21, 22]) == cluster.read([5, 6, 7])


@pytest.mark.parametrize("block_keys", [None, KEYS[:1]])
def test_a_parent_key_that_makes_no_sense_is_refused(
    cluster: Cluster, block_keys: list[bytes] | None
) -> None:
    with pytest.raises(ValueError, match="parent_key"):
        cluster.manager.get_match(TOKENS[:SIZE], block_keys=block_keys, parent_key=b"" * 41)


def test_kv_events_name_the_parent_of_a_piece_and_its_tokens() -> None:
    with running_cluster(kv_events=True) as cluster:
        pieces, manager = Pieces(cluster), cluster.manager
        pieces.put(0, 2, [0, 1])
        pieces.put(2, 4, [2, 3])
        first, second = manager.take_changes()
        assert (first.parent, second.parent) == (None, KEYS[1])  # type: ignore[union-attr]
        assert second.token_ids == TOKENS[2 * SIZE : 4 * SIZE].tolist()  # type: ignore[union-attr]


def test_pieces_survive_a_restart(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        pieces = Pieces(cluster)
        pieces.put(0, 4, range(4))
        pieces.put(4, 6, [4, 5])
        before = cluster.read(range(6))
    with running_cluster([tmp_path]) as cluster:
        pieces = Pieces(cluster)
        assert pieces.get(0, 6, range(20, 26)) == 6
        assert cluster.read(range(20, 26)) == before
