"""Blocks below DRAM are found by the names that KV events gave them, and by no others."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.events.held_blocks import PublishedBlock, PublishedNames
from flexcache.events.wire import BlockStored, describe, low_64_bits
from flexcache.ids import BlockKey, RootId

ROOTS = [RootId(b"one"), RootId(b"another")]
FORMS = ("int", "int_first", "bytes")


def key_of(number: int) -> BlockKey:
    return BlockKey((1 << 63 | number).to_bytes(8, "big") + (1 << 62 | number).to_bytes(8, "big"))


def stored(
    keys: list[BlockKey], root: RootId = ROOTS[0], medium: Medium = Medium.STORAGE
) -> Stored:
    return Stored(medium, root, None, keys, 16)


def told_name(key: BlockKey, form: str) -> int:
    """Return what a subscriber learns of a block's name."""
    event = describe(stored([key]), form)
    assert isinstance(event, BlockStored)
    return low_64_bits(event.block_hashes[0])


some_root = st.sampled_from(ROOTS)
some_keys = st.lists(st.integers(0, 8).map(key_of), min_size=1, max_size=4, unique=True)


class NamesMachine(RuleBasedStateMachine):
    """Against the set of the blocks that are below DRAM."""

    @initialize(form=st.sampled_from(FORMS))
    def start(self, form: str) -> None:
        self.form = form
        self.names = PublishedNames(form)
        self.below: set[PublishedBlock] = set()
        self.last_root = ROOTS[0]

    def apply(self, *changes: Change) -> None:
        self.names.apply(changes)

    @rule(root=some_root, keys=some_keys)
    def store(self, root: RootId, keys: list[BlockKey]) -> None:
        self.apply(stored(keys, root))
        self.below |= {PublishedBlock(root, key) for key in keys}
        self.last_root = root

    @rule(root=some_root, keys=some_keys)
    def remove(self, root: RootId, keys: list[BlockKey]) -> None:
        self.apply(Removed(Medium.STORAGE, root, keys))
        self.below -= {PublishedBlock(root, key) for key in keys}

    @rule(root=some_root, keys=some_keys, is_stored=st.booleans())
    def change_dram(self, root: RootId, keys: list[BlockKey], is_stored: bool) -> None:
        medium = Medium.CPU
        self.apply(
            stored(keys, root, medium) if is_stored else Removed(medium, root, keys)
        )  # fmt: skip

    @rule()
    def clear(self) -> None:
        self.apply(Cleared())
        self.below.clear()

    @invariant()
    def finds_what_is_below(self) -> None:
        if not hasattr(self, "names"):
            return
        self.names.check()
        assert len(self.names) == len(self.below)
        for number in range(9):
            key = key_of(number)
            found = self.names.find(told_name(key, self.form))
            places = {PublishedBlock(root, key) for root in ROOTS} & self.below
            assert found in places if places else found is None
            assert PublishedBlock(self.last_root, key) not in places or found[0] == self.last_root


TestNames = NamesMachine.TestCase
TestNames.settings = settings(stateful_step_count=15)


@pytest.mark.parametrize("form", FORMS)
def test_short_keys_have_names_too(form: str) -> None:
    names = PublishedNames(form)
    key = BlockKey(b"\x01\x02")
    names.apply([stored([key])])
    assert names.find(told_name(key, form)) == PublishedBlock(ROOTS[0], key)
    names.check()


def test_a_block_on_ssd_and_in_the_store_is_found_until_both_have_lost_it() -> None:
    names, key = PublishedNames("int"), key_of(1)
    places = (Medium.LOCAL_STORAGE, Medium.REMOTE_STORAGE)
    names.apply([stored([key], medium=place) for place in places])
    for place in places:
        assert names.find(told_name(key, "int")) == PublishedBlock(ROOTS[0], key)
        names.apply([Removed(place, ROOTS[0], [key])])
    assert names.find(told_name(key, "int")) is None
    names.check()
