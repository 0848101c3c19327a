"""What a host hands over before it goes comes hottest first, and pushes out nothing hotter."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from builders import ROOT, keys_of, make_cache, prefixes, prompt, put_of
from hypothesis import given
from hypothesis import strategies as st
from task_builders import World

from flexcache.cache.drain import LONGEST_AGE_S, HotBlocks, Portion
from flexcache.cache.tiered_cache import TieredCache
from flexcache.ids import KVStatus, TierName
from flexcache.protocol.messages import FindBlocks, FoundBlocks, TakeBlocks, TookBlocks
from flexcache.server.drain import Drain, Takeovers
from flexcache.stats import LoanStats

WORDS = st.text("ab", min_size=1, max_size=8)


def store(cache: TieredCache, word: str, now: float) -> None:
    """Put a word into DRAM, or use it there."""
    cache.tiers.advance(now)
    plan = cache.stores.plan_put(put_of(prompt(word)), 1000)
    cache.publish_staging(plan, plan.num_blocks)
    cache.finish(plan)


def hot_blocks(cache: TieredCache, is_shared: bool = True) -> HotBlocks:
    blocks = HotBlocks(cache, lambda root: is_shared)
    while blocks.gather(2):
        pass
    blocks.sort()
    return blocks


@given(words=st.lists(WORDS, max_size=12), capacity=st.integers(4, 40), most=st.integers(1, 9))
def test_all_blocks_are_handed_over_once_hottest_first(
    words: list[str], capacity: int, most: int
) -> None:
    cache = make_cache(capacity)
    used: dict[str, float] = {}
    for number, word in enumerate(words):
        store(cache, word, 10.0 + number)
        used |= dict.fromkeys(prefixes(word), 10.0 + number)
    blocks, now = hot_blocks(cache), 10.0 + len(words)
    found: list[tuple[str, float]] = []
    while (portion := blocks.take(most, now)) is not None:
        assert 0 < portion.num_own <= most
        word = portion.keys[-1].decode()
        assert list(portion.keys) == keys_of(word), "with all before them"
        had = {name for name, _ in found}
        assert {*prefixes(word)[: portion.num_before]} <= had
        own = prefixes(word)[portion.num_before :]
        assert not had & {*own}
        found += [(name, portion.age_s) for name in own]
    in_dram = {w for w in used if cache.tiers.host.index.contains(ROOT, w.encode())}  # type: ignore[arg-type]
    assert {name for name, _ in found} == in_dram
    assert blocks.total == len(in_dram)
    for name, age_s in found:
        assert age_s == pytest.approx(now - used[name], abs=0.01)
    assert all(one <= other + 0.01 for (_, one), (_, other) in pairwise(found))


def test_what_has_another_name_elsewhere_is_not_handed_over() -> None:
    cache = make_cache(10)
    store(cache, "abc", 10.0)
    assert hot_blocks(cache, is_shared=False).take(9, 11.0) is None


def test_what_is_gone_meanwhile_is_not_handed_over() -> None:
    cache = make_cache(8)
    store(cache, "abc", 10.0)
    store(cache, "xyz", 11.0)
    blocks = hot_blocks(cache)
    cache.tiers.host.discard(ROOT, keys_of("xyz")[1])
    portions = [blocks.take(9, 12.0) for _ in range(3)]
    assert [p and list(p.keys) for p in portions] == [keys_of("x"), keys_of("abc"), None]


def last_of(keys: bytes) -> str:
    """Return the last one of joined keys, which have 1, 2, 3, ... bytes."""
    length = (math.isqrt(8 * len(keys) + 1) - 1) // 2
    return keys[-length:].decode()


class Peer:
    """Stands for the line to a peer; answers as a test says.

    Attributes:
        asked: What it was asked to take and has not answered, by the number of the request.
    """

    def __init__(self) -> None:
        self.asked: dict[int, TakeBlocks] = {}
        self._answers: list[bytes] = []

    def getsockopt(self, _: int) -> int:
        return int(zmq.POLLIN) if self._answers else 0

    def recv_multipart(self, _: int) -> list[bytes]:
        return [self._answers.pop(0)]

    def send(self, message: bytes, _: int) -> None:
        asked = msgspec.msgpack.decode(message, type=FindBlocks | TakeBlocks)
        if isinstance(asked, TakeBlocks):
            self.asked[asked.request_id] = asked
        else:
            self.say(FoundBlocks(0, b"peer"))

    def say(self, answer: FoundBlocks | TookBlocks) -> None:
        self._answers.append(msgspec.msgpack.encode(answer))


@given(words=st.lists(WORDS, max_size=9), most=st.integers(1, 5), data=st.data())
def test_each_block_is_counted_once_whatever_the_peer_takes_at_a_time(
    words: list[str], most: int, data: st.DataObject
) -> None:
    cache = make_cache(100)
    for number, word in enumerate(words):
        store(cache, word, 10.0 + number)
    at_peer = {*prefixes(data.draw(st.sampled_from(words)))} if words else set()
    all_names = {name for word in words for name in prefixes(word)}
    num_before, peer = len(at_peer), Peer()
    drain = Drain("a peer", b"one", hot_blocks(cache), 1, 60.0)
    drain._line = peer  # type: ignore[assignment]
    loans = SimpleNamespace(counters=LoanStats())
    workers = SimpleNamespace(is_up=lambda _: True)
    tasks = SimpleNamespace(loans=loans, executors=workers)
    served: Any = SimpleNamespace(kept=b"model", tasks=tasks)
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexcache.server.drain.PORTION_BYTES", float(most))
        while not drain.is_over:
            drain.send_due(now)
            drain.receive(served, now)
            drain.send_due(now)
            if not peer.asked:
                continue
            # It reads a part of what it lacks, of other portions too, and answers in any order.
            number = data.draw(st.sampled_from(sorted(peer.asked)))
            names = prefixes(last_of(peer.asked.pop(number).keys))
            lacks = [name for name in names if name not in at_peer]
            num_read = min(len(lacks), data.draw(st.integers(1, 4)))
            at_peer.update(lacks[:num_read])
            num_there = next((i for i, name in enumerate(names) if name not in at_peer), len(names))
            peer.say(TookBlocks(number, num_there, False, num_read))
    found = drain.progress
    assert at_peer == all_names
    assert (found.state, found.left_blocks) == ("done", 0)
    assert (found.moved_blocks, found.there_blocks) == (len(at_peer) - num_before, num_before)
    assert loans.counters.moved == found.moved_blocks


# -- at the peer -----------------------------------------------------------------------------------


def test_a_peer_makes_room_by_what_was_used_earlier_alone() -> None:
    world = World(peers=True, cpu=8, ssd=0)
    world.put("abcd")
    world.finish_all()
    world.tick(10.0)
    world.put("wx")
    world.finish_all()
    world.stored_by_another("pqrstu", "A")
    world.tick(10.0)
    # Used after "abcd" and before "wx".
    takeover = world.take_over("pqrstu", "A", age_s=15.0)
    world.finish_all()
    assert takeover.is_over(world.engine)
    assert sum(lease.num_published for lease in takeover.leases) == 6
    assert world.cached(TierName.CPU, "pqrstu") == 6
    assert world.cached(TierName.CPU, "wx") == 2
    world.stored_by_another("klm", "A")
    world.take_over("klm", "A", age_s=16.0)
    world.finish_all()
    assert world.cached(TierName.CPU, "klm") == 0, "all that is here was used later"
    world.put("e")  # and what came is no more recent than it was there
    world.finish_all()
    assert world.cached(TierName.CPU, "pqrstu") == 5
    world.check_nothing_is_held()


def test_a_peer_reads_only_what_it_lacks() -> None:
    world = World(peers=True, cpu=12, ssd=0)
    world.put("abc")
    world.finish_all()
    world.stored_by_another("abcdef", "A")
    first = world.take_over("abcdef", "A", age_s=1.0, most=2)
    assert sum(map(len, first.leases)) == 2
    second = world.take_over("abcdef", "A", age_s=1.0)
    assert sum(map(len, second.leases)) == 1
    waiting = world.take_over("abcdef", "A", age_s=1.0)
    assert waiting.task_id is None
    assert not waiting.is_over(world.engine), "whether the others come is not known yet"
    world.finish_all()
    assert waiting.is_over(world.engine)
    assert world.cached(TierName.CPU, "abcdef") == 6
    third = world.take_over("abcdef", "A", age_s=1.0)
    assert third.task_id is None
    assert third.is_over(world.engine)
    task = world.get("abcdef")
    world.finish_all()
    assert world.final(task).status is KVStatus.SUCCESS
    world.check_nothing_is_held()


@pytest.mark.parametrize("change", [
    {"root": b"short"}, {"key_bytes": 0}, {"key_bytes": 300}, {"keys": b""}, {"keys": b"x" * 15},
    {"key_bytes": 1, "keys": bytes(70_000)}, {"age_s": -1.0}, {"age_s": 10 * LONGEST_AGE_S},
    {"age_s": float("nan")}, {"num_units": -1}, {"num_units": 1 << 20},
])  # fmt: skip
def test_what_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    asked = TakeBlocks(1, b"one", b"model", b"r" * 16, b"k" * 32, 16, 1.0)
    changed = {name: getattr(asked, name) for name in asked.__struct_fields__} | change
    with pytest.raises(ValueError, match=r"root|keys|units"):
        Takeovers().ask(b"a peer", TakeBlocks(**changed), None, "tcp://a:1")


def test_without_a_cache_nothing_is_taken() -> None:
    asked = TakeBlocks(1, b"one", b"model", b"r" * 16, b"k" * 32, 16, 1.0)
    refused = Takeovers().ask(b"a peer", asked, None, "tcp://a:1")
    assert refused is not None
    assert refused.refusal


def test_a_portion_counts_what_is_its_own() -> None:
    portion = Portion(ROOT, keys_of("abcdef"), 1.0, num_before=4)
    assert portion.num_own == 2
    assert [portion.num_there(count, False) for count in (0, 4, 5, 6, 9)] == [0, 0, 1, 2, 2]
    tailed = Portion(ROOT, keys_of("abcdef"), 1.0, num_units=3, num_before=4)
    assert (tailed.num_own, tailed.num_there(6, False), tailed.num_there(6, True)) == (5, 0, 5)
