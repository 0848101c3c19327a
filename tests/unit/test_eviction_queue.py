"""The eviction queue against a plain model: tails by kind and time, and a table of worths."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache.density import DensityQueue, DensityRanking
from flexcache.cache.eviction_policy import Entry
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

NUM_KINDS = 3
WORTHS = [[5, 4, 3, 2, 1, 0], [1, 2, 6, 4, 2, 1], [3, 1, 5, 2, 6, 4]]
"""By kind and age: they rise, if at all, and then fall; or not, as what was learned may do."""


class Scripted(DensityRanking):
    """Ranks by the table, or by age alone."""

    num_kinds = NUM_KINDS
    edges = (1, 2, 3, 4, 5)

    def __init__(self) -> None:
        super().__init__(is_lru=False)
        self.worths = WORTHS

    def worth(self, kind: int, age: float) -> float:
        return WORTHS[kind][min(int(age), 5)]


class Going:
    """An index of which all tails may go."""

    def is_evictable(self, number: int) -> bool:
        return True

    def last_key(self, number: int) -> tuple[RootId, BlockKey]:
        raise NotImplementedError


def ends_of(tails: dict[int, Entry]) -> list[Entry]:
    """Return the oldest and the youngest tail of each kind."""
    of_kind = [[tail for tail in tails.values() if tail[2] == kind] for kind in range(NUM_KINDS)]
    return [end for queue in of_kind if queue for end in (min(queue), max(queue))]


class EvictionQueueMachine(Going, RuleBasedStateMachine):
    """What is popped is worth least of all ends, and nothing is lost or invented."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = Scripted()
        self.tails: dict[int, Entry] = {}
        self.held: set[int] = set()
        self.queue = DensityQueue(self.ranking, self)
        self.next_number = 0
        self.now = 0

    def is_evictable(self, number: int) -> bool:
        if number in self.held:
            del self.tails[number]  # it leaves the queue with this
        return number not in self.held

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
    def remove(self, which: int) -> None:
        self.queue.remove(self.tails.pop(self.some(which)))

    @precondition(lambda self: self.tails)
    @rule(which=st.integers(0, 99))
    def hold(self, which: int) -> None:
        self.held.add(self.some(which))

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
        popped = self.queue.pop(below)
        while popped is not None and popped[1] in self.held:
            assert self.tails.pop(popped[1]) == popped
            popped = self.queue.pop(below)
        worth = min(map(self.worth, ends_of(self.tails)), default=math.inf)
        if popped is None:
            assert worth >= below
        else:
            assert self.worth(popped) == worth < below
            assert self.tails.pop(popped[1]) == popped

    def change(self, number: int, kind: int, retain: int) -> None:
        if number in self.tails:
            self.queue.remove(self.tails[number])
        self.held.discard(number)
        self.tails[number] = (self.now + retain, number, kind)
        self.queue.add(self.tails[number])

    def some(self, which: int) -> int:
        return sorted(self.tails)[which % len(self.tails)]

    def worth(self, tail: Entry) -> float:
        time, _, kind = tail
        if self.ranking.is_lru:
            return time
        return 1e12 + time if time > self.now else self.ranking.worth(kind, self.now - time)

    @invariant()
    def has_all(self) -> None:
        self.queue.check(set(self.tails.values()))

    def teardown(self) -> None:
        self.held.clear()
        while self.tails:
            before = len(self.tails)
            self.pop(math.inf)
            assert len(self.tails) == before - 1


TestEvictionQueueMachine = EvictionQueueMachine.TestCase
TestEvictionQueueMachine.settings = settings(stateful_step_count=60)


def test_compared_worths_are_at_most_a_second_old() -> None:
    random = Random(5)
    ranking, tails = Scripted(), dict[int, Entry]()
    queue = DensityQueue(ranking, Going())
    now, num_popped = 0.0, 0

    def worths(time: float, number: int, kind: int) -> list[float]:
        return [ranking.worth(kind, max(0.0, at - time)) for at in (now, now - 1.0)]

    for number in range(3_000):
        now += random.choice([0.0, 0.01, 0.03, 0.5, 2.0])
        queue.now = now
        tails[number] = (now, number, random.randrange(NUM_KINDS))
        queue.add(tails[number])
        if random.random() < 0.9:
            popped = queue.pop()
            assert popped is not None
            worth = min(worths(*tails.pop(popped[1])))
            assert all(worth <= max(worths(*tail)) for tail in ends_of(tails))
            num_popped += 1
    assert num_popped > 2_000


class Counted(float):
    """A time that counts how often one was compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.num_compared += 1
        return float(self) < other

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return float(self) == other

    __hash__ = float.__hash__


class Looked(Going):
    """Counts how often it was asked."""

    num_looks = 0

    def is_evictable(self, number: int) -> bool:
        self.num_looks += 1
        return True


class Held(Going):
    """Some tails, given by number, may not go; all of them without any."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def is_evictable(self, number: int) -> bool:
        return bool(self._numbers) and number not in self._numbers


def test_no_call_does_much_work_however_many_tails_come_and_go() -> None:
    random, num_tails = Random(3), 5_000
    ranking, tails = Scripted(), dict[int, Entry]()
    index = Looked()
    queue = DensityQueue(ranking, index)
    for number in range(4 * num_tails):
        now = Counted(number / 100)
        queue.now = now
        Counted.num_compared = index.num_looks = 0
        time, kind = Counted(now - random.choice([0, 10])), random.randrange(NUM_KINDS)
        tails[number] = (time, number, kind)
        queue.add(tails[number])
        if len(tails) > num_tails:
            popped = queue.pop()
            assert popped is not None
            del tails[popped[1]]
            used = random.choice(list(tails)[:100])
            queue.remove(tails.pop(used))
        assert Counted.num_compared < 400
        assert index.num_looks <= 2 * NUM_KINDS
        if number % num_tails == 0:
            queue.check(set(tails.values()))


def test_a_held_tail_hides_nothing() -> None:
    queue = DensityQueue(Scripted(), Held(0))
    for age in (4, 3, 2):  # of kind 2 they are worth 6, 2 and 5
        queue.add((float(4 - age), 4 - age, 2))
    queue.now = 4.0
    assert queue.pop() == (1.0, 1, 2)


def test_a_kind_whose_tails_are_all_held_has_no_end_left() -> None:
    queue = DensityQueue(Scripted(), Held())
    assert queue.pop() is None
    for time, number in [(0.1, 1), (2.0, 2)]:  # their kind's worth rises: both ends count
        queue.now = time
        queue.add((time, number, 1))
    queue.now = 2.5  # only the older one's worth has changed
    assert queue.pop() is None
    queue.check(set())


def test_the_order_of_ends_does_not_grow() -> None:
    queue = DensityQueue(Scripted(), Going())
    for now in range(10_000):
        queue.now = now
        queue.add((now, now, now % NUM_KINDS))
        if now >= 10:
            queue.remove((now - 10, now - 10, (now - 10) % NUM_KINDS))
    assert len(queue._order) < 200


def test_a_missing_tail_is_noticed() -> None:
    queue = DensityQueue(Scripted(), Going())
    queue.add((0.0, 1, 0))
    with pytest.raises(InternalError, match=r"runs \[2\]"):
        queue.check({(0.0, 1, 0), (0.0, 2, 0)})


def test_a_tail_that_is_not_in_the_queue_is_not_taken_out_of_it() -> None:
    queue = DensityQueue(Scripted(), Going())
    queue.add((0.0, 1, 0))
    for wrong in [(0.0, 2, 0), (1.0, 1, 0), (0.0, 1, 1)]:
        with pytest.raises(InternalError, match="not in the eviction queue"):
            queue.remove(wrong)


def test_an_end_that_would_not_be_found_is_noticed() -> None:
    queue = DensityQueue(Scripted(), Going())
    queue.add((0.0, 1, 0))
    queue.check({(0.0, 1, 0)})
    queue._order.clear()
    with pytest.raises(InternalError, match="end 0"):
        queue.check({(0.0, 1, 0)})
