"""Roots that no engine uses any more: what they have goes first, unless it is used again."""

from __future__ import annotations

import pytest
from builders import OTHER_ROOT, ROOT, key_of, make_cache, prompt
from task_builders import ENGINE, OTHER, World

from flexcache.cache.journal import Removed, Stored
from flexcache.cache.tier import Tier
from flexcache.ids import TaskKind


def store(tier: Tier, word: str, root: bytes = ROOT) -> None:
    keys = prompt(word, root)  # type: ignore[arg-type]
    cached = tier.match(keys)
    lease = tier.reserve(keys, cached.num_blocks, len(word))
    tier.publish(lease, len(lease))
    tier.release(lease)


@pytest.fixture
def tier() -> Tier:
    return make_cache(10).tiers.host


def found(tier: Tier, word: str, root: bytes = ROOT) -> int:
    return tier.index.match(prompt(word, root)).num_blocks  # type: ignore[arg-type]


def test_they_go_before_all_else_however_recent(tier: Tier) -> None:
    store(tier, "abcd", OTHER_ROOT)
    store(tier, "abcd")
    store(tier, "abxy")
    tier.retire_root(ROOT)
    tier.index.check()
    store(tier, "efgh", OTHER_ROOT)
    assert (found(tier, "abcd", OTHER_ROOT), found(tier, "efgh", OTHER_ROOT)) == (4, 4)
    assert found(tier, "abcd") + found(tier, "abxy") <= 4
    tier.check()


def test_what_is_used_again_is_ordinary(tier: Tier) -> None:
    store(tier, "abcd")
    tier.retire_root(ROOT)
    store(tier, "efghi", OTHER_ROOT)
    tier.match(prompt("abcd"))
    store(tier, "jk", OTHER_ROOT)
    assert found(tier, "abcd") == 4
    assert found(tier, "efghi", OTHER_ROOT) == 4
    tier.check()


def test_held_and_discarded_blocks_keep_what_they_are(tier: Tier) -> None:
    store(tier, "abcd")
    store(tier, "abxy")
    pinned = tier.match(prompt("abcd"))
    tier.index.pin(pinned)
    tier.discard(ROOT, key_of("abc"))
    tier.retire_root(ROOT)
    tier.check()
    tier.unpin(pinned)
    tier.check()
    store(tier, "efgh", OTHER_ROOT)
    assert found(tier, "ab") == 2
    tier.check()


def test_readers_of_events_hear_of_it_at_once() -> None:
    """They know blocks by the engine's keys, which are the same under the next root."""
    cache = make_cache(8, tokens_per_block=1)
    host = cache.tiers.host
    store(host, "abcd")
    cache.tiers.retire([ROOT])
    store(host, "abcd", OTHER_ROOT)
    assert cache.tiers.journal is not None
    changes = cache.tiers.journal.take()
    assert [(type(each), each.root) for each in changes if isinstance(each, Stored | Removed)] == [
        (Stored, ROOT), (Removed, ROOT), (Stored, OTHER_ROOT),
    ]  # fmt: skip
    store(host, "efgh", OTHER_ROOT)
    assert not any(isinstance(each, Removed) for each in cache.tiers.journal.take())
    host.check()


def test_who_only_prefetches_uses_no_root() -> None:
    """A router has prompts prefetched by the operator's session, which has no weights."""
    world = World(cpu=4, ssd=0)
    world.put("abcd")
    world.finish_all()
    world.match(TaskKind.PREFETCH, "abcd", engine=OTHER)
    world.engine.set_weights(ENGINE, 1, True, world.now)
    world.match(TaskKind.PREFETCH, "abcd", engine=OTHER)
    assert world.cache.tiers.is_retired(world.placed("abcd").root)
    world.finish_all()
    world.check()
