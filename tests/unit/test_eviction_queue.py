"""The eviction queue against a plain model: tails by kind and time, and a table of worths."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache.eviction_queue import RETIRED, EvictionQueue, Outlook
from flexcache.errors import InternalError

NUM_KINDS = 3
WORTHS = [[5, 4, 3, 2, 1, 0], [1, 2, 6, 4, 2, 1], [3, 1, 5, 2, 6, 4]]
"""By kind and age: they rise, if at all, and then fall; or not, as what was learned may do."""


class Scripted:
    """Ranks by the table, or by age alone."""

    num_kinds = NUM_KINDS

    def __init__(self) -> None:
        self.is_lru = False
        self.version = 0

    def worth(self, kind: int, age: float) -> float:
        return WORTHS[kind][min(int(age), 5)]

    def bar(self, outlook: Outlook) -> float:
        return math.inf


def ends_of(tails: dict[int, tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the oldest and the youngest tail of each kind."""
    of_kind = [[tail for tail in tails.values() if tail[1] == kind] for kind in range(NUM_KINDS)]
    return [end for queue in of_kind if queue for end in (min(queue), max(queue))]


class EvictionQueueMachine(RuleBasedStateMachine):
    """What is popped is worth least of all ends, and nothing is lost or invented."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = Scripted()
        self.tails: dict[int, tuple[float, int]] = {}
        self.queue = EvictionQueue(self.ranking, self.is_queued)
        self.next_number = 0
        self.now = 0

    def is_queued(self, number: int, time: float, kind: int) -> bool:
        return self.tails.get(number) == (time, kind)

    @rule(kind=st.integers(0, NUM_KINDS - 1), retain=st.sampled_from([0, 0, 0, 4, -2]))
    def add(self, kind: int, retain: int) -> None:
        self.change(self.next_number, kind, retain)
        self.next_number += 1

    @precondition(lambda self: self.tails)
    @rule(which=st.integers(0, 99), kind=st.integers(0, NUM_KINDS - 1))
    def use(self, which: int, kind: int) -> None:
        self.change(self.some(which), kind, 0)

    @precondition(lambda self: self.tails)
    @rule(which=st.integers(0, 99))
    def retire(self, which: int) -> None:
        number = self.some(which)
        self.tails[number] = (RETIRED, 0)
        self.queue.add(number, *self.tails[number])

    @precondition(lambda self: self.tails)
    @rule(which=st.integers(0, 99))
    def hold(self, which: int) -> None:
        del self.tails[self.some(which)]

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.queue.now = self.now

    @rule()
    def change_order(self) -> None:
        self.ranking.is_lru = not self.ranking.is_lru
        self.ranking.version += 1

    @rule(below=st.sampled_from([math.inf, math.inf, 3.0]))
    def pop(self, below: float) -> None:
        self.wait(1)
        worth = min(map(self.worth, ends_of(self.tails)), default=math.inf)
        popped = self.queue.pop(below)
        while popped is not None and not self.is_queued(*popped):
            popped = self.queue.pop(below)
        if popped is None:
            assert worth >= below
        else:
            number, time, kind = popped
            assert self.worth((time, kind)) == worth < below
            del self.tails[number]

    def change(self, number: int, kind: int, retain: int) -> None:
        self.tails[number] = (self.now + retain, kind)
        self.queue.add(number, *self.tails[number])

    def some(self, which: int) -> int:
        return sorted(self.tails)[which % len(self.tails)]

    def worth(self, tail: tuple[float, int]) -> float:
        time, kind = tail
        if self.ranking.is_lru or time == RETIRED:
            return time
        return 1e12 + time if time > self.now else self.ranking.worth(kind, self.now - time)

    @invariant()
    def has_all(self) -> None:
        self.queue.check(self.tails)

    def teardown(self) -> None:
        while self.tails:
            before = len(self.tails)
            self.pop(math.inf)
            assert len(self.tails) == before - 1


TestEvictionQueueMachine = EvictionQueueMachine.TestCase
TestEvictionQueueMachine.settings = settings(stateful_step_count=60)


def test_compared_worths_are_at_most_a_second_old() -> None:
    random = Random(5)
    ranking, tails = Scripted(), dict[int, tuple[float, int]]()
    queue = EvictionQueue(ranking, lambda number, time, kind: tails.get(number) == (time, kind))
    now, num_popped = 0.0, 0

    def worths(time: float, kind: int) -> list[float]:
        return [ranking.worth(kind, max(0.0, at - time)) for at in (now, now - 1.0)]

    for number in range(3_000):
        now += random.choice([0.0, 0.01, 0.03, 0.5, 2.0])
        queue.now = now
        tails[number] = (now, random.randrange(NUM_KINDS))
        queue.add(number, *tails[number])
        if random.random() < 0.9:
            popped = queue.pop()
            while popped is not None and tails.get(popped[0]) != popped[1:]:
                popped = queue.pop()
            assert popped is not None
            worth = min(worths(*tails.pop(popped[0])))
            assert all(worth <= max(worths(*tail)) for tail in ends_of(tails))
            num_popped += 1
    assert num_popped > 2_000


def test_stale_entries_do_not_pile_up() -> None:
    tails = dict.fromkeys(range(10), (0.0, 0))
    queue = EvictionQueue(Scripted(), lambda number, time, kind: tails[number] == (time, kind))
    for now in range(10_000):
        tails[now % 10] = (now, now % NUM_KINDS)
        queue.now = now
        queue.add(now % 10, *tails[now % 10])
    assert max(map(len, [*queue._heaps, queue._order])) < 200


def test_a_missing_tail_is_noticed() -> None:
    queue = EvictionQueue(Scripted(), lambda *_: True)
    queue.add(1, 0.0, 0)
    with pytest.raises(InternalError, match="run 2"):
        queue.check({1: (0.0, 0), 2: (0.0, 0)})


def test_an_end_that_would_not_be_found_is_noticed() -> None:
    queue = EvictionQueue(Scripted(), lambda *_: True)
    queue.add(1, 0.0, 0)
    queue.check({1: (0.0, 0)})
    queue._order.clear()
    with pytest.raises(InternalError, match="end 0"):
        queue.check({1: (0.0, 0)})
