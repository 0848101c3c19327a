"""What is lent to peers stays where it is, and what is known of them is soon out of date."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from task_builders import World

from flexcache.cache.block_keys import EngineBlockKeys, PackedBlockKeys
from flexcache.cache.early_loads import STAGED_S, STAGED_SHARE
from flexcache.cache.peers import (
    GRACE_S,
    KNOWN_S,
    LENT_SHARE,
    LOAN_S,
    STAGE_AGAIN_S,
    FoundHere,
    PeerLoans,
    PeerTier,
)
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import Tiers
from flexcache.ids import BlockKey, OpKind, RootId, TaskKind, TierName

ROOT = RootId(b"r" * 16)
NUM_KEYS = 12


def keys_of(prompt: int, num_shared: int = 4) -> list[BlockKey]:
    """Keys of a prompt that begins as all others do."""
    own = [b"p%d-%d" % (prompt, i) for i in range(num_shared, NUM_KEYS)]
    return [BlockKey(k.ljust(16)) for k in [b"all-%d" % i for i in range(num_shared)] + own]


def named(keys: list[BlockKey], root: RootId = ROOT) -> EngineBlockKeys:
    return EngineBlockKeys(root, keys, len(keys))


def packed(keys: list[BlockKey], root: RootId = ROOT) -> PackedBlockKeys:
    return PackedBlockKeys(root, memoryview(b"".join(keys)), 16)


def make(capacity: int = 64) -> tuple[Tiers, PeerLoans]:
    tiers = Tiers([Tier(TierName.CPU, capacity), PeerTier(256)])
    return tiers, PeerLoans(tiers)


def store(tiers: Tiers, keys: list[BlockKey], root: RootId = ROOT) -> dict[int, BlockKey]:
    """Put a prompt into DRAM, as far as there is room; return what was written where."""
    host = tiers.host
    have = host.index.match(named(keys, root)).num_blocks
    lease = host.reserve(named(keys, root), have, len(keys))
    written = dict(zip(lease.blocks.tolist(), lease.keys, strict=True))
    host.publish(lease, len(lease))
    host.release(lease)
    return written


class LoansMachine(RuleBasedStateMachine):
    """Prompts come and go in a small tier, of which peers read."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers, self.loans = make(32)
        self.content: dict[int, BlockKey] = {}
        self.open: dict[bytes, tuple[list[int], list[BlockKey], float]] = {}
        self.now = 0.0

    @rule(prompt=st.integers(0, 9), length=st.integers(1, NUM_KEYS))
    def put(self, prompt: int, length: int) -> None:
        self.content |= store(self.tiers, keys_of(prompt)[:length])

    @rule(prompt=st.integers(0, 9), start=st.integers(0, 11), count=st.integers(1, 12),
          peer=st.sampled_from([b"one", b"two"]))  # fmt: skip
    def lend(self, prompt: int, start: int, count: int, peer: bytes) -> None:
        keys = keys_of(prompt)[start : start + count]
        num_here, *_ = self.loans.find(ROOT, packed(keys))
        there = self.tiers.host.index.contains
        assert num_here == sum(there(ROOT, key) for key in keys)
        loan = self.loans.lend(peer, ROOT, keys, self.now)
        if loan is not None:
            assert num_here == len(keys)
            self.open[loan.token] = (loan.blocks.tolist(), keys, loan.ends_s)

    @rule(data=st.data(), is_right=st.booleans())
    def give_back(self, data: Any, is_right: bool) -> None:
        token = data.draw(st.sampled_from([b"none", *self.open]))
        peers = [b"one", b"two"] if is_right else [b"three"]
        ended = [self.loans.give_back(token, peer) for peer in peers]
        if any(ended):
            assert is_right
            del self.open[token]

    @rule(seconds=st.floats(0, 3))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.tiers.advance(self.now)
        self.loans.take_news()
        self.loans.expire(self.now)
        _, expired = self.loans.take_news()
        assert set(expired) == {t for t, (*_, end) in self.open.items() if end <= self.now}
        for token in expired:
            del self.open[token]

    @rule(prompt=st.integers(0, 9))
    def find_bad(self, prompt: int) -> None:
        self.tiers.host.discard(ROOT, keys_of(prompt)[5])

    @rule()
    def clear(self) -> None:
        self.tiers.host.clear()

    @rule()
    def lose_the_worker(self) -> None:
        self.loans.end_all()
        self.open.clear()

    @invariant()
    def lent_blocks_hold_what_was_lent(self) -> None:
        for blocks, keys, _ in self.open.values():
            assert [self.content[block] for block in blocks] == keys
        assert sum(len(b) for b, *_ in self.open.values()) <= int(LENT_SHARE * 32)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tiers.check()
        self.loans.check()
        assert (self.loans.next_end is None) is not bool(self.open)


TestLoans = LoansMachine.TestCase


def test_a_loan_lasts_longer_at_its_owner_than_at_who_reads() -> None:
    tiers, loans = make()
    store(tiers, keys_of(1))
    loan = loans.lend(b"one", ROOT, keys_of(1)[:4], now=10.0)
    assert loan is not None
    assert loan.ends_s == 10.0 + LOAN_S + GRACE_S
    assert loans.take_news() == ([loan], [])
    loans.expire(10.0 + LOAN_S)
    assert loans.take_news() == ([], [])
    loans.expire(loan.ends_s)
    assert loans.take_news() == ([], [loan.token])
    assert loans.stats().expired == 1


def test_loans_hold_a_share_of_dram_and_what_they_share_counts_once() -> None:
    tiers, loans = make(round(NUM_KEYS / LENT_SHARE))
    store(tiers, keys_of(1))
    store(tiers, keys_of(2))
    whole = loans.lend(b"one", ROOT, keys_of(1), now=0.0)
    assert whole is not None
    assert loans.lend(b"two", ROOT, keys_of(1)[3:7], now=0.0) is not None
    assert loans.stats().blocks == NUM_KEYS
    assert loans.lend(b"two", ROOT, keys_of(2)[-1:], now=0.0) is None, "with all before it"
    assert loans.stats().refused == 1
    assert loans.give_back(whole.token, b"one")
    assert loans.lend(b"two", ROOT, keys_of(2)[4:6], now=0.0) is not None


def test_a_peer_has_a_number_of_loans() -> None:
    tiers, loans = make()
    store(tiers, keys_of(1))
    while loans.lend(b"one", ROOT, keys_of(1)[:1], now=0.0) is not None:
        pass
    assert loans.stats().open == 64
    assert loans.lend(b"two", ROOT, keys_of(1)[:1], now=0.0) is not None


def test_what_was_lent_is_not_used_again_before_the_end_of_the_loan_if_all_is_forgotten() -> None:
    world = World(peers=True, cpu=12)
    world.put("abc")
    world.finish_all()
    assert world.lend("abc", 0, 3)
    [(_, _, blocks)] = world.lent.values()
    world.engine.forget(None)
    world.tick()
    assert not world.lent, "its worker sends no more of it"
    is_free = world.cache.tiers.host.pool.is_free
    assert not any(map(is_free, blocks))
    world.check()
    world.engine.forget(None)  # and once more
    assert not any(map(is_free, blocks))
    world.tick(LOAN_S + GRACE_S)
    assert all(map(world.cache.tiers.host.pool.is_free, blocks))
    world.check_nothing_is_held()


def test_without_a_peer_that_answers_the_tier_takes_no_part() -> None:
    world = World(peers=True, cpu=12)
    tier = world.cache.tiers.peer
    assert tier is not None
    world.stored_by_another("abc", "A")
    lookup = world.look_up("abc")
    assert lookup is not None
    world.answer(lookup)
    assert world.cached(TierName.PEER, "abc") == 3
    tier.can_be_asked = False
    world.tick()
    assert TierName.PEER in world.cache.tiers.unavailable
    assert world.look_up("abcd") is None
    tier.can_be_asked = True
    world.tick()
    assert TierName.PEER not in world.cache.tiers.unavailable


def test_a_load_without_a_question_reads_only_what_was_said_lately() -> None:
    world = World(peers=True, cpu=12)
    world.stored_by_another("abc", "A")
    lookup = world.look_up("abc")
    assert lookup is not None
    world.answer(lookup)
    world.tick(KNOWN_S + 0.1)
    assert world.match(TaskKind.GET, "abc") is not None
    assert not world.ops(OpKind.PEER2H)
    [info] = world.tasks.values()
    assert info.plan.num_blocks == 0


@pytest.mark.parametrize("keys", [
    [keys_of(1)[2], keys_of(1)[4]],  # not consecutive
    [keys_of(2)[7], keys_of(1)[8]],  # of two prompts
    [BlockKey(b"x" * 16), keys_of(1)[0]],  # before the start
    [],
])  # fmt: skip
def test_only_what_a_peer_means_by_its_keys_is_lent(keys: list[BlockKey]) -> None:
    tiers, loans = make()
    store(tiers, keys_of(1))
    store(tiers, keys_of(2))
    assert loans.lend(b"one", ROOT, keys, now=0.0) is None


def test_after_a_clear_nothing_is_shared_under_the_former_names() -> None:
    tiers, loans = make()
    store(tiers, keys_of(1))
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(NUM_KEYS)
    tiers.clear(None)
    store(tiers, keys_of(1))  # of weights that have another name nowhere else
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere()
    assert loans.lend(b"one", ROOT, keys_of(1), now=0.0) is None
    assert tiers.peer is not None
    tiers.peer.keep_plain(ROOT)  # these were named
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(NUM_KEYS)


def test_what_is_on_its_way_is_told() -> None:
    tiers, loans = make()
    store(tiers, keys_of(1)[:3])
    lease = tiers.host.reserve(named(keys_of(1)), 3, 10)
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(3, num_coming=7)
    assert loans.find(ROOT, packed(keys_of(1)[5:])) == FoundHere(num_coming=5)
    tiers.host.publish(lease, 7)
    tiers.host.release(lease)
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(10)


# -- what is on SSD alone ------------------------------------------------------------------------


def awaits_load(world: World, text: str) -> bool:
    prompt = Prompt(TaskKind.GET, world.placed(text), 0, len(text), 16 * len(text))
    return world.engine.awaits_load(world.ids.session, prompt, world.now)


def asked(world: World, text: str) -> None:
    """Ask peers about a prompt, and take their answer."""
    lookup = world.look_up(text)
    assert lookup is not None
    world.answer(lookup)


def on_ssd(text: str, cpu: int = 32) -> World:
    """A cache that has a prompt on SSD alone."""
    world = World(peers=True, cpu=cpu, ssd=40)
    world.put(text)
    world.finish_all()
    world.clear(TierName.CPU)
    return world


def test_what_is_on_ssd_alone_is_told_apart() -> None:
    tiers = Tiers([Tier(TierName.CPU, 32), Tier(TierName.SSD, 32), PeerTier(64)])
    loans = PeerLoans(tiers)
    store(tiers, keys_of(1)[:3])
    ssd = tiers.by_name[TierName.SSD]
    lease = ssd.reserve(named(keys_of(1)), 0, 9)
    ssd.publish(lease, 9)
    ssd.release(lease)
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(3, num_on_ssd=6)
    assert loans.find(ROOT, packed(keys_of(1)[4:])) == FoundHere(num_on_ssd=5)
    coming = tiers.host.reserve(named(keys_of(1)), 3, 5)
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(3, num_coming=2, num_on_ssd=4)
    tiers.unavailable.add(TierName.SSD)
    assert loans.find(ROOT, packed(keys_of(1))) == FoundHere(3, num_coming=2)
    tiers.host.release(coming)


def test_a_share_of_dram_is_staged_for_peers_and_goes_first() -> None:
    world = on_ssd("abcdef", cpu=32)
    share = int(STAGED_SHARE * 32)
    world.stage("abcdef")
    assert world.cache.tiers.host.num_leased == share
    world.stage("abcdef")
    assert world.cache.tiers.host.num_leased == share, "no more at once"
    world.finish_all()
    assert world.cached(TierName.CPU, "abcdef") == share
    world.put("uvwxyzUVWXYZ0123456789")  # 22
    world.put("klmnop")
    world.put("KLMNOP")
    world.finish_all()
    assert world.cached(TierName.CPU, "abcdef") == share, "it waits for the peer"
    world.tick(STAGED_S)
    world.put("q")
    world.put("r")
    world.finish_all()
    assert world.cached(TierName.CPU, "abcdef") < share
    assert world.cached(TierName.CPU, "klmnop") == 6
    assert world.cache.early.counters.wasted == 0
    world.check_nothing_is_held()


def test_what_a_peer_has_on_ssd_is_waited_for_and_read() -> None:
    world = World(peers=True, cpu=32)
    world.stored_by_another("abcd", "A", on_ssd=True)
    asked(world, "abcd")
    [wanted] = world.asked_to_stage
    assert (wanted.peer, wanted.key) == ("A", b"abcd")
    assert awaits_load(world, "abcd")
    world.stage_at_peer()
    world.tick(0.02)
    asked(world, "abcd")
    assert not awaits_load(world, "abcd")
    task = world.get("abcd")
    world.finish_all()
    assert world.final(task).num_ok == 4


def test_a_peer_without_room_is_not_waited_for() -> None:
    world = World(peers=True, cpu=32)
    world.stored_by_another("abcd", "A", on_ssd=True)
    asked(world, "abcd")
    assert awaits_load(world, "abcd")
    world.tick(0.02)
    asked(world, "abcd")  # it does not say that they are coming
    assert not awaits_load(world, "abcd")
    assert len(world.asked_to_stage) == 1, "not asked again at once"
    world.tick(STAGE_AGAIN_S)
    asked(world, "abcd")
    assert len(world.asked_to_stage) == 2


def test_one_peer_stages_and_what_is_in_dram_counts_more() -> None:
    world = World(peers=True, cpu=32)
    world.stored_by_another("abcdef", "A", on_ssd=True)
    world.stored_by_another("abcd", "B")
    asked(world, "abcdef")
    assert not world.asked_to_stage
    assert world.cached(TierName.PEER, "abcdef") == 4
    other = World(peers=True, cpu=32)
    other.stored_by_another("abcdef", "A", on_ssd=True)
    other.stored_by_another("ab", "B")
    asked(other, "abcdef")
    assert [wanted.peer for wanted in other.asked_to_stage] == ["A"]


def test_what_is_computed_sooner_is_not_staged() -> None:
    world = World(peers=True, cpu=32, skip_slow_loads=True)
    cost = world.cache.loads.cost
    assert cost is not None
    for _ in range(8):
        cost.started(OpKind.PEER2H, world.now, "A")
        world.tick(1.0)
        cost.ended(OpKind.PEER2H, world.now, 1, 1.0, "A")
    world.stored_by_another("abcd", "A", on_ssd=True)
    world.engine.report_prefill(world.ids.session, 10.0)
    keys = world.placed("abcd")
    prompt = Prompt(TaskKind.GET, keys, 0, 4, 64)
    [lookup] = world.engine.look_up(prompt, world.now, world.ids.session)
    world._carry_out()
    world.answer(lookup)
    assert not world.asked_to_stage
    assert not awaits_load(world, "abcd")


# -- what is known of peers ----------------------------------------------------------------------


def known(tier: PeerTier, keys: list[BlockKey], peer: str) -> None:
    tier.learn(ROOT, None, keys, peer=peer)


def test_what_a_peer_has_is_believed_for_a_second() -> None:
    tier = PeerTier(64)
    keys = named(keys_of(1))
    tier.advance(10.0)
    assert tier.first_unknown(keys, NUM_KEYS, 10.0) == 0
    known(tier, keys_of(1)[:8], "a")
    assert tier.first_unknown(keys, NUM_KEYS, 10.1) == 8
    assert tier.first_unknown(keys, 8, 10.1) is None
    assert tier.first_unknown(keys, NUM_KEYS, 10.0 + KNOWN_S + 0.1) == 0
    tier.forget()
    assert tier.first_unknown(keys, NUM_KEYS, 10.1) == 0


def test_what_a_peer_has_no_more_is_forgotten_and_asked_for_again_soon() -> None:
    tier = PeerTier(64)
    keys = named(keys_of(1))
    tier.advance(10.0)
    known(tier, keys_of(1), "a")
    tier.learn_absent(ROOT, keys_of(1)[5], 10.0, ttl_s=60.0)
    assert tier.index.match(keys).num_blocks == 5
    assert tier.first_unknown(keys, NUM_KEYS, 10.05) is None
    assert tier.first_unknown(keys, NUM_KEYS, 10.2) == 5


def test_what_is_on_its_way_at_a_peer_is_asked_for_at_once_and_believed_for_a_moment() -> None:
    tier = PeerTier(64)
    keys, first = named(keys_of(1)), keys_of(1)[0]
    tier.note_coming(ROOT, first, 10.0, is_coming=True)
    tier.learn_absent(ROOT, first, 10.0)
    assert tier.first_unknown(keys, NUM_KEYS, 10.005) is None
    assert tier.first_unknown(keys, NUM_KEYS, 10.02) == 0
    tier.note_coming(ROOT, first, 10.1, is_coming=True)
    assert tier.coming_since(ROOT, first, 10.2) == 10.0
    assert tier.coming_since(ROOT, first, 10.5) is None, "nothing was heard of it since"
    tier.note_coming(ROOT, first, 10.6, is_coming=False)
    assert tier.coming_since(ROOT, first, 10.6) is None


def test_each_piece_of_a_load_is_of_one_peer() -> None:
    tier = PeerTier(64)
    tier.advance(1.0)
    known(tier, keys_of(1)[:5], "a")
    tier.learn(ROOT, keys_of(1)[4], keys_of(1)[5:], 5, peer="b")
    slots = tier.index.blocks(tier.index.match(named(keys_of(1))))
    pieces = list(tier.pieces(slots[2:], [range(2, 4), range(4, 8), range(8, 12)], 2))
    assert pieces == [range(2, 4), range(4, 5), range(5, 8), range(8, 12)]
    assert [tier.peer_of(slots[piece.start]) for piece in pieces] == ["a", "a", "b", "b"]
    tier.learn(ROOT, None, keys_of(1)[:8], peer="b")  # asked again, it was another that answered
    assert {tier.peer_of(slot) for slot in np.asarray(slots)} == {"b"}
