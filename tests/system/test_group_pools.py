"""Engines that have a pool for each group: blocks of a group are counted in its own pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flexcache import CacheConfig, KVGroup, KVManager, KVStatus, KVTPClient, ModelConfig

PATIENCE_S = 60.0
TOKENS = 16  # per block
PARTS = 4
GROUPS = (
    KVGroup("full", TOKENS),
    KVGroup("window", TOKENS, 40),
    KVGroup("state", TOKENS, blocks_per_state=PARTS),
)
COUNTS = (60, 20, 5 * PARTS)
KEYS = [bytes([number]) * 32 for number in range(20)]


class Pools:
    """A tensor for each group, of random bytes."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.tensors = {
            name: torch.randint(0, 255, (count, size), dtype=torch.uint8, generator=random)
            for name, count, size in zip(("f", "w", "s"), COUNTS, (512, 256, 320), strict=True)
        }

    def read(self, tables: list[list[int]]) -> list[torch.Tensor]:
        return [
            tensor[table].clone()
            for tensor, table in zip(self.tensors.values(), tables, strict=True)
        ]


@contextlib.contextmanager
def engine(**settings: object) -> Iterator[tuple[KVManager, Pools]]:
    pools = Pools()
    model = ModelConfig("pools", 1, 1, 1, torch.int8, sized_by_ranks=True, groups=GROUPS)
    config = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64, **settings)  # type: ignore[arg-type]
    with KVManager(model, config) as manager, KVTPClient(manager.endpoint) as client:
        client.register_kv_caches(
            pools.tensors, num_blocks=COUNTS, groups=[[name] for name in pools.tensors]
        )
        manager.wait_ready(PATIENCE_S)
        yield manager, pools
        manager.check()


def move(manager: KVManager, task: int, tables: list[list[int]]) -> None:
    manager.launch([task], group_blocks=[tables])
    assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS


def state(slot: int) -> list[int]:
    return list(range(slot * PARTS, (slot + 1) * PARTS))


@pytest.mark.parametrize("has_ssd", [False, True])
def test_a_prompt_stored_in_pieces_is_resumed_at_the_tail_of_either(
    has_ssd: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ssd = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path_factory.mktemp("ssd"))]}
    with engine(**(ssd if has_ssd else {})) as (manager, pools):
        first = [[50, 51, 52, 53], [10, 11, 12], state(4)]
        second = [[54, 55], [12, 13, 14], state(1)]
        expected = pools.read([first[0] + second[0], second[1], second[2]])
        after_first = pools.read(first)
        task, mask = manager.put_match(np.zeros(4 * TOKENS), tail_at=64, block_keys=KEYS[:4])
        assert mask.all()
        move(manager, task, first)
        task, mask = manager.put_match(
            np.zeros(2 * TOKENS), tail_at=32, block_keys=KEYS[4:6], parent_key=KEYS[3]
        )
        assert mask.all()
        move(manager, task, second)
        for tensor in pools.tensors.values():
            tensor.zero_()
        if has_ssd:
            manager.wait([task], PATIENCE_S, completely=True)
            manager.clear("CPU")

        task, mask = manager.get_match(np.zeros(6 * TOKENS + 1), block_keys=KEYS[:6])
        assert mask.sum() == 6 * TOKENS
        loaded = [[1, 2, 3, 4, 5, 6], [19, 18, 17], state(2)]
        move(manager, task, loaded)
        assert list(map(torch.equal, pools.read(loaded), expected)) == [True] * 3

        # Only the pages behind the first three, whose windows the engine has in part.
        task, mask = manager.get_match(
            np.zeros(2 * TOKENS), block_keys=KEYS[3:5], parent_key=KEYS[2]
        )
        assert mask.sum() == TOKENS
        move(manager, task, [[9], [-1, -1, 3], state(0)])
        again = pools.read([[9], [3], state(0)])
        wanted = [after_first[0][3:], after_first[1][2:], after_first[2]]
        assert list(map(torch.equal, again, wanted)) == [True] * 3


def test_a_tail_with_a_block_beyond_the_pool_of_its_group_is_not_stored() -> None:
    with engine() as (manager, _):
        task, _ = manager.put_match(np.zeros(16), tail_at=16, block_keys=KEYS[:1])
        manager.launch([task], group_blocks=[[[50], [COUNTS[1]], state(0)]])
        response = manager.wait([task], PATIENCE_S)[task]
        assert response.error == "a GPU block lies outside of [0, 20)"
        task, mask = manager.get_match(np.zeros(17), block_keys=KEYS[:1])
        assert not mask.any()


def test_counts_of_other_groups_are_refused_at_the_call() -> None:
    pools = Pools()
    with (
        KVTPClient("ipc:///nowhere", engine_id="none") as rank,
        pytest.raises(ValueError, match="num_blocks of 2 groups, but there are 3"),
    ):
        rank.register_kv_caches(
            pools.tensors, num_blocks=COUNTS[:2], groups=[[name] for name in pools.tensors]
        )
