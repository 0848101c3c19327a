"""Merged KV events, against a plain model of which source holds what."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.errors import InternalError
from flexcache.events.consolidator import Consolidator
from flexcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

SIZE = 2
ENGINE, CACHE = SOURCES = ("engine", "cache")
PLACES = [("GPU", 0), ("GPU", 1), ("CPU", None), ("STORAGE", None)]


def tokens_of(hashes: list[int]) -> list[int]:
    """Return the tokens of a block, which follow from its hash."""
    return [token for block in hashes for token in (10 * block, 10 * block + 1)]


def stored(hashes: list[int], medium: str, *, parent: int | None = None, tokens: bool = True,
           group: int | None = None) -> BlockStored:  # fmt: skip
    known = tokens_of(hashes) if tokens else []
    return BlockStored(list(hashes), parent, known, SIZE, None, medium, None, group_idx=group)


class Follower:
    """A consumer of merged events, which checks that each adds information."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str | None, bool]] = {}
        """Last published medium of each block, and whether its tokens were published."""

    def follow(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hashes=hashes, token_ids=tokens, medium=medium):
                    assert hashes
                    assert tokens in ([], tokens_of(hashes))
                    for block in hashes:
                        if block in self.blocks:
                            assert tokens and self.blocks[block] == (medium, False)
                        self.blocks[block] = (medium, bool(tokens))
                case BlockRemoved(hashes, medium):
                    for block in hashes:
                        assert self.blocks.pop(block)[0] == medium
                case AllBlocksCleared():
                    self.blocks.clear()


some_source = st.sampled_from(SOURCES)
some_place = st.sampled_from(PLACES)
some_blocks = st.lists(st.integers(0, 5), min_size=1, max_size=4)


class ConsolidatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.consolidator = Consolidator()
        self.follower = Follower()
        self.held: set[tuple[str, int, str, int | None]] = set()
        self.known: set[int] = set()  # blocks whose tokens have been published

    def take(self, source: str, event: Event) -> None:
        self.follower.follow(self.consolidator.take(source, [event]))
        self.known &= self.everywhere

    @property
    def everywhere(self) -> set[int]:
        return {block for _, block, _, _ in self.held}

    @rule(source=some_source, place=some_place, blocks=some_blocks, tokens=st.booleans(),
          as_bytes=st.booleans())  # fmt: skip
    def store(
        self, source: str, place: tuple[str, int | None], blocks: list[int], tokens: bool,
        as_bytes: bool,
    ) -> None:  # fmt: skip
        medium, group = place
        event = stored(blocks, medium, tokens=tokens, group=group)
        if as_bytes:
            event.block_hashes[:] = [b"digest" + block.to_bytes(8, "big") for block in blocks]
        self.held |= {(source, block, medium, group) for block in blocks}
        if tokens:
            self.known |= set(blocks)
        self.take(source, event)

    @rule(source=some_source, place=some_place, blocks=some_blocks)
    def remove(self, source: str, place: tuple[str, int | None], blocks: list[int]) -> None:
        medium, group = place
        self.held -= {(source, block, medium, group) for block in blocks}
        self.take(source, BlockRemoved(list(blocks), medium, group))

    @rule(source=some_source)
    def clear(self, source: str) -> None:
        self.held = {holding for holding in self.held if holding[0] != source}
        self.take(source, AllBlocksCleared())

    @rule(source=some_source)
    def lose_events(self, source: str) -> None:
        self.held = {holding for holding in self.held if holding[0] != source}
        self.follower.follow(self.consolidator.forget(source))
        self.known &= self.everywhere

    @invariant()
    def a_follower_knows_what_is_somewhere_and_its_tokens(self) -> None:
        self.consolidator.check()
        assert self.follower.blocks.keys() == self.everywhere
        assert {block for block, (_, known) in self.follower.blocks.items() if known} == self.known
        assert len(self.consolidator) == len(self.everywhere)


TestConsolidator = ConsolidatorMachine.TestCase


def test_stored_with_the_first_copy_and_removed_with_the_last() -> None:
    merged = Consolidator()
    assert merged.take(ENGINE, [stored([1, 2], "GPU", parent=9, group=0)]) == [
        stored([1, 2], "GPU", parent=9)
    ]
    assert merged.take(CACHE, [stored([1, 2], "CPU", parent=9)]) == []
    assert merged.take(ENGINE, [BlockRemoved([1, 2], "GPU", 0)]) == []
    assert merged.take(CACHE, [stored([1, 2], "STORAGE", parent=9)]) == []
    assert merged.take(CACHE, [BlockRemoved([2, 1], "CPU")]) == []
    assert merged.take(CACHE, [BlockRemoved([2], "STORAGE")]) == [BlockRemoved([2], "GPU")]
    assert 1 in merged and 2 not in merged


def test_new_blocks_are_published_with_their_own_parent_tokens_and_extra_keys() -> None:
    merged = Consolidator()
    merged.take(ENGINE, [stored([2], "GPU")])
    event = BlockStored(
        [1, 2, 3], 9, tokens_of([1, 2, 3]), SIZE, 4, "CPU", "lora", [["a"], ["b"], ["c"]]
    )
    assert merged.take(CACHE, [event]) == [
        BlockStored([1], 9, tokens_of([1]), SIZE, 4, "CPU", "lora", [["a"]]),
        BlockStored([3], 2, tokens_of([3]), SIZE, 4, "CPU", "lora", [["c"]]),
    ]


def test_blocks_are_published_again_once_their_tokens_become_known() -> None:
    merged = Consolidator()
    merged.take(CACHE, [stored([1, 2], "STORAGE", tokens=False)])
    assert merged.take(ENGINE, [stored([1, 2], "GPU", group=0)]) == [stored([1, 2], "STORAGE")]
    assert merged.take(CACHE, [stored([1, 2], "CPU")]) == []


def test_a_restarted_source_removes_only_its_own_blocks() -> None:
    merged = Consolidator()
    merged.take(ENGINE, [stored([1, 2], "GPU")])
    merged.take(CACHE, [stored([2, 3], "CPU")])
    assert merged.forget(ENGINE) == [BlockRemoved([1], "GPU")]
    assert merged.forget(CACHE) == [BlockRemoved([2], "GPU"), BlockRemoved([3], "CPU")]
    assert len(merged) == 0


def test_the_checker_finds_a_wrong_count() -> None:
    merged = Consolidator()
    merged.take(ENGINE, [stored([1], "GPU")])
    merged._blocks[1].num_holders += 1
    with pytest.raises(InternalError):
        merged.check()
