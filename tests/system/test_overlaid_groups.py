"""Models whose groups overlay each other in the engine's blocks: each moves its own bytes only."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from engine_memory import EngineMemory
from overlaid import Contents, OverlaidTensors

from flexcache import CacheConfig, KVGroup, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.errors import RegistrationError

PATIENCE_S = 60.0
NUM_BLOCKS = 100
PAGE = 512
STATE = 272

# A window's block has twice the tokens of a full one's: units of two blocks.
GROUPS = (KVGroup("window", 32, 40), KVGroup("full", 16), KVGroup("state", 32))
FIRST_STAGE: list[Contents] = [{"w.0": PAGE}, {"f.0": PAGE, "f.1": PAGE}, {"s.0": STATE}]
LAST_STAGE: list[Contents] = [{}, {"f.2": PAGE}, {"s.1": STATE, "s.2": STATE, "s.3": STATE}]


def stages(num: int) -> ModelConfig:
    return ModelConfig(
        "overlaid", 1, 1, 1, torch.int8, pp_size=num, sized_by_ranks=True, groups=GROUPS
    )


@contextlib.contextmanager
def overlaid_engine(
    contents: Sequence[Sequence[Contents]], memory: EngineMemory, **settings: object
) -> Iterator[tuple[KVManager, list[OverlaidTensors]]]:
    config = CacheConfig(tokens_per_block=32, num_cpu_blocks=32, **settings)  # type: ignore[arg-type]
    kv = [OverlaidTensors(each, NUM_BLOCKS, PAGE, memory.place) for each in contents]
    with contextlib.ExitStack() as held:
        manager = held.enter_context(KVManager(stages(len(contents)), config))
        for rank, lent in enumerate(kv):
            client = held.enter_context(KVTPClient(manager.endpoint, rank=rank))
            tensors = memory.lend(lent.tensors)
            client.register_kv_caches(tensors, num_blocks=lent.num_blocks, groups=lent.layers)
        manager.wait_ready(PATIENCE_S)
        yield manager, kv
        manager.check()


@pytest.mark.parametrize("contents", [[FIRST_STAGE], [FIRST_STAGE, LAST_STAGE]])
def test_every_group_of_every_rank_comes_back_and_nothing_else_changes(
    contents: Sequence[Sequence[Contents]], memory: EngineMemory
) -> None:
    num_tokens = 32 * 3
    with overlaid_engine(contents, memory) as (manager, kv):
        free = itertools.count(7)

        def tables() -> list[list[int]]:
            counts = [group.num_needed(num_tokens) for group in GROUPS]
            return [list(itertools.islice(free, count)) for count in counts]

        def read(tables: list[list[int]]) -> list[list[list[bytes]]]:
            return [
                [[lent.read(g, b) for b in table] for g, table in enumerate(tables)] for lent in kv
            ]

        stored, loaded = tables(), tables()
        expected = read(stored)
        task, _ = manager.put_match(np.arange(num_tokens), tail_at=num_tokens)
        manager.launch([task], group_blocks=[stored])
        assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS
        for lent in kv:
            lent.raw[:, stored[0] + stored[1] + stored[2]] = 0  # of the views, too
        around = [
            [list(lent.untouched(g, b)) for g, table in enumerate(loaded) for b in table]
            for lent in kv
        ]
        task, mask = manager.get_match(np.arange(num_tokens + 1))
        assert mask.sum() == num_tokens
        manager.launch([task], group_blocks=[loaded])
        assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS
        assert read(loaded) == expected
        assert around == [
            [list(lent.untouched(g, b)) for g, table in enumerate(loaded) for b in table]
            for lent in kv
        ]
        # Two blocks a unit, each as large as the rank's largest group.
        sizes = [max(2 * PAGE, STATE), max(PAGE, 3 * STATE)][: len(kv)]
        assert manager.stats()["block_bytes"] == 2 * sum(sizes)


def test_a_block_that_is_not_wanted_is_not_loaded(memory: EngineMemory) -> None:
    with overlaid_engine([FIRST_STAGE], memory) as (manager, [lent]):
        prompt = np.arange(64)
        task, _ = manager.put_match(prompt, tail_at=64)
        manager.launch([task], group_blocks=[[[1, 2], [3, 4, 5, 6], [7]]])
        assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS
        expected, before = lent.read(0, 2), lent.raw.clone()
        task, _ = manager.get_match(np.arange(65))
        manager.launch([task], group_blocks=[[[-1, 20], [-1] * 4, [-1]]])
        assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS
        assert lent.read(0, 20) == expected
        before[0, 20] = lent.raw[0, 20]
        assert torch.equal(lent.raw, before)


def test_a_rank_whose_layers_are_in_other_groups_is_refused() -> None:
    config = CacheConfig(tokens_per_block=32, num_cpu_blocks=32)
    lent = OverlaidTensors(FIRST_STAGE, NUM_BLOCKS, PAGE)
    with KVManager(stages(1), config) as manager, KVTPClient(manager.endpoint) as rank:
        rank.register_kv_caches(lent.tensors, num_blocks=NUM_BLOCKS, groups=lent.layers[1:])
        with pytest.raises(RegistrationError, match="in 2 groups, but the model has 3"):
            rank.wait_registered(PATIENCE_S)


def test_groups_that_do_not_fit_the_tensors_are_refused_at_the_call() -> None:
    lent = OverlaidTensors(FIRST_STAGE, NUM_BLOCKS, PAGE)
    with KVTPClient("ipc:///nowhere", engine_id="none") as rank:
        with pytest.raises(ValueError, match="need num_blocks"):
            rank.register_kv_caches(lent.tensors, groups=lent.layers)
        with pytest.raises(ValueError, match=r"layer s\.9 of a group has no KV tensor"):
            rank.register_kv_caches(lent.tensors, num_blocks=NUM_BLOCKS, groups=[["s.9"]])
