"""Sorted tails against a sorted list, with lists so short that they are split and emptied."""

from __future__ import annotations

from bisect import insort

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache import eviction_policy as sorted_tails
from flexcache.cache.eviction_policy import Entry, SortedTails
from flexcache.errors import InternalError


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_tails, "MAX_LENGTH", 4)


class SortedTailsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tails = SortedTails()
        self.model: list[Entry] = []
        self.number = 0

    @rule(time=st.integers(0, 9))
    def add(self, time: int) -> None:
        self.number += 1
        self.tails.add((time, self.number, 0))
        insort(self.model, (time, self.number, 0))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        self.tails.remove(self.model.pop(which % len(self.model)))

    @precondition(lambda self: self.model)
    @rule()
    def pop_oldest(self) -> None:
        assert self.tails.oldest == self.model[0]
        assert self.tails.pop_oldest() == self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule()
    def pop_youngest(self) -> None:
        assert self.tails.youngest == self.model[-1]
        assert self.tails.pop_youngest() == self.model.pop()

    @invariant()
    def has_all_in_order(self) -> None:
        self.tails.check()
        assert list(self.tails) == self.model
        assert bool(self.tails) == bool(self.model)


TestSortedTailsMachine = SortedTailsMachine.TestCase


def test_what_is_not_there_is_not_taken_out() -> None:
    tails = SortedTails()
    for time in range(10):
        tails.add((float(time), time, 0))
        with pytest.raises(InternalError):
            tails.remove((time + 0.5, time, 0))
    assert len(list(tails)) == 10


def test_disorder_is_noticed() -> None:
    damaged: list[list[list[Entry]]] = [
        [[(2.0, 2, 0)], [(1.0, 1, 0)]],
        [[(1.0, 1, 0), (1.0, 1, 0)]],
        [[]],
    ]
    for wrong in damaged:
        tails = SortedTails()
        tails._lists = wrong
        tails.oldest = next(iter(tails), None)
        with pytest.raises(InternalError):
            tails.check()
