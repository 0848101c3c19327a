"""How a block is divided over ranks: sizes, replicas, layouts, and what ranks tell of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcache.config import ModelConfig
from flexcache.errors import ConfigError
from flexcache.protocol.messages import HelloRank
from flexcache.server.cache import TOLD_TTL_S, CacheSlot
from flexcache.server.outbox import Outbox
from flexcache.storage.shards import ShardLayouts, Shards


def model(**shape: Any) -> ModelConfig:
    return ModelConfig("m", 4, 2, 8, torch.bfloat16, **shape)


def test_a_declared_block_is_divided_over_the_ranks_that_differ() -> None:
    token = 4 * 2 * 8 * 2  # layers, K and V, head size, bytes
    assert Shards.of_model(model(), 16) == Shards((16 * 2 * token,))
    assert Shards.of_model(model(tp_size=2), 16) == Shards((16 * token,) * 2)
    replicated = Shards.of_model(model(tp_size=8), 16)
    assert replicated == Shards((16 * token,) * 2, num_replicas=4)
    assert list(replicated.storing_ranks) == [0, 4]
    latent = Shards.of_model(model(tp_size=8, use_mla=True), 16)
    assert (latent.num_ranks, len(latent.sizes), list(latent.storing_ranks)) == (8, 1, [0])


def test_sizes_that_only_ranks_know_are_not_made_up() -> None:
    staged = model(pp_size=2, sized_by_ranks=True)
    with pytest.raises(ConfigError, match="sized_by_ranks"):
        Shards.of_model(staged, 16)
    with pytest.raises(ConfigError, match="sized_by_ranks"):
        _ = staged.token_size_in_bytes


def test_stages_differ_and_replicas_within_a_stage_share() -> None:
    staged = model(pp_size=2, tp_size=4, kv_replicas=2, sized_by_ranks=True)
    shards = Shards.of_ranks(staged, [100, 100, 5000, 5000, 7, 7, 9, 9])
    assert shards == Shards((100, 5000, 7, 9), num_replicas=2)
    assert [shards.of_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(shards.storing_ranks) == [0, 2, 4, 6]
    assert shards.block_bytes == 5116
    assert shards.stored_bytes == 4096 + 8192 + 4096 + 4096


def test_replicas_of_different_size_and_empty_ranks_are_refused() -> None:
    staged = model(tp_size=4, kv_replicas=2, sized_by_ranks=True)
    with pytest.raises(ConfigError, match=r"ranks 2 to 3 .* 5, 6 bytes"):
        Shards.of_ranks(staged, [7, 7, 5, 6])
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        Shards.of_ranks(staged, [0, 0, 5, 5])


@given(st.integers(1, 6).flatmap(
    lambda replicas: st.tuples(st.just(replicas), st.lists(st.integers(1, 9999), min_size=1))
))  # fmt: skip
def test_every_rank_has_a_shard_of_its_size_that_one_rank_stores(case: Any) -> None:
    replicas, sizes = case
    shards = Shards(tuple(sizes), replicas)
    stored = [shards.of_rank(rank) for rank in shards.storing_ranks]
    assert stored == list(range(len(sizes)))
    assert {shards.of_rank(rank) for rank in range(shards.num_ranks)} == set(stored)


# -- layouts -------------------------------------------------------------------------------------


def test_a_layout_is_whole_when_it_is_known_of_every_shard() -> None:
    layouts = ShardLayouts(2)
    layouts.set(1, "b", is_first=True)
    assert layouts.whole is None
    layouts.set(0, "a", is_first=False)
    assert layouts.whole == '["a", "b"]'


def test_other_ranks_layouts_in_another_order_are_another_layout() -> None:
    seen = set()
    for signatures in (["a", "b"], ["b", "a"], ["a", "a"], ['a", "b', "a"]):
        layouts = ShardLayouts(2)
        for shard, signature in enumerate(signatures):
            layouts.set(shard, signature, is_first=False)
        seen.add(layouts.whole)
    assert len(seen) == 4


def test_what_ranks_that_have_left_told_does_not_count_for_another_layout() -> None:
    layouts = ShardLayouts(2)
    for shard in (0, 1):
        layouts.set(shard, "old", is_first=shard == 0)
    layouts.set(0, "old", is_first=True)
    assert layouts.whole == "old"  # they are back
    layouts.set(1, "new", is_first=True)
    assert layouts.whole is None
    layouts.set(0, "new", is_first=False)
    assert layouts.whole == "new"
    layouts.forget(0)
    assert layouts.whole is None


# -- what ranks tell -----------------------------------------------------------------------------


def slot_that_heard(*told: tuple[str, int, int, float]) -> CacheSlot:
    """A slot to which ranks have said Hello: engine, rank, size of a block, time."""
    slot = CacheSlot(lambda model, size, shards: shards, Outbox())  # type: ignore[arg-type, return-value]
    for engine, rank, block_bytes, now in told:
        slot.hear(HelloRank(engine, rank, "c", 1, block_bytes=block_bytes), now)
    return slot


def test_sizes_count_by_engine_and_only_while_the_rank_waits() -> None:
    staged = model(pp_size=2, sized_by_ranks=True)
    slot = slot_that_heard(("a", 0, 10, 1.0), ("b", 1, 20, 1.0))
    assert slot.open(staged, 16, "a", now=1.0) is None
    assert slot.awaited == ["rank 1"]
    told = (("a", 0, 10, 1.0), ("a", 1, 30, 2.0), ("a", 0, 11, 2.5))
    assert slot_that_heard(*told).open(staged, 16, "a", now=2.5) == Shards.of_ranks(
        staged, [11, 30]
    )
    slot = slot_that_heard(*told)
    assert slot.open(staged, 16, "a", now=2.0 + TOLD_TTL_S) is None
    assert slot.awaited == ["rank 1"]
    assert slot.open(staged, 16, "c", now=2.0) is None
    assert slot.awaited == ["rank 0", "rank 1"]


def test_a_flood_of_greetings_leaves_the_latest() -> None:
    slot = slot_that_heard(*(("e", rank, 1, 1.0) for rank in range(10_000)))
    assert 0 < len(slot._told) <= 4096
    assert ("e", 9_999) in slot._told
