"""Prompts stored and found in pieces: continuations of cached chains."""

from __future__ import annotations

from typing import Any

import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from task_builders import REMOTE, World, keys_of

from flexcache.cache.block_keys import PromptContent, unpack_keys
from flexcache.cache.prompt import PromptMaker
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import ChainKeys, find_chain
from flexcache.ids import BlockKey, KVStatus, PromptDetail, TaskKind, TierName

CPU, SSD = TierName.CPU, TierName.SSD
PROMPTS = ["abcdef", "abcxyz", "abq", "zz"]
pieces = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 5))


def found(world: World, text: str, behind: int) -> tuple[int, int]:
    """Return where the hit of a continuation begins in it, and how many blocks it has."""
    task_id = world.match(TaskKind.GET, text, behind=behind)
    plan = world.tasks[task_id].plan
    world.cancel(task_id)
    return plan.offset, plan.num_blocks


@given(st.lists(pieces, max_size=8), st.sampled_from([(), (CPU,)]))
def test_pieces_are_stored_and_found_like_whole_prompts(
    puts: list[tuple[str, int]], cleared: tuple[TierName, ...]
) -> None:
    world, stored = World(cpu=40, ssd=40), {""}
    for text, behind in puts:
        is_stored = text[:behind] in stored
        world.finish_all()
        task_id = world.put(text, behind=behind)
        world.finish_all()
        if not is_stored:
            missing = {"parent_missing": len(text[behind:])} if text[behind:] else {}
            assert world.tasks[task_id].plan.dropped == missing
            assert world.final(task_id).status is KVStatus.NOT_FOUND
            continue
        stored |= {text[:end] for end in range(len(text) + 1)}
    for tier in cleared:
        world.clear(tier)
    for text in PROMPTS:
        for behind in range(len(text)):
            ends = [end for end in range(len(text) + 1) if text[:end] in stored]
            num_blocks = max(ends) - behind if text[:behind] in stored else 0
            assert found(world, text, behind) == (0, max(0, num_blocks))
            world.get(text, behind=behind)  # the world compares what arrives
            world.finish_all()
            world.check()


def test_a_longer_prompt_is_stored_in_pieces_while_the_first_is_on_its_way() -> None:
    world = World(cpu=20, ssd=20)
    first, second, third = (
        world.put(t, behind=b) for t, b in [("ab", 0), ("abcd", 2), ("abcdef", 4)]
    )
    assert world.tasks[third].plan.num_blocks == 2
    for run in world.ops(task_id=third) + world.ops(task_id=second):
        world.finish(run)
    assert world.cached(CPU, "abcdef") == 0  # the blocks before it are not there yet
    world.finish_all()
    assert world.final(first).num_ok == world.final(second).num_ok == 2
    assert world.cached(CPU, "abcdef") == world.cached(SSD, "abcdef") == 6
    world.clear(CPU)
    assert found(world, "abcdef", 3) == (0, 3)


def test_a_piece_behind_one_that_never_arrived_is_not_findable() -> None:
    world = World(cpu=20, ssd=0)
    first, second = world.put("ab"), world.put("abcd", behind=2)
    for run in world.ops(task_id=first):
        world.finish(run, 1, "a fault")
    world.finish_all()
    assert world.final(second).status is KVStatus.SUCCESS
    assert world.cached(CPU, "abcd") == 1
    world.check_nothing_is_held()


def test_a_put_needs_its_parent_in_dram_and_a_get_in_any_tier() -> None:
    world = World(cpu=20, ssd=20)
    world.put("abcd")
    world.finish_all()
    world.clear(CPU)
    refused = world.put("abcdef", behind=4)
    assert world.tasks[refused].plan.dropped == {"parent_missing": 2}
    assert world.stats().totals.dropped_blocks == {"parent_missing": 2}
    assert found(world, "abcd", 2) == (0, 2)
    world.get("abcd")  # which brings it to DRAM
    world.finish_all()
    world.put("abcdef", behind=4)
    world.finish_all()
    assert world.cached(SSD, "abcdef") == 6


def test_a_continuation_is_looked_up_at_the_remote_store() -> None:
    world = World(cpu=20, ssd=0, remote=True)
    world.put("abc")
    world.finish_all()
    world.stored_by_another("abcdef")
    world.up(REMOTE)
    lookup = world.look_up("abcdef", behind=3)
    assert lookup is not None
    world.answer(lookup)
    assert found(world, "abcdef", 3) == (0, 3)
    prefetch = world.match(TaskKind.PREFETCH, "abcdef", behind=3)
    world.launch(prefetch)
    world.finish_all()
    assert world.final(prefetch).num_ok == world.cached(CPU, "abcdef") - 3 == 3


def test_a_lookup_behind_an_unknown_parent_asks_nothing() -> None:
    world = World(cpu=20, ssd=0, remote=True)
    assert world.look_up("abcdef", behind=3) is None


def test_a_mask_that_begins_within_a_continuation_counts_from_its_first_block() -> None:
    world = World(cpu=20, ssd=0)
    world.put("abcdef")
    world.finish_all()
    task_id = world.match(TaskKind.GET, "abcdef", 4, behind=2)
    plan = world.tasks[task_id].plan
    assert (plan.offset, plan.num_blocks) == (2, 2)
    world.launch(task_id)
    world.finish_all()
    result = world.final(task_id)
    assert (result.start, result.num_ok, result.num_tokens) == (2, 2, 64)


def test_layouts_keep_continuations_apart() -> None:
    world = World(cpu=20, ssd=0)
    world.put("abcd")
    world.finish_all()
    world.adopt("@X")
    assert found(world, "abcd", 2) == (0, 0)
    assert world.tasks[world.put("abcdef", behind=4)].plan.dropped == {"parent_missing": 2}
    world.adopt("")
    assert found(world, "abcd", 2) == (0, 2)


def test_leases_in_a_circle_are_no_chain() -> None:
    tier, (a, b) = Tier(CPU, 8), (BlockKey(b"a"), BlockKey(b"b"))
    tier.reserve_keys(ROOT, a, [b])
    tier.reserve_keys(ROOT, b, [a])
    assert tier.chain_to(ROOT, a) == []


def test_the_tokens_of_a_continuation_are_those_from_its_first_block_on() -> None:
    tier, keys = Tier(CPU, 8), keys_of("abcd", 2)
    keys.content = PromptContent(range(100, 132))
    lease = tier.reserve_keys(keys.root, None, keys_of("ab").slice(0, 2))
    tier.publish(lease, 2)
    chain = find_chain(keys, [tier])
    assert chain is not None
    assert chain.content is not None
    assert chain.content.tokens_of(2, 4, 16) == list(range(100, 132))
    assert chain.content.tokens_of(0, 4, 16) == []
    assert [chain.key(i) for i in range(4)] == chain.slice(0, 4) == keys_of("abcd").slice(0, 4)
    assert chain.slice(1, 3) == keys_of("abcd").slice(1, 3)


def test_blocks_with_an_unknown_token_have_no_tokens() -> None:
    content = PromptContent([*range(16), *[-1] * 32])
    assert content.tokens_of(0, 1, 16) == list(range(16))
    assert content.tokens_of(0, 2, 16) == content.tokens_of(1, 3, 16) == []


def test_a_chain_is_packed_as_a_whole() -> None:
    tier = Tier(CPU, 8)
    lease = tier.reserve_keys(ROOT, None, [BlockKey(b"a"), BlockKey(b"b")])
    keys = unpack_keys(ROOT, memoryview(b"cde"), 1, 16, parent_key=b"b")
    chain = find_chain(keys, [tier])
    assert chain is not None
    assert chain.packed(4) == (1, b"abcd")
    tier.release(lease)
    assert find_chain(keys, [tier]) is None


def test_any_part_of_a_chain_has_the_keys_of_the_whole_prompt() -> None:
    whole = keys_of("abcdef")
    for behind in range(1, 6):
        chain = ChainKeys(whole.slice(0, behind), keys_of("abcdef", behind))
        for stop in range(7):
            for start in range(stop + 1):
                assert chain.slice(start, stop) == list(whole.slice(start, stop))


def test_only_keys_can_be_continued() -> None:
    maker = PromptMaker("a model", 2, lambda: PromptDetail.NOTHING)
    wrong: list[tuple[Any, Any]] = [
        (None, b"key"), ([b"k"], b""), ([b"k"], b"k" * 41), ([b"k"], "key")
    ]  # fmt: skip
    for block_keys, parent in wrong:
        with pytest.raises(ValueError, match="parent_key"):
            maker.make(TaskKind.GET, [1, 2], block_keys=block_keys, parent_key=parent)
    with pytest.raises(ValueError, match="parent_key"):
        unpack_keys(b"root", memoryview(bytes(8)), 0, 1, parent_key=b"key")
    assert (
        maker.make(TaskKind.GET, [1, 2], block_keys=[b"k"], parent_key=b"p").keys.parent_key == b"p"
    )
