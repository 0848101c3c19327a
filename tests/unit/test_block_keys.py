"""Block keys against a reference that hashes the whole prefix again for each of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flexcache.cache.block_keys import (
    ENGINE_KEYS,
    TOKEN_KEYS,
    EngineBlockKeys,
    TokenBlockKeys,
    make_root,
)
from flexcache.cache.prompt import PromptMaker
from flexcache.ids import BlockKey, PromptDetail, RootId, TaskKind

ROOT = make_root("model", ["tenant"], TOKEN_KEYS)
OTHER_ROOT = make_root("model", ["neighbour"], TOKEN_KEYS)

Tokens = npt.NDArray[np.int64]
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
BLOCK_SIZES = st.integers(1, 5)


def to_array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)


def reference_keys(root: RootId, tokens: list[int], tokens_per_block: int) -> list[BlockKey]:
    """Hash, for every whole block, the root and all tokens up to the block's end."""
    ends = range(tokens_per_block, len(tokens) + 1, tokens_per_block)
    return [
        BlockKey(xxhash.xxh3_128_digest(root + np.array(tokens[:end], dtype="<i8").tobytes()))
        for end in ends
    ]


@given(TOKENS, BLOCK_SIZES, st.data())
def test_keys_match_the_reference_in_whatever_order_they_are_requested(
    tokens: list[int], tokens_per_block: int, data: st.DataObject
) -> None:
    keys = TokenBlockKeys(ROOT, to_array(tokens), tokens_per_block)
    expected = reference_keys(ROOT, tokens, tokens_per_block)
    assert keys.num_blocks == len(expected)
    if not expected:
        return
    index = st.integers(0, len(expected) - 1)
    bound = st.integers(0, len(expected))
    for probe in data.draw(st.lists(st.one_of(index, st.tuples(bound, bound)), max_size=12)):
        if isinstance(probe, int):
            assert keys.key(probe) == expected[probe]
        else:
            assert keys.slice(*probe) == expected[slice(*probe)]


@given(TOKENS, BLOCK_SIZES)
def test_a_key_depends_on_the_tokens_up_to_its_block_only(
    tokens: list[int], tokens_per_block: int
) -> None:
    longer = TokenBlockKeys(ROOT, to_array([*tokens, *range(tokens_per_block)]), tokens_per_block)
    keys = TokenBlockKeys(ROOT, to_array(tokens), tokens_per_block)
    assert keys.slice(0, keys.num_blocks) == longer.slice(0, keys.num_blocks)


def test_a_change_in_an_early_token_changes_every_later_key() -> None:
    tokens = np.arange(12, dtype=np.int64)
    changed = tokens.copy()
    changed[4] += 1
    keys, others = TokenBlockKeys(ROOT, tokens, 4), TokenBlockKeys(ROOT, changed, 4)
    same = [a == b for a, b in zip(keys.slice(0, 3), others.slice(0, 3), strict=True)]
    assert same == [True, False, False]


def test_different_roots_give_different_keys() -> None:
    tokens = np.arange(12, dtype=np.int64)
    keys, others = TokenBlockKeys(ROOT, tokens, 4), TokenBlockKeys(OTHER_ROOT, tokens, 4)
    assert keys.root != others.root
    assert set(keys.slice(0, 3)).isdisjoint(others.slice(0, 3))


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_prompt_shorter_than_a_block_has_no_keys(num_tokens: int) -> None:
    keys = TokenBlockKeys(ROOT, np.arange(num_tokens, dtype=np.int64), 4)
    assert keys.num_blocks == 0
    assert keys.slice(0, 0) == []


def test_tokens_of_a_partial_last_block_do_not_count() -> None:
    whole = TokenBlockKeys(ROOT, np.arange(8, dtype=np.int64), 4)
    more = TokenBlockKeys(ROOT, np.arange(11, dtype=np.int64), 4)
    assert more.num_blocks == 2
    assert more.slice(0, 2) == whole.slice(0, 2)


def test_tokens_need_not_lie_side_by_side_in_memory() -> None:
    spread = np.arange(16, dtype=np.int64)[::2]
    keys = TokenBlockKeys(ROOT, spread, 4)
    assert keys.slice(0, 2) == reference_keys(ROOT, spread.tolist(), 4)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 2), (3, 1)])
def test_an_empty_slice_has_no_keys(start: int, stop: int) -> None:
    keys = TokenBlockKeys(ROOT, np.arange(12, dtype=np.int64), 4)
    assert keys.slice(start, stop) == []


def test_a_root_tells_apart_fingerprint_namespace_and_kind() -> None:
    roots = [
        make_root("model", [], TOKEN_KEYS),
        make_root("model", [], ENGINE_KEYS),
        make_root("model2", [], TOKEN_KEYS),
        make_root("model", ["a"], TOKEN_KEYS),
        make_root("model", ["a", "b"], TOKEN_KEYS),
        make_root("model", ["b", "a"], TOKEN_KEYS),
        make_root("model", ["ab"], TOKEN_KEYS),
        make_root("model", ["a", "b", ""], TOKEN_KEYS),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {16}


def test_a_root_is_the_same_whatever_sequence_type_the_namespace_has() -> None:
    assert make_root("model", ("a", "b"), TOKEN_KEYS) == make_root("model", ["a", "b"], TOKEN_KEYS)


def test_the_engines_own_keys_are_passed_through() -> None:
    engine_keys = [b"first", b"second", b"third"]
    keys = EngineBlockKeys(ROOT, engine_keys, 3)
    assert keys.root == ROOT
    assert keys.num_blocks == 3
    assert [keys.key(index) for index in range(3)] == engine_keys
    assert keys.slice(0, 3) == engine_keys
    assert keys.slice(1, 2) == [b"second"]
    assert keys.slice(2, 2) == []


@pytest.mark.parametrize(("num_blocks", "num_keys"), [(2, 3), (3, 2), (0, 3), (3, 0)])
def test_a_block_counts_only_if_both_engine_and_prompt_have_it(
    num_blocks: int, num_keys: int
) -> None:
    keys = EngineBlockKeys(ROOT, [bytes([index]) for index in range(num_keys)], num_blocks)
    assert keys.num_blocks == min(num_blocks, num_keys)


@given(BLOCK_SIZES, st.integers(0, 40), st.integers(0, 45), st.integers(0, 45))
def test_a_range_of_tokens_is_a_mask_that_is_true_there(
    size: int, num_tokens: int, start: int, stop: int
) -> None:
    maker = PromptMaker("a model", size, lambda: PromptDetail.NOTHING)
    mask = np.zeros(num_tokens, np.bool_)
    mask[start:stop] = True
    by_mask = maker.make(TaskKind.GET, range(num_tokens), mask)
    by_range = maker.make(TaskKind.GET, range(num_tokens), range(start, stop))
    assert replace(by_range, keys=by_mask.keys) == by_mask


@pytest.mark.parametrize(
    "keys", [[b"a", "b", "c", "d"], ["a", b"b"], [b"a", b"b" * 41], [b"", b"b"]]
)
def test_the_first_and_the_last_key_of_an_engine_are_checked(keys: list[bytes]) -> None:
    maker = PromptMaker("a model", 2, lambda: PromptDetail.NOTHING)
    with pytest.raises(
        ValueError,
        match="block_keys must be a sequence of keys; the first and the last must be bytes",
    ):
        maker.make(TaskKind.GET, range(8), block_keys=keys)
    assert maker.make(TaskKind.GET, range(8), block_keys=[]).keys.num_blocks == 0


@pytest.mark.parametrize("wanted", [range(-1, 4), range(0, 4, 2), range(4, 0, -1)])
def test_a_range_that_is_none_of_tokens_is_refused(wanted: range) -> None:
    maker = PromptMaker("a model", 2, lambda: PromptDetail.NOTHING)
    with pytest.raises(ValueError, match="token_mask"):
        maker.make(TaskKind.GET, range(8), wanted)
