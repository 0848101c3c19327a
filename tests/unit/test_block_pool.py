"""The pool of block ids, against a plain set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders import ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexcache.cache.block_pool import BlockIdPool
from flexcache.errors import InternalError


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 9))
    def make(self, capacity: int) -> None:
        self.pool = BlockIdPool(capacity)
        self.given_out: set[int] = set()

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(InternalError):
                self.pool.take(count)
            return
        taken = self.pool.take(count).tolist()
        assert len(taken) == len(set(taken)) == count
        assert self.given_out.isdisjoint(taken)
        assert all(0 <= block < self.pool.capacity for block in taken)
        self.given_out.update(taken)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        returned: list[int] = []
        if self.given_out:
            blocks = st.sampled_from(sorted(self.given_out))
            returned = data.draw(st.lists(blocks, unique=True))
        self.pool.give_back(ids(*returned))
        self.given_out.difference_update(returned)

    @rule(data=st.data())
    def take_exactly(self, data: st.DataObject) -> None:
        free = sorted(set(range(self.pool.capacity)) - self.given_out)
        wanted = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        self.pool.take_exactly(ids(*wanted))
        self.given_out.update(wanted)

    @rule(block=st.integers(0, 8))
    def give_back_a_free_one(self, block: int) -> None:
        if block < self.pool.capacity and block not in self.given_out:
            with pytest.raises(InternalError):
                self.pool.give_back(ids(block))

    @invariant()
    def agrees_with_the_set(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.pool.capacity - len(self.given_out)
        for block in range(self.pool.capacity):
            assert self.pool.is_free(block) == (block not in self.given_out)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(stateful_step_count=30)


def test_a_fresh_pool_hands_out_neighbours_in_ascending_order() -> None:
    pool = BlockIdPool(5)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.take(2).tolist() == [3, 4]


def test_blocks_given_back_last_are_handed_out_first_and_in_the_same_order() -> None:
    pool = BlockIdPool(6)
    pool.take(6)
    pool.give_back(ids(4, 1))
    pool.give_back(ids(5, 2))
    assert pool.take(4).tolist() == [5, 2, 4, 1]


def test_taken_ids_do_not_change_when_the_pool_does() -> None:
    pool = BlockIdPool(4)
    taken = pool.take(4)
    pool.give_back(ids(3, 2, 1, 0))
    assert taken.tolist() == [0, 1, 2, 3]


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockIdPool(3)
    pool.take(2)
    with pytest.raises(InternalError, match="2 blocks wanted, 1 free"):
        pool.take(2)
    pool.check()
    assert pool.num_free == 1


def test_giving_back_a_free_block_names_it_and_changes_nothing() -> None:
    pool = BlockIdPool(4)
    pool.take(2)
    with pytest.raises(InternalError, match=r"freed twice: \[3\]"):
        pool.give_back(ids(1, 3))
    pool.check()
    assert pool.num_free == 2
    assert not pool.is_free(1)


@pytest.mark.parametrize("wanted", [[0], [2, 3, 3]])
def test_taking_exactly_what_is_not_free_is_refused(wanted: list[int]) -> None:
    pool = BlockIdPool(5)
    pool.take(2)
    with pytest.raises(InternalError, match="not free, or occur twice"):
        pool.take_exactly(ids(*wanted))


def _put_an_id_on_the_stack_twice(pool: BlockIdPool) -> None:
    pool._stack[0] = pool._stack[1]


def _forget_a_flag(pool: BlockIdPool) -> None:
    pool._is_free[int(pool._stack[0])] = False


def _raise_a_flag(pool: BlockIdPool) -> None:
    pool._is_free[0] = True


def _swap_a_flag(pool: BlockIdPool) -> None:
    pool._is_free[int(pool._stack[0])] = False
    pool._is_free[0] = True


def _count_one_less(pool: BlockIdPool) -> None:
    pool.num_free -= 1


@pytest.mark.parametrize(
    "damage",
    [
        _put_an_id_on_the_stack_twice,
        _forget_a_flag,
        _raise_a_flag,
        _swap_a_flag,
        _count_one_less,
    ],
)
def test_check_notices_damage(damage: Callable[[BlockIdPool], None]) -> None:
    pool = BlockIdPool(6)
    pool.take(2)  # ids 0 and 1
    pool.check()
    damage(pool)
    with pytest.raises(InternalError):
        pool.check()
