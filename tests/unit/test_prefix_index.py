"""The prefix index against a plain model: one entry per block, its predecessor, and when it was
last used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from builders import OTHER_ROOT, ROOT, ROOTS, ids, key_of, keys_of, prefixes, prompt, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.eviction_policy import RETIRED
from flexcache.cache.prefix_index import EMPTY_MATCH, PrefixIndex, PrefixMatch, Run
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

NUM_IDS = 12
LONGEST = 6
LONG_WORDS = words("ab", 4)

some_root = st.sampled_from(ROOTS)
some_retention = st.sampled_from([0, 0, 0, 3, 8, -3])
some_word = st.text("ab", min_size=1, max_size=LONGEST)


@dataclass
class Block:
    """A block that occupies an id; ``found_as`` is None once its bytes were reported bad."""

    block_id: int
    parent: Block | None
    found_as: tuple[RootId, str] | None
    last_use: float

    def path(self) -> list[Block]:
        """Return the block and all before it, in order."""
        before = self.parent.path() if self.parent is not None else []
        return [*before, self]


@dataclass
class Model:
    """What the index must do, block by block."""

    allocated: list[Block] = field(default_factory=list)
    found: dict[tuple[RootId, str], Block] = field(default_factory=dict)
    pins: list[tuple[PrefixMatch, list[Block]]] = field(default_factory=list)

    def match(self, root: RootId, word: str) -> list[Block]:
        matched: list[Block] = []
        for prefix in prefixes(word):
            block = self.found.get((root, prefix))
            if block is None:
                break
            matched.append(block)
        return matched

    def insert(self, root: RootId, word: str, block_ids: list[int], now: float) -> None:
        """Complete ``word``, with its last blocks in these ids."""
        path = self.match(root, word)
        for block_id in block_ids:
            parent = path[-1] if path else None
            block = Block(block_id, parent, (root, word[: len(path) + 1]), now)
            self.found[root, word[: len(path) + 1]] = block
            self.allocated.append(block)
            path.append(block)
        for block in path:
            block.last_use = max(block.last_use, now)

    def pinned(self) -> list[Block]:
        return [block for _, path in self.pins for block in path]

    def evictable(self) -> list[Block]:
        """Return what could be evicted one by one, leaves first, if nothing were used meanwhile."""
        pinned = self.pinned()
        return [block for block in self.allocated if block not in pinned]

    def behind(self, first: Block) -> list[Block]:
        """Return the block and all that build on it."""
        return [block for block in self.allocated if first in block.path()]

    def remove(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.allocated.remove(block)
            if block.found_as is not None:
                del self.found[block.found_as]

    def discard(self, root: RootId, word: str) -> list[Block]:
        """Discard blocks; return those free at once. Pinned ones just cannot be found any more,
        and go with a later call once they are unpinned."""
        first = self.found.get((root, word))
        if first is None:
            return []
        for block in self.behind(first):
            if block.found_as is not None:
                del self.found[block.found_as]
                block.found_as = None
            block.last_use = float("-inf")
        freed = self.waiting()
        self.remove(freed)
        return freed

    def waiting(self) -> list[Block]:
        """Return the discarded blocks that nothing holds any more."""
        return [block for block in self.evictable() if block.found_as is None]


def ids_of(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model = Model()
        self.free = list(range(NUM_IDS))
        self.now = 0

    def tick(self, later: bool) -> int:
        """Time need not advance between two calls."""
        self.now += later
        return self.now

    @rule(root=some_root, word=some_word, later=st.booleans(), retain=some_retention)
    def insert(self, root: RootId, word: str, later: bool, retain: int) -> None:
        parent = self.index.match(prompt(word, root))
        word = word[: parent.num_blocks + len(self.free)]
        keys = keys_of(word, parent.num_blocks)
        if not keys:
            return
        block_ids, self.free = self.free[: len(keys)], self.free[len(keys) :]
        now = self.tick(later)
        inserted = self.index.insert(parent, root, keys, ids(*block_ids), now, retain)
        self.model.insert(root, word, block_ids, now + retain)
        assert inserted.num_blocks == len(word)
        assert self.index.blocks(inserted).tolist() == ids_of(self.model.match(root, word))
        extends = parent.run is not None and inserted.run is parent.run
        assert not extends or parent.length + len(keys) == inserted.length

    @rule(root=some_root, word=some_word, later=st.booleans(), retain=some_retention)
    def touch(self, root: RootId, word: str, later: bool, retain: int) -> None:
        now = self.tick(later)
        self.index.touch(self.index.match(prompt(word, root)), now, retain)
        for block in self.model.match(root, word):
            block.last_use = max(block.last_use, now + retain)

    @rule(root=some_root, word=some_word, offset=st.integers(0, LONGEST))
    def retire(self, root: RootId, word: str, offset: int) -> None:
        run = self.index.match(prompt(word, root)).run
        if run is None or offset >= run.length:
            return
        end = self.index.locate(root, run.keys[-1])
        words = [key.decode() for key in run.keys[offset:]]
        retired = [self.model.found.get((root, word)) for word in words]
        blocks = [block for block in retired if block is not None]
        if end.run is not run or not blocks or len(self.model.behind(blocks[0])) > len(blocks):
            return  # others build on it
        num_ordinary = sum(block.last_use != RETIRED for block in blocks)
        assert self.index.retire(end, run.depth + offset) == num_ordinary
        for block in blocks:
            block.last_use = RETIRED

    @rule(root=some_root, word=some_word)
    def pin(self, root: RootId, word: str) -> None:
        match = self.index.match(prompt(word, root))
        self.index.pin(match)
        self.model.pins.append((match, self.model.match(root, word)))

    @precondition(lambda self: self.model.pins)
    @rule(position=st.integers(0, NUM_IDS))
    def unpin(self, position: int) -> None:
        match, _ = self.model.pins.pop(position % len(self.model.pins))
        self.index.unpin(match)

    @rule(count=st.integers(0, NUM_IDS))
    def evict(self, count: int) -> None:
        evictable = self.model.evictable()
        freed = self.index.evict(count).tolist()
        gone = [block for block in evictable if block.block_id in freed]
        assert sorted(freed) == sorted(ids_of(gone)), "evicted blocks that are held"
        assert len(freed) == min(count, len(evictable))
        self.model.remove(gone)
        for block in self.model.allocated:
            assert block.parent not in gone, "evicted a block that others build on"
        kept = [block for block in evictable if block not in gone]
        if gone and kept:
            latest = max(block.last_use for block in gone)
            assert latest <= min(block.last_use for block in kept), "evicted the more recent"
        self.free += freed

    @rule(root=some_root, word=some_word)
    def discard(self, root: RootId, word: str) -> None:
        freed = self.index.discard(root, key_of(word)).tolist()
        assert sorted(freed) == sorted(ids_of(self.model.discard(root, word)))
        self.free += freed

    @rule()
    def sweep(self) -> None:
        freed = self.index.sweep().tolist()
        swept = self.model.waiting()
        assert sorted(freed) == sorted(ids_of(swept))
        self.model.remove(swept)
        self.free += freed

    @invariant()
    def is_consistent(self) -> None:
        self.index.check()
        assert self.index.num_blocks == len(self.model.allocated)
        assert len(self.free) + self.index.num_blocks == NUM_IDS

    @invariant()
    def finds_what_the_model_finds(self) -> None:
        for root in ROOTS:
            for word in LONG_WORDS:
                expected = self.model.match(root, word)
                match = self.index.match(prompt(word, root))
                assert match.num_blocks == len(expected)
                assert self.index.blocks(match).tolist() == ids_of(expected)
                assert self.index.blocks(match, 2).tolist() == ids_of(expected[2:])

    @invariant()
    def locates_what_the_model_has(self) -> None:
        for (root, word), block in self.model.found.items():
            assert self.index.contains(root, key_of(word))
            found = self.index.locate(root, key_of(word))
            assert found.num_blocks == len(word)
            assert self.index.blocks(found).tolist() == ids_of(block.path())

    @invariant()
    def keeps_pinned_blocks_in_place(self) -> None:
        for match, path in self.model.pins:
            assert self.index.blocks(match).tolist() == ids_of(path)

    def teardown(self) -> None:
        for match, _ in self.model.pins:
            self.index.unpin(match)
        assert len(self.index.evict(NUM_IDS)) == len(self.model.allocated)
        self.index.check()
        assert self.index.num_blocks == 0
        assert not self.index._directories, "namespaces come and go"


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(stateful_step_count=40)


# -- by example -----------------------------------------------------------------------------------


def store(index: PrefixIndex, word: str, first_id: int, now: float = 0) -> PrefixMatch:
    """Insert what is missing of a word, in ids ``first_id, first_id + 1, ...``."""
    parent = index.match(prompt(word))
    keys = keys_of(word, parent.num_blocks)
    return index.insert(parent, ROOT, keys, np.arange(first_id, first_id + len(keys)), now)


def cached(index: PrefixIndex, word: str) -> int:
    return index.match(prompt(word)).num_blocks


def test_an_empty_index_matches_nothing() -> None:
    index = PrefixIndex()
    assert index.match(prompt("abc")) is EMPTY_MATCH
    assert index.locate(ROOT, key_of("a")) is EMPTY_MATCH
    assert index.blocks(EMPTY_MATCH).tolist() == []
    assert index.evict(5).tolist() == []
    assert index.discard(ROOT, key_of("a")).tolist() == []


def test_an_empty_prompt_matches_nothing() -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    assert index.match(prompt("")) is EMPTY_MATCH


@pytest.mark.parametrize("num_cached", range(1, 12))
@pytest.mark.parametrize("num_asked", range(1, 12))
def test_the_longest_cached_prefix_is_found_whatever_its_length(
    num_cached: int, num_asked: int
) -> None:
    index = PrefixIndex()
    store(index, "x" * num_cached, 0)
    match = index.match(prompt("x" * num_asked))
    assert match.num_blocks == min(num_cached, num_asked)
    assert index.blocks(match).tolist() == list(range(match.num_blocks))
    for near in range(13):
        assert index.match(prompt("x" * num_asked), near) == match


class Counted(EngineBlockKeys):
    """Keys that note which of them are asked for."""

    def __init__(self, word: str) -> None:
        super().__init__(ROOT, keys_of(word), len(word))
        self.asked: list[int] = []

    def key(self, index: int) -> BlockKey:
        self.asked.append(index)
        return super().key(index)


@pytest.mark.parametrize(
    ("near", "last_asked"), [(99, 101), (100, 100), (97, 103), (0, 127), (500, 499)]
)
def test_a_prompt_is_not_probed_far_behind_what_is_cached_nor_the_guess(
    near: int, last_asked: int
) -> None:
    index = PrefixIndex()
    store(index, "x" * 100, 0)
    keys = Counted("x" * 1_000)
    assert index.match(keys, near).num_blocks == 100
    assert max(keys.asked) <= last_asked


def test_a_prompt_of_which_nothing_is_cached_is_not_probed_behind_its_first_block() -> None:
    index = PrefixIndex()
    store(index, "y", 0)
    keys = Counted("x" * 1_000)
    assert index.match(keys, near=1).num_blocks == 0
    assert keys.asked == [0]


@pytest.mark.parametrize("near", range(8))
def test_an_empty_prompt_matches_nothing_near_any_guess(near: int) -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    assert index.match(prompt(""), near) is EMPTY_MATCH
    assert index.match(prompt("cba"), near) is EMPTY_MATCH


def test_blocks_behind_the_end_of_a_run_extend_it_in_place() -> None:
    index = PrefixIndex()
    first = store(index, "abc", 0)
    second = store(index, "abcde", 10)
    assert second.run is first.run
    assert index.blocks(second).tolist() == [0, 1, 2, 10, 11]


def test_blocks_behind_the_middle_of_a_run_branch_off() -> None:
    index = PrefixIndex()
    trunk = store(index, "abcd", 0)
    branch = store(index, "abxy", 10)
    assert branch.run is not trunk.run
    assert index.blocks(branch).tolist() == [0, 1, 10, 11]
    assert index.blocks(index.match(prompt("abcd"))).tolist() == [0, 1, 2, 3]
    assert index.blocks(branch, 1).tolist() == [1, 10, 11]
    assert index.blocks(branch, 3).tolist() == [11]
    assert index.blocks(branch, 4).tolist() == []


def test_a_match_that_ends_in_a_branch_knows_its_depth() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0)
    store(index, "abxy", 10)
    store(index, "abxzz", 20)
    assert index.match(prompt("abxzzz")).num_blocks == 5
    assert index.blocks(index.match(prompt("abxzq"))).tolist() == [0, 1, 10, 20]


def test_ids_of_a_match_belong_to_the_caller() -> None:
    index = PrefixIndex()
    match = store(index, "abc", 0)
    index.blocks(match)[:] = 99
    assert index.blocks(match).tolist() == [0, 1, 2]


def test_roots_do_not_see_each_others_blocks() -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    assert index.match(prompt("abc", OTHER_ROOT)) is EMPTY_MATCH
    index.insert(EMPTY_MATCH, OTHER_ROOT, keys_of("ab"), ids(7, 8), 0)
    assert index.blocks(index.match(prompt("abc", OTHER_ROOT))).tolist() == [7, 8]
    assert sorted(index.discard(OTHER_ROOT, key_of("a")).tolist()) == [7, 8]
    assert cached(index, "abc") == 3


def test_the_least_recent_leaf_is_evicted_first() -> None:
    index = PrefixIndex()
    store(index, "a", 0, now=1)
    store(index, "b", 1, now=2)
    store(index, "c", 2, now=3)
    index.touch(index.match(prompt("a")), 4)
    assert [index.evict(1).tolist() for _ in range(4)] == [[1], [2], [0], []]


def test_a_run_is_evicted_from_its_end() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0)
    assert index.evict(1).tolist() == [3]
    assert sorted(index.evict(2).tolist()) == [1, 2]
    assert cached(index, "abcd") == 1


def test_only_the_part_of_a_run_that_was_matched_becomes_recent() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0, now=1)
    store(index, "xy", 10, now=2)
    index.touch(index.match(prompt("ab")), 3)
    assert sorted(index.evict(1).tolist()) == [3]
    assert sorted(index.evict(3).tolist()) == [2, 10, 11]
    assert cached(index, "abcd") == 2


def test_a_block_with_blocks_behind_it_is_not_evicted_before_them() -> None:
    index = PrefixIndex()
    store(index, "ab", 0, now=1)
    store(index, "axyz", 10, now=2)
    assert index.evict(1).tolist() == [1]
    assert index.evict(1).tolist() == [12]
    assert sorted(index.evict(9).tolist()) == [0, 10, 11]


def test_a_pinned_block_is_never_evicted() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0)
    pinned = index.match(prompt("ab"))
    index.pin(pinned)
    assert sorted(index.evict(9).tolist()) == [2, 3]
    assert index.evict(9).tolist() == []
    index.unpin(pinned)
    assert sorted(index.evict(9).tolist()) == [0, 1]


def test_each_pin_needs_an_unpin_of_its_own() -> None:
    index = PrefixIndex()
    match = store(index, "ab", 0)
    index.pin(match)
    index.pin(match)
    index.unpin(match)
    assert index.evict(9).tolist() == []
    index.unpin(match)
    assert len(index.evict(9)) == 2


def test_a_pin_in_a_branch_keeps_what_precedes_it() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0)
    branch = store(index, "abxy", 10)
    index.pin(branch)
    assert sorted(index.evict(9).tolist()) == [2, 3]
    assert index.evict(9).tolist() == []


def test_pinning_an_empty_match_does_nothing() -> None:
    index = PrefixIndex()
    index.pin(EMPTY_MATCH)
    index.unpin(EMPTY_MATCH)
    index.check()


def test_evicting_nothing_is_always_safe() -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    assert index.evict(0).tolist() == []
    assert cached(index, "abc") == 3


def test_discarding_a_block_drops_it_and_all_behind_it() -> None:
    index = PrefixIndex()
    store(index, "abcd", 0)
    store(index, "abxy", 10)
    store(index, "az", 20)
    assert sorted(index.discard(ROOT, key_of("ab")).tolist()) == [1, 2, 3, 10, 11]
    assert cached(index, "abcd") == 1
    assert cached(index, "az") == 2


def test_a_discarded_block_that_is_pinned_stays_allocated_until_it_is_unpinned() -> None:
    index = PrefixIndex()
    match = store(index, "abcd", 0)
    index.pin(match)
    assert index.discard(ROOT, key_of("abc")).tolist() == []
    assert cached(index, "abcd") == 2
    assert index.evict(9).tolist() == []
    assert index.blocks(match).tolist() == [0, 1, 2, 3]
    index.unpin(match)
    assert sorted(index.evict(2).tolist()) == [2, 3]


def test_a_discarded_block_can_be_stored_again_beside_its_pinned_remains() -> None:
    index = PrefixIndex()
    match = store(index, "abcd", 0)
    index.pin(match)
    index.discard(ROOT, key_of("abc"))
    again = store(index, "abcd", 10)
    assert index.blocks(again).tolist() == [0, 1, 10, 11]
    assert index.blocks(match).tolist() == [0, 1, 2, 3]
    index.unpin(match)
    assert sorted(index.evict(2).tolist()) == [2, 3]
    assert index.blocks(index.match(prompt("abcd"))).tolist() == [0, 1, 10, 11]


@pytest.mark.parametrize("num_pinned", [3, 4])
def test_discarded_blocks_are_evicted_before_any_that_can_be_found(num_pinned: int) -> None:
    index = PrefixIndex()
    store(index, "old", 10, now=1)
    store(index, "abcd", 0, now=2)
    pinned = index.match(prompt("abcd"[:num_pinned]))
    index.pin(pinned)  # the run's last block could be evicted before, and is queued as such
    assert index.discard(ROOT, key_of("ab")).tolist() == [0, 1, 2, 3][num_pinned:]
    index.unpin(pinned)
    assert sorted(index.evict(num_pinned - 1).tolist()) == [0, 1, 2, 3][1:num_pinned]
    assert cached(index, "old") == 3


def test_blocks_due_before_those_they_follow_are_found_in_time() -> None:
    index = PrefixIndex()
    store(index, "x", 9, now=9)
    store(index, "a", 0, now=10)
    index.insert(index.match(prompt("a")), ROOT, keys_of("ab", 1), ids(1), now=12, retain=-4)
    store(index, "y", 8, now=12)
    assert [index.evict(1).tolist() for _ in range(4)] == [[1], [9], [0], [8]]


def test_blocks_before_a_discarded_one_are_as_recent_as_they_were() -> None:
    index = PrefixIndex()
    match = store(index, "abcdef", 0, now=1)
    store(index, "xy", 10, now=2)
    index.touch(index.match(prompt("ab")), 3)
    index.pin(match)
    index.discard(ROOT, key_of("abcde"))
    index.unpin(match)
    assert sorted(index.evict(2).tolist()) == [4, 5]
    assert sorted(index.evict(2).tolist()) == [2, 3]
    assert sorted(index.evict(2).tolist()) == [10, 11]


def test_discarded_blocks_are_swept_once_they_are_unpinned() -> None:
    index = PrefixIndex()
    match = store(index, "abc", 0)
    index.pin(match)
    index.discard(ROOT, key_of("a"))
    assert index.sweep().tolist() == []
    index.unpin(match)
    assert index.sweep().tolist() == [0, 1, 2]
    index.check()
    assert index.evict(9).tolist() == []


@pytest.mark.parametrize("bad", "ac")
def test_a_use_of_discarded_blocks_that_are_pinned_does_not_keep_them(bad: str) -> None:
    index = PrefixIndex()
    match = store(index, "abc", 0)
    index.pin(match)
    index.discard(ROOT, key_of("abc"[: "abc".index(bad) + 1]))
    index.touch(match, 9)
    index.check()
    index.unpin(match)
    assert index.sweep().tolist() == [0, 1, 2]["abc".index(bad) :]
    index.check()


def test_listeners_get_removed_keys_once_and_they_stay_as_they_are() -> None:
    index, told = PrefixIndex(), list[tuple[RootId, Sequence[BlockKey]]]()
    index.on_removed.append(lambda root, keys: told.append((root, keys)))
    store(index, "abcd", 0)
    held = index.match(prompt("ab"))
    index.pin(held)
    index.discard(ROOT, key_of("abcd"))
    index.discard(ROOT, key_of("a"))  # "c" goes now, "ab" once it is unpinned
    removed = [(root, list(keys)) for root, keys in told]
    assert removed == [(ROOT, keys_of("abcd")[3:]), (ROOT, keys_of("abc"))]
    index.unpin(held)
    index.sweep()
    assert [(root, list(keys)) for root, keys in told] == removed
    assert index.num_blocks == 0


def test_a_conversation_that_grows_and_shrinks_keeps_its_blocks() -> None:
    index = PrefixIndex()
    for turn in range(1, 9):
        text = "abcdefgh"[:turn]
        index.insert(index.match(prompt(text)), ROOT, keys_of(text, turn - 1), ids(turn), now=turn)
    for kept, longer in [(7, 9), (6, 10), (2, 11)]:
        assert len(index.evict(index.num_blocks - kept)) > 0
        there = index.match(prompt("abcdefgh"))
        assert index.blocks(there).tolist() == list(range(1, kept + 1))
        index.insert(there, ROOT, keys_of("abcdefgh"[: kept + 1], kept), ids(longer), now=longer)
        assert index.blocks(index.match(prompt("abcdefgh"))).tolist() == [
            *range(1, kept + 1), longer,
        ]  # fmt: skip
        index.check()


def test_discarded_blocks_of_each_tenant_are_swept() -> None:
    index = PrefixIndex(num_tenants=3, tenant_of=lambda root: {ROOT: 2, OTHER_ROOT: 1}[root])
    pins = [
        index.insert(EMPTY_MATCH, root, keys_of("abc"), ids(first, first + 1, first + 2), now=0)
        for root, first in [(ROOT, 0), (OTHER_ROOT, 10)]
    ]
    for pin in pins:
        index.pin(pin)
    assert index.discard(ROOT, key_of("ab")).tolist() == []
    assert index.discard(OTHER_ROOT, key_of("a")).tolist() == []
    for pin in pins:
        index.unpin(pin)
    assert sorted(index.sweep().tolist()) == [1, 2, 10, 11, 12]
    assert index.sweep().tolist() == []
    index.check()


def test_an_eviction_interrupted_when_a_leaf_has_gone_leaves_nothing_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = PrefixIndex()
    store(index, "abcd", 0, now=2)
    store(index, "abxy", 10, now=1)
    with monkeypatch.context() as patched:
        patched.setattr(PrefixIndex, "_let_go", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            index.evict(2)
    assert cached(index, "abxy") == 2
    index.discard(ROOT, key_of("a"))
    assert cached(index, "abcd") == 0
    index.evict(4)


def _interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_long_run_grows_and_shrinks_beside_its_callers_list() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    keys, index = keys_of(text[:20]), PrefixIndex()
    first = index.insert(EMPTY_MATCH, ROOT, keys, ids(*range(20)), now=1)
    index.insert(first, ROOT, keys_of(text, 20), ids(*range(20, 26)), now=2)
    assert keys == keys_of(text[:20])
    assert sorted(index.evict(8).tolist()) == list(range(18, 26))
    index.check()
    keys.clear()
    assert index.blocks(index.match(prompt(text))).tolist() == list(range(18))


def test_a_discard_frees_what_an_earlier_one_had_to_leave() -> None:
    index = PrefixIndex()
    store(index, "a", 0)
    store(index, "b", 1)
    pin = index.match(prompt("b"))
    index.pin(pin)
    assert index.discard(ROOT, key_of("b")).tolist() == []
    index.unpin(pin)
    assert sorted(index.discard(ROOT, key_of("a")).tolist()) == [0, 1]
    assert index.sweep().tolist() == []
    index.check()


def test_what_was_dropped_at_once_does_not_wait_for_a_sweep() -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    index.discard(ROOT, key_of("a"))
    assert not index._discarded


def test_keys_that_do_not_chain_match_nothing() -> None:
    index = PrefixIndex()
    store(index, "abc", 0)
    backwards = EngineBlockKeys(ROOT, keys_of("abc")[::-1], 3)
    assert index.match(backwards) is EMPTY_MATCH


def test_each_block_needs_a_key() -> None:
    index = PrefixIndex()
    with pytest.raises(InternalError, match="2 keys for 1 blocks"):
        index.insert(EMPTY_MATCH, ROOT, keys_of("ab"), ids(0), 0)
    with pytest.raises(InternalError, match="0 keys"):
        index.insert(EMPTY_MATCH, ROOT, [], ids(), 0)
    index.check()


def test_a_key_is_inserted_once() -> None:
    index = PrefixIndex()
    store(index, "ab", 0)
    with pytest.raises(InternalError, match="inserted twice"):
        index.insert(EMPTY_MATCH, ROOT, keys_of("ab"), ids(2, 3), 0)


# -- the checker ----------------------------------------------------------------------------------


@dataclass
class Damaged:
    """Trunk ``abcd``, branch ``abxy``, another trunk ``q``: something to break."""

    index: PrefixIndex
    trunk: Run
    branch: Run


def _lose_count(tree: Damaged) -> None:
    tree.index._num_blocks += 1


def _lose_count_of_the_discarded(tree: Damaged) -> None:
    tree.index._discarded[0] = 1


def _lose_a_key(tree: Damaged) -> None:
    tree.trunk.keys = tree.trunk.keys[:-1]


def _lose_a_block(tree: Damaged) -> None:
    tree.trunk.ids = tree.trunk.ids[:-8]


def _empty_a_run(tree: Damaged) -> None:
    tree.branch.keys = ()
    tree.branch.ids = b""


def _lose_a_run(tree: Damaged) -> None:
    del tree.index._runs[tree.branch.run_id]
    tree.index._num_blocks -= tree.branch.length


def _lead_a_key_astray(tree: Damaged) -> None:
    tree.index._directories[ROOT][key_of("a")] += 1


def _hold_what_is_not_there(tree: Damaged) -> None:
    tree.trunk.hold(tree.trunk.length + 1)


def _let_go_of_a_branch(tree: Damaged) -> None:
    tree.trunk.release(2)


def _repeat_a_segment(tree: Damaged) -> None:
    tree.trunk.segments = [(4, 2.0, 0), (4, 2.0, 0)]


def _make_the_tail_the_most_recent(tree: Damaged) -> None:
    tree.trunk.segments = [(2, 2.0, 0), (4, 3.0, 0)]


def _make_a_branch_more_recent(tree: Damaged) -> None:
    tree.branch.segments = [(2, 99.0, 0)]


def _forget_to_queue(tree: Damaged) -> None:
    tree.branch.queued = None


def _lose_the_queue(tree: Damaged) -> None:
    tree.index.queues[0]._tails._lists.clear()


def _cut_off_a_branch(tree: Damaged) -> None:
    stranger = Run(tree.trunk.run_id, ROOT, None, 0, tree.trunk.queue)
    stranger.segments = tree.trunk.segments
    tree.branch.parent = stranger


def test_a_bad_block_is_dropped_with_all_behind_it_however_many_prompts_branch_there() -> None:
    index, parent, num_turns = PrefixIndex(), EMPTY_MATCH, 1_500
    for turn in range(num_turns):
        keys = [BlockKey(b"%d-%d" % (turn, i)) for i in range(2)]
        index.insert(parent, ROOT, keys, np.arange(2 * turn, 2 * turn + 2), now=turn)
        parent = index.locate(ROOT, keys[0])  # the next turn parts before this one's end
    assert len(index.discard(ROOT, BlockKey(b"0-0"))) == 2 * num_turns
    assert index.num_blocks == 0
    index.check()


@pytest.mark.parametrize(
    "damage",
    [
        _lose_count,
        _lose_count_of_the_discarded,
        _lose_a_key,
        _lose_a_block,
        _empty_a_run,
        _lose_a_run,
        _lead_a_key_astray,
        _hold_what_is_not_there,
        _let_go_of_a_branch,
        _repeat_a_segment,
        _make_the_tail_the_most_recent,
        _make_a_branch_more_recent,
        _forget_to_queue,
        _lose_the_queue,
        _cut_off_a_branch,
    ],
)
def test_check_notices_damage(damage: Callable[[Damaged], None]) -> None:
    index = PrefixIndex()
    trunk = store(index, "abcd", 0, now=1).run
    branch = store(index, "abxy", 10, now=2).run
    store(index, "q", 20, now=3)
    assert trunk is not None
    assert branch is not None
    index.check()
    damage(Damaged(index, trunk, branch))
    with pytest.raises(InternalError):
        index.check()
