"""`TailIndex` against a plain list of tails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from builders import ROOTS, ids, key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache.eviction_policy import RETIRED
from flexcache.cache.tail_index import Tail, TailIndex, tail_keys
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

some_root = st.sampled_from(ROOTS)
some_word = st.text("ab", min_size=1, max_size=2)
some_due = st.integers(0, 20).map(float)
some_number = st.integers(0, 99)


@dataclass(eq=False)
class Known:
    """What the model knows about a tail that was inserted."""

    tail: Tail
    due: float
    order: int
    num_pins: int = 0
    is_found: bool = True


class TailMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = TailIndex()
        self.known: list[Known] = []
        self.next_unit = 0

    def _at(self, root: RootId, word: str) -> Known | None:
        key = key_of(word)
        return next(
            (k for k in self.known if k.is_found and (k.tail.root, k.tail.key) == (root, key)),
            None,
        )

    @property
    def evictable(self) -> list[Known]:
        return [k for k in self.known if k.is_found and not k.num_pins]

    @rule(root=some_root, word=some_word, num_units=st.integers(1, 3), due=some_due)
    def insert(self, root: RootId, word: str, num_units: int, due: float) -> None:
        units = ids(*range(self.next_unit, self.next_unit + num_units))
        self.next_unit += num_units
        tail = Tail(root, key_of(word), units)
        if self._at(root, word) is not None:
            with pytest.raises(InternalError, match="twice"):
                self.index.insert(tail, due)
            return
        self.index.insert(tail, due)
        self.known.append(Known(tail, due, len(self.known)))

    @precondition(lambda self: self.known)
    @rule(number=some_number, due=some_due)
    def touch(self, number: int, due: float) -> None:
        known = self.known[number % len(self.known)]
        self.index.touch(known.tail, due)
        known.due = max(known.due, due)

    @rule(root=some_root, words=st.lists(some_word, max_size=3))
    def retire(self, root: RootId, words: list[str]) -> None:
        self.index.retire(root, [key_of(word) for word in words], RETIRED)
        for word in words:
            if (known := self._at(root, word)) is not None:
                known.due = RETIRED

    @precondition(lambda self: any(k.is_found for k in self.known))
    @rule(number=some_number)
    def pin(self, number: int) -> None:
        found = [k for k in self.known if k.is_found]
        known = found[number % len(found)]
        self.index.pin(known.tail)
        known.num_pins += 1

    @precondition(lambda self: any(k.num_pins for k in self.known))
    @rule(number=some_number)
    def unpin(self, number: int) -> None:
        pinned = [k for k in self.known if k.num_pins]
        known = pinned[number % len(pinned)]
        freed = self.index.unpin(known.tail).tolist()
        known.num_pins -= 1
        is_gone = not known.is_found and not known.num_pins
        assert freed == (known.tail.units.tolist() if is_gone else [])

    @rule(root=some_root, word=some_word)
    def discard(self, root: RootId, word: str) -> None:
        known = self._at(root, word)
        freed = self.index.discard(root, key_of(word)).tolist()
        if known is None or known.num_pins:
            assert freed == []
        else:
            assert freed == known.tail.units.tolist()
        if known is not None:
            known.is_found = False

    @rule()
    def evict(self) -> None:
        due = min((k.due for k in self.evictable), default=math.inf)
        assert self.index.next_due() == due
        freed = self.index.evict().tolist()
        if due == math.inf:
            assert freed == []
            return
        evicted = next(k for k in self.evictable if k.tail.units.tolist() == freed)
        assert evicted.due == due
        evicted.is_found = False

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        found = [k for k in self.known if k.is_found]
        held = [k for k in self.known if k.is_found or k.num_pins]
        assert self.index.num_tails == len(found)
        assert self.index.num_units == sum(len(k.tail.units) for k in held)
        for root in ROOTS:
            assert self.index.has_any(root) == any(k.tail.root == root for k in found)
            for word in ("a", "b", "aa", "ab", "ba", "bb"):
                known = self._at(root, word)
                assert self.index.find(root, key_of(word)) is (known.tail if known else None)


TailMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTailIndex = TailMachine.TestCase


def test_the_names_of_a_tails_units_tell_how_many_there_are() -> None:
    names = [name for count in range(1, 5) for name in tail_keys(key_of("ab"), count)]
    names += tail_keys(key_of("a"), 3)
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}
    assert tail_keys(BlockKey(b"x" * 40), 2) == tail_keys(BlockKey(b"x" * 40), 2)


def test_discarded_tails_leave_nothing_behind_though_none_is_evicted() -> None:
    index, kept = TailIndex(), 3
    for number in range(500):
        key = BlockKey(number.to_bytes(16, "little"))
        index.insert(Tail(ROOTS[0], key, ids(number)), float(number))
        if number >= kept:
            oldest = BlockKey((number - kept).to_bytes(16, "little"))
            assert index.discard(ROOTS[0], oldest).tolist() == [number - kept]
        index.check()
        assert sum(map(len, index._queues)) <= 100
    assert [index.evict().tolist() for _ in range(kept + 1)] == [[497], [498], [499], []]


def test_the_check_notices_lost_units_and_lost_queue_entries() -> None:
    index = TailIndex()
    index.insert(Tail(ROOTS[0], key_of("a"), ids(1, 2)), 1.0)
    index.check()
    index.num_units -= 1
    with pytest.raises(InternalError, match="miscounted"):
        index.check()
    index.num_units += 1
    index._queues[0].clear()
    with pytest.raises(InternalError, match="queue"):
        index.check()
