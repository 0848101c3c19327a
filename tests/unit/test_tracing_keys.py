"""Block keys go into a trace shortened and without repetition, and come back whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flexcache.cache.block_keys import TokenBlockKeys
from flexcache.ids import RootId, TaskKind
from flexcache.replay.traces import KeyReader
from flexcache.tracing.records import KEY_BYTES, TaskMatched
from flexcache.tracing.tracer import KeyWriter, PackedPrompt

ROOTS = (RootId(b"one model's root"), RootId(b"another's root.."))


def match_of(task: int, stop: int, found: int = 0, start: int = 0) -> TaskMatched:
    return TaskMatched(
        time=0.0, task=task, kind=TaskKind.GET, start=0, stop=stop, num_tokens=16 * stop,
        found_start=start, num_blocks=found - start,
    )  # fmt: skip


def key_of(root: RootId, path: tuple[int, ...], size: int) -> bytes:
    """Return a distinct key for every prefix of every root."""
    return np.random.default_rng([root[0], *path]).bytes(size)


def packed(root: RootId, path: tuple[int, ...], size: int) -> PackedPrompt:
    keys = [key_of(root, path[: end + 1], size) for end in range(len(path))]
    return PackedPrompt(root, size, b"".join(keys))


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(ROOTS),
            st.lists(st.integers(0, 1), max_size=6).map(tuple),
            st.tuples(st.integers(0, 6), st.integers(0, 6)),
            st.booleans(),
        ),
        max_size=30,
    ),
    size=st.sampled_from([4, 8, 16, 32]),
)
def test_every_match_gets_the_last_bytes_of_all_its_keys_back(
    calls: list[tuple[RootId, tuple[int, ...], tuple[int, int], bool]], size: int
) -> None:
    writer, reader = KeyWriter(16), KeyReader()
    for task, (root, path, found, is_new_file) in enumerate(calls, 1):
        if is_new_file:  # which must not need what went before
            writer.begin_file()
            reader = KeyReader()
        start, stop = sorted(min(count, len(path)) for count in found)
        written = writer.complete(match_of(task, len(path), stop, start), packed(root, path, size))
        whole = reader.complete(written)
        expected = [key_of(root, path[: end + 1], size)[-KEY_BYTES:] for end in range(len(path))]
        assert whole.keys == b"".join(key.rjust(KEY_BYTES, b"\0") for key in expected)
        assert whole.base == whole.base_blocks == 0


def test_a_prompt_is_not_written_again_nor_is_its_prefix() -> None:
    writer, path = KeyWriter(16), tuple(range(100))
    first = writer.complete(match_of(1, 60), packed(ROOTS[0], path[:60], 32))
    again = writer.complete(match_of(2, 60), packed(ROOTS[0], path[:60], 32))
    longer = writer.complete(match_of(3, 100, found=60), packed(ROOTS[0], path, 32))
    other_root = writer.complete(match_of(4, 60), packed(ROOTS[1], path[:60], 32))
    assert [len(m.keys) // KEY_BYTES for m in (first, again, longer, other_root)] == [60, 0, 40, 60]


def test_a_prompt_of_tokens_has_the_keys_that_the_cache_gives_it() -> None:
    tokens = np.arange(16 * 9, dtype=np.int64)
    expected = TokenBlockKeys(ROOTS[0], tokens, 16).slice(0, 9)
    prompt = PackedPrompt(ROOTS[0], 0, tokens.tobytes())
    written = KeyWriter(16).complete(match_of(1, 9), prompt)
    assert written.keys == b"".join(key[-KEY_BYTES:] for key in expected)


def test_a_reference_to_a_missing_line_is_refused() -> None:
    writer = KeyWriter(16)
    writer.complete(match_of(1, 3), packed(ROOTS[0], (1, 2, 3), 8))
    second = writer.complete(match_of(2, 3), packed(ROOTS[0], (1, 2, 3), 8))
    with pytest.raises(ValueError, match="task 2 refers to keys of task 1"):
        KeyReader().complete(second)


def test_a_prompt_cannot_share_more_blocks_than_its_base_has() -> None:
    reader = KeyReader()
    for task, stop in ((1, 3), (2, 2)):
        base = {"base": 1, "base_blocks": 2} if task == 2 else {"keys": bytes(3 * KEY_BYTES)}
        reader.complete(structs.replace(match_of(task, stop), **base))
    with pytest.raises(ValueError, match="3 blocks of task 2, which has 2"):
        reader.complete(structs.replace(match_of(3, 3), base=2, base_blocks=3))


def lines_run(count: int, stop_of: Callable[[int], int]) -> int:
    """Count reader lines executed for prompts that each begin like the one before."""
    matches = [structs.replace(match_of(1, stop_of(1)), keys=bytes(stop_of(1) * KEY_BYTES))]
    for task in range(2, count + 1):
        shared, stop = min(stop_of(task - 1), stop_of(task)), stop_of(task)
        keys = bytes((stop - shared) * KEY_BYTES)
        match = match_of(task, stop)
        matches.append(structs.replace(match, base=task - 1, base_blocks=shared, keys=keys))
    reader, num_lines = KeyReader(), 0

    def count_lines(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count_lines

    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        for match in matches:
            reader.complete(match)
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize(
    "stop_of",
    [
        lambda task: 10,
        lambda task: task,
        lambda task: task if task < 500 else 1,
        lambda task: 1 + task % 2,
    ],
    ids=["the same", "longer each time", "longer, then short", "long and short"],
)
def test_the_cost_of_a_prompt_does_not_grow_with_its_chain(
    stop_of: Callable[[int], int],
) -> None:
    assert lines_run(4000, stop_of) < 5 * lines_run(1000, stop_of)
