"""Quotas of a tier's tenants, against a model that counts who has what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from builders import ids, key_of, keys_of, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexcache.cache.block_keys import ENGINE_KEYS, make_root, tag_of, tenant_of
from flexcache.cache.block_pool import Quotas
from flexcache.cache.eviction_policy import LruQueue, Outlook
from flexcache.cache.prefix_index import PrefixMatch, RestoredRun
from flexcache.cache.tail_index import Tail
from flexcache.cache.tier import Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import RootId, TierName
from flexcache.stats import QuotaStats


def root_of(*namespace: str) -> RootId:
    return make_root("a model", namespace, ENGINE_KEYS)


ROOTS = {
    root_of("a"): "a",
    root_of("a", "an adapter"): "a",
    root_of("b"): "b",
    root_of("unnamed"): "*",
    root_of(): "*",
}
A, A_ADAPTER, B, UNNAMED, NO_NAMESPACE = ROOTS

some_root = st.sampled_from(list(ROOTS))
some_word = st.text("xy", min_size=1, max_size=5)
some_position = st.integers(0, 99)


def tier_of(capacity: int, quotas: Mapping[str, int]) -> Tier:
    return Tier(TierName.CPU, capacity, quotas=Quotas(capacity, quotas))


def store(tier: Tier, word: str, root: RootId) -> int:
    """Store what is missing of a prompt; return how many blocks there was room for."""
    keys = prompt(word, root)
    start = tier.match(keys).num_blocks
    lease = tier.reserve(keys, start, len(word))
    count = len(lease)
    tier.publish(lease, count)
    tier.release(lease)
    return count


def store_tail(tier: Tier, word: str, root: RootId, num_units: int) -> None:
    """Store a tail behind a prompt."""
    tail = tier.reserve_tail(root, key_of(word), num_units)
    assert tail is not None
    tier.publish(tail, num_units)
    tier.release(tail)


def used(tier: Tier) -> dict[str, int]:
    assert tier.quotas is not None
    return {tenant: use.used for tenant, use in tier.quotas.stats().items()}


class QuotaMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 14),
        shares=st.tuples(*[st.integers(0, 5)] * 3),
    )
    def make(self, capacity: int, shares: tuple[int, int, int]) -> None:
        whole = max(sum(shares), 1)
        names = ("*", "a", "b")
        self.quota = {n: s * capacity // whole for n, s in zip(names, shares, strict=True)}
        self.tier = tier_of(capacity, self.quota)
        self.open: list[Lease] = []
        self.pins: list[PrefixMatch] = []
        self.evicted = Counter[str]()

    # what the model sees: whose each block is, and which of them could be evicted

    def owners(self) -> dict[int, str]:
        owners = {
            block: ROOTS[run.root]
            for run in self.tier.index._runs.values()
            for block in run.blocks.tolist()
        }
        for lease in self.open:
            owners |= dict.fromkeys(lease.blocks.tolist(), ROOTS[lease.root])
        return owners

    def held(self) -> set[int]:
        matches = [match for lease in self.open for match in (lease.parent_pin, lease.published)]
        return {
            block
            for match in (*matches, *self.pins)
            for block in self.tier.index.blocks(match).tolist()
        }

    def indexed(self) -> dict[int, str]:
        leased = {b for lease in self.open for b in lease.blocks.tolist()}
        return {block: who for block, who in self.owners().items() if block not in leased}

    @rule(root=some_root, word=some_word, ends=st.booleans())
    def put(self, root: RootId, word: str, ends: bool) -> None:
        keys, tier, tenant = prompt(word, root), self.tier, ROOTS[root]
        start = tier.match(keys).num_blocks
        start += tier.num_in_flight(keys, start, len(word))
        if start == len(word):
            return
        count, num_free = len(word) - start, tier.pool.num_free
        before = Counter(self.owners().values())
        held, match = self.held(), tier.index.match(keys)
        if not tier.num_in_flight(keys, match.num_blocks, len(word)):
            held |= set(tier.index.blocks(match).tolist())
        evictable = Counter(who for block, who in self.indexed().items() if block not in held)

        lease = tier.reserve(keys, start, len(word))

        gone = evictable - Counter(who for b, who in self.indexed().items() if b not in held)
        self.evicted += gone
        missing = max(0, count - num_free)
        wanted = Counter({tenant: count})
        excess = {who: before[who] + wanted[who] - quota for who, quota in self.quota.items()}
        could_give = {who: max(0, min(over, evictable[who])) for who, over in excess.items()}
        others = sum(num for who, num in could_give.items() if who != tenant)
        assert len(lease) == min(count, num_free + others + evictable[tenant])
        assert sum(gone.values()) == len(lease) - min(count, num_free)
        for who, num in gone.items():
            assert who == tenant or num <= could_give[who], "it was within its quota"
            for worse in self.quota:
                if excess[worse] > excess[who] and missing:
                    assert gone[worse] >= could_give[worse], "the worst gives first"
        self.open.append(lease)
        if ends:
            self.publish(-1, len(lease))
            self.release(-1)

    @precondition(lambda self: any(not lease.to_publish for lease in self.open))
    @rule(position=some_position, num_arrived=st.integers(0, 5))
    def arrive(self, position: int, num_arrived: int) -> None:
        fresh = [i for i, lease in enumerate(self.open) if not lease.to_publish]
        self.publish(fresh[position % len(fresh)], num_arrived)

    def publish(self, position: int, num_arrived: int) -> None:
        self.tier.publish(self.open[position], num_arrived)

    @precondition(lambda self: self.open)
    @rule(position=some_position)
    def end(self, position: int) -> None:
        self.release(position % len(self.open))

    def release(self, position: int) -> None:
        lease = self.open[position]
        self.tier.release(lease)
        if not lease.waiting:
            del self.open[position]
        else:  # it ends with the lease that it waits for
            self.open.append(self.open.pop(position))
            self.settle_all()

    def settle_all(self) -> None:
        """End everything: leases that wait share the fate of others."""
        for lease in self.open:
            if not lease.released:
                self.tier.release(lease)
        self.open.clear()

    @rule(root=some_root, word=some_word)
    def get(self, root: RootId, word: str) -> None:
        match = self.tier.match(prompt(word, root))
        self.tier.index.pin(match)
        self.pins.append(match)

    @precondition(lambda self: self.pins)
    @rule(position=some_position)
    def end_get(self, position: int) -> None:
        self.tier.unpin(self.pins.pop(position % len(self.pins)))

    @precondition(lambda self: not self.open and not self.pins)
    @rule(root=some_root, word=some_word)
    def discard(self, root: RootId, word: str) -> None:
        self.tier.discard(root, key_of(word))

    @rule()
    def clear(self) -> None:
        self.tier.clear()

    @invariant()
    def counts_whose_blocks_they_are(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert self.tier.quotas is not None
        uses, owners = self.tier.quotas.stats(), Counter(self.owners().values())
        assert {who: use.used for who, use in uses.items()} == {
            who: owners[who] for who in self.quota
        }
        assert {who: use.evicted for who, use in uses.items()} == {
            who: self.evicted[who] for who in self.quota
        }


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(stateful_step_count=40)


# -- by example ------------------------------------------------------------------------------


def test_what_others_do_not_use_is_borrowed_and_given_back_first() -> None:
    tier = tier_of(8, {"*": 0, "a": 4, "b": 4})
    assert store(tier, "xxxxxxxx", A) == 8, "all of it is free"
    assert store(tier, "xxx", B) == 3
    assert used(tier) == {"*": 0, "a": 5, "b": 3}
    assert store(tier, "yyyyyyyy", A) == 5, "its own older blocks go"
    assert tier.match(prompt("xxx", B)).num_blocks == 3
    assert store(tier, "xxxxx", B) == 1, "beyond its quota it takes nothing from another"
    assert used(tier) == {"*": 0, "a": 4, "b": 4}


def test_a_flood_of_unnamed_namespaces_takes_nothing_from_a_named_one() -> None:
    tier = tier_of(12, {"*": 4, "a": 8})
    store(tier, "xxxxxxxx", A)
    for number in range(50):
        store(tier, "xyxyxy", root_of(f"flood {number}"))
    assert tier.match(prompt("xxxxxxxx", A)).num_blocks == 8
    assert used(tier) == {"*": 4, "a": 8}


def test_a_tenant_has_all_its_namespaces() -> None:
    tier = tier_of(4, {"*": 0, "a": 4})
    store(tier, "xx", A)
    store(tier, "yy", A_ADAPTER)
    assert used(tier) == {"*": 0, "a": 4}


def test_pinned_blocks_of_a_tenant_over_its_quota_are_not_waited_for() -> None:
    tier = tier_of(6, {"*": 0, "a": 3, "b": 3})
    store(tier, "xxxx", A)
    store(tier, "yy", B)
    pinned = tier.match(prompt("xxxx", A))
    tier.index.pin(pinned)
    assert store(tier, "xx", B) == 2, "its own older blocks go instead"
    assert used(tier) == {"*": 0, "a": 4, "b": 2}
    tier.unpin(pinned)
    assert store(tier, "z", B) == 1
    assert used(tier) == {"*": 0, "a": 3, "b": 3}


def test_withheld_blocks_are_no_tenants() -> None:
    tier = tier_of(6, {"*": 2, "a": 4})
    store(tier, "xx", UNNAMED)
    withheld = tier.reserve_private(RootId(b""), tier.pool.num_free)
    assert used(tier) == {"*": 2, "a": 0}
    assert store(tier, "yy", A) == 0, "the others are within their quota"
    tier.release(withheld)
    assert store(tier, "yyyy", A) == 4


def test_after_a_restart_blocks_are_counted_for_their_tenants_again() -> None:
    tier = tier_of(8, {"*": 2, "a": 6})
    tier.expect(ids(0, 1, 2, 5))
    tier.restore(
        [
            RestoredRun(A, None, keys_of("xxx"), ids(0, 1, 2)),
            RestoredRun(NO_NAMESPACE, None, keys_of("y"), ids(5)),
        ]
    )
    tier.restore_tails([Tail(A, key_of("xxx"), ids(6, 7))])
    assert used(tier) == {"*": 1, "a": 5}
    tier.check()


def test_tails_count_and_are_evicted_with_their_tenants_blocks() -> None:
    tier = tier_of(6, {"*": 0, "a": 3, "b": 3})
    store(tier, "x", A)
    store_tail(tier, "x", A, 3)
    store(tier, "y", B)
    assert used(tier) == {"*": 0, "a": 4, "b": 1}
    assert store(tier, "xx", B) == 2
    assert tier.tails.find(A, key_of("x")) is None, "it goes as a whole"
    assert used(tier) == {"*": 0, "a": 1, "b": 3}
    tier.check()


def test_the_rest_of_a_tail_is_used_before_more_is_evicted() -> None:
    tier = tier_of(20, {"*": 0, "a": 10, "b": 10})
    store(tier, "x", A)
    store_tail(tier, "x", A, 12)
    store(tier, "xxxxxxx", B)
    assert store(tier, "yyyy", B) == 4, "one more than it is sure of"
    assert tier.match(prompt("xxxxxxx", B)).num_blocks == 7
    assert used(tier) == {"*": 0, "a": 1, "b": 11}
    assert tier.quotas is not None
    assert [use.evicted for use in tier.quotas.stats().values()] == [0, 12, 0]
    assert tier.counters.evicted_blocks == 12
    tier.check()


class _Worthless(LruQueue):
    """The newcomers are worth less than anything that is cached."""

    def bar(self, outlook: Outlook) -> float:
        return -1.0


def test_worth_decides_within_a_tenant_and_not_what_a_tenant_is_sure_of() -> None:
    quotas = Quotas(4, {"*": 0, "a": 2, "b": 2})
    tier = Tier(TierName.CPU, 4, _Worthless, bypasses=True, quotas=quotas)
    store(tier, "xxxx", A)
    outlook = Outlook(0, 0, 0)
    lease = tier.reserve(prompt("yyy", B), 0, 3, outlook)
    assert len(lease) == 2, "what it is sure of, and none of its own for the third"
    assert lease.is_refused
    tier.release(lease)


def test_what_is_worth_too_little_for_its_tenant_takes_no_room_of_others() -> None:
    quotas = Quotas(12, {"*": 0, "a": 4, "b": 4})
    tier = Tier(TierName.CPU, 12, _Worthless, bypasses=True, quotas=quotas)
    store(tier, "xxxxxxx", A)
    store(tier, "yyyyy", B)  # over its quota too, but by less
    lease = tier.reserve(prompt("zzzz", A), 0, 4, Outlook(0, 0, 0))
    assert len(lease) == 0 and lease.is_refused
    assert used(tier) == {"*": 0, "a": 7, "b": 5}
    tier.release(lease)


def test_what_a_tenant_is_sure_of_does_not_depend_on_worth() -> None:
    quotas = Quotas(12, {"*": 0, "a": 6, "b": 6})
    tier = Tier(TierName.CPU, 12, _Worthless, bypasses=True, quotas=quotas)
    store(tier, "xxxxx", A)
    store(tier, "yyyyyyy", B)
    lease = tier.reserve(prompt("zzzz", A), 0, 4, Outlook(0, 0, 0))
    assert len(lease) == 1 and lease.is_refused
    assert used(tier) == {"*": 0, "a": 6, "b": 6}
    tier.release(lease)


def test_look_ups_are_counted_by_tenant() -> None:
    quotas = Quotas(4, {"*": 1, "a": 3})
    quotas.count_get(A, 3, 1)
    quotas.count_get(UNNAMED, 0, 2)
    quotas.count_get(root_of("another"), 1, 0)
    assert quotas.stats() == {
        "*": QuotaStats(quota=1, hit=1, missed=2), "a": QuotaStats(quota=3, hit=3, missed=1)
    }  # fmt: skip


# -- roots -----------------------------------------------------------------------------------


def test_a_root_tells_its_tenant_whatever_else_it_is_made_of() -> None:
    roots = [
        make_root(model, ["a", *more], kind)
        for model in ("one", "two")
        for more in ([], ["adapter"])
        for kind in ("tokens", "engine")
    ]
    assert len(set(roots)) == len(roots)
    assert {tenant_of(root) for root in roots} == {tag_of("a")}
    assert tenant_of(make_root("one", ["b"], "engine")) != tag_of("a")
    assert make_root("one", [], "engine") != make_root("one", [""], "engine")


# -- the checker -----------------------------------------------------------------------------


def _charge_another(quotas: Quotas) -> None:
    quotas._tenant_of[:1] = 2


def _miscount(quotas: Quotas) -> None:
    quotas._parts[1].used += 1


def _charge_a_free_block(quotas: Quotas) -> None:
    quotas.take(1, np.array([3]))


@pytest.mark.parametrize("damage", [_charge_another, _miscount, _charge_a_free_block])
def test_check_notices_damage(damage: Callable[[Quotas], None]) -> None:
    tier = tier_of(4, {"*": 0, "a": 2, "b": 2})
    store(tier, "xx", A)
    tier.check()
    assert tier.quotas is not None
    damage(tier.quotas)
    with pytest.raises(InternalError):
        tier.check()
