"""What a publisher remembers of its events, page by page; `test_journal` compares it with tiers."""

from __future__ import annotations

import pytest

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.events import held_blocks
from flexcache.events.held_blocks import HeldBlocks
from flexcache.ids import BlockKey, RequestInfo, RootId

ROOT = RootId(bytes(16))
SIZE = 2


def keys(first: int, stop: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(8, "big")) for number in range(first, stop)]


def stored(first: int, stop: int, medium: Medium = Medium.CPU) -> Stored:
    parent = keys(first - 1, first)[0] if first else None
    tokens = range(first * SIZE, stop * SIZE)
    info = RequestInfo(lora_name="adapter")
    extra = [(number,) for number in range(first, stop)]
    return Stored(medium, ROOT, parent, keys(first, stop), SIZE, tokens, info, extra)


def removed(first: int, stop: int, medium: Medium = Medium.CPU) -> Removed:
    return Removed(medium, ROOT, keys(first, stop))


def content(held: HeldBlocks) -> list[Stored]:
    held.check()
    found, cursor = held.page(0)
    while cursor is not None:
        more, cursor = held.page(cursor)
        found += more
    return found


def same(change: Stored) -> Stored:
    """Return what a snapshot has of a change: its tokens are a list."""
    return Stored(
        change.medium, change.root, change.parent, change.keys, change.block_size,
        list(change.token_ids), change.info, change.extra_keys,
    )  # fmt: skip


def test_what_is_left_of_each_prompt_is_listed_with_all_that_is_known() -> None:
    held = HeldBlocks()
    held.apply([stored(0, 4), stored(4, 6), stored(0, 6, Medium.STORAGE), removed(3, 6)])
    assert content(held) == [same(stored(0, 3)), same(stored(0, 6, Medium.STORAGE))]
    assert (held.num_blocks, held.num_tokens) == (9, (4 + 6) * SIZE)
    held.apply([removed(0, 3), stored(0, 1)])
    assert content(held) == [same(stored(0, 6, Medium.STORAGE)), same(stored(0, 1))]
    held.apply([Cleared()])
    assert content(held) == [] and (held.num_blocks, held.num_tokens) == (0, 0)


def test_pages_are_small_and_hold_for_changes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "_RUN_BLOCKS", 4)
    monkeypatch.setattr(held_blocks, "_PAGE_BLOCKS", 6)
    held = HeldBlocks()
    held.apply([stored(0, 20)])
    first, cursor = held.page(0)
    assert first == [same(stored(0, 4)), same(stored(4, 8))]
    held.apply([removed(10, 20), stored(20, 21, Medium.STORAGE)])
    assert cursor is not None
    second, cursor = held.page(cursor)
    assert second == [same(stored(8, 10)), same(stored(20, 21, Medium.STORAGE))]
    assert cursor is None


def test_pages_are_bounded_by_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_blocks, "_PAGE_TOKENS", 8)
    held = HeldBlocks()
    held.apply([stored(4 * number, 4 * number + 4) for number in range(3)])
    for number in range(3):
        page, _ = held.page(number)
        assert page == [same(stored(4 * number, 4 * number + 4))]


def test_beyond_the_bound_the_oldest_blocks_are_listed_without_tokens() -> None:
    held = HeldBlocks(max_tokens=6 * SIZE)
    changes: list[Change] = [stored(0, 4), stored(4, 8), stored(8, 10)]
    held.apply(changes)
    tokens = [list(change.token_ids) for change in content(held)]
    assert [len(each) for each in tokens] == [0, 4 * SIZE, 2 * SIZE]
    assert held.num_tokens == 6 * SIZE
    held.apply([removed(4, 10), stored(4, 10)])
    assert [len(change.token_ids) for change in content(held)] == [0, 6 * SIZE]


def test_after_lost_changes_nothing_is_known_until_all_is_cleared() -> None:
    held = HeldBlocks()
    held.apply([stored(0, 4)])
    held.missed()
    held.apply([removed(2, 4), stored(9, 10)])
    assert not held.is_whole and content(held) == []
    held.apply([Cleared(), stored(0, 1)])
    assert held.is_whole and content(held) == [same(stored(0, 1))]


def test_tokens_that_are_no_tokenizers_are_left_out() -> None:
    held = HeldBlocks()
    held.apply([Stored(Medium.CPU, ROOT, None, keys(0, 1), 1, [1 << 40])])
    assert [change.token_ids for change in content(held)] == [[]]
