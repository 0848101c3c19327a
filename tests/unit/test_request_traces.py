"""Request traces of sessions: AIPerf's turns and kv-cache-tester's files, read as whole prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcache.errors import TraceError
from flexcache.replay.traces import MooncakeTrace, is_mooncake, read_requests
from flexcache.router.simulate.workload import read_trace
from flexcache.tracing.records import TaskMatched

SIZE = 4  # tokens per id


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def turn(session: str, ids: list[int], tokens: int, answer: int = 0, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "hash_ids": ids, "input_length": tokens,
            "output_length": answer, **more}  # fmt: skip


FULL = turn("full", [90, 91], 2 * SIZE)
"""A turn that only `SIZE` tokens per id fit, or one that is nearly so."""
SIZED = [FULL, turn("sized", [92, 93], SIZE + 1)]


def test_turns_become_prompts_that_grow_by_answers_too(tmp_path: Path) -> None:
    path = write(tmp_path / "dataset.jsonl", [
        turn("a", [1, 2, 3], 10, answer=3, timestamp=0.0),
        turn("a", [7], 2, answer=1, delay=50.0),
        turn("b", [1, 2, 4], 12, timestamp=20.0),
        turn("b", [5], 1, delay=10.0),
        *SIZED,
    ])  # fmt: skip
    assert is_mooncake(path)
    read = [each for each in read_requests(path) if each.session in "ab"]
    assert [(each.session, each.timestamp) for each in read] == [
        ("a", 0.0), ("b", 20.0), ("b", 30.0), ("a", 50.0),
    ]  # fmt: skip
    assert [each.input_length for each in read] == [10, 12, 13, 15]
    assert {each.tokens_per_id for each in read} == {SIZE}
    first, b, b_next, a_next = (each.hash_ids for each in read)
    assert first[:2] == b[:2] == a_next[:2] and first[2] not in (b[2], a_next[2])
    assert b_next[:3] == b and len(b_next) == len(a_next) == 4
    assert len(set(first + b + b_next + a_next)) == 2 + 1 + 1 + 1 + 2


def test_a_trace_of_turns_serves_replay_and_router(tmp_path: Path) -> None:
    path = write(tmp_path / "dataset.jsonl", [
        turn("a", [1, 2], 8, answer=2, timestamp=1000.0), turn("a", [3], 2, delay=500.0), *SIZED,
    ])  # fmt: skip
    trace = MooncakeTrace(path)
    assert trace.header.tokens_per_block == SIZE
    matches = [each for each in trace.records(with_keys=True) if isinstance(each, TaskMatched)]
    assert [each.stop for each in matches[-2:]] == [3, 3]  # a get and a put
    routed = read_trace([path])
    assert routed.block_tokens == SIZE
    assert [each.session for each in routed.requests] == ["full", "sized", "a", "a"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([turn("a", [1], 5)], 512),
        ([turn("a", [1, 2], 1000)], 512),
        ([turn("a", [1, 2], 1100)], 1024),
        ([turn("a", [1, 2], 200)], 128),
        ([turn("a", [1, 2], 200), turn("b", [1, 2], 101)], 100),
    ],
)
def test_the_tokens_per_id_follow_from_the_turns(
    tmp_path: Path, turns: list[dict[str, Any]], expected: int
) -> None:
    (size,) = {each.tokens_per_id for each in read_requests(write(tmp_path / "t.jsonl", turns))}
    assert size == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (turn("b", [1, 2], 2000), "no number of tokens per id"),
        ({"session_id": "b", "input_length": 3}, "line 2: .*hash_ids"),
        (turn("b", [], 1), "line 2: .*hash_ids"),
        (turn("b", [1], 0), "line 2: .*input_length"),
        (turn("b", [1], 1, delay=-1.0), "line 2: .*delay"),
    ],
)
def test_turns_that_make_no_sense_are_named(
    tmp_path: Path, line: dict[str, Any], named: str
) -> None:
    path = write(tmp_path / "turns.jsonl", [turn("a", [1, 2], 101), line])
    with pytest.raises(TraceError, match=named):
        list(read_requests(path))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_numbers_are_equal_prefixes(data: st.DataObject) -> None:
    """Beside a model that writes out each prompt token by token."""
    lines = list(SIZED)
    for number in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 4))):
            ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            tokens = SIZE * (len(ids) - 1) + data.draw(st.integers(1, SIZE))
            lines.append(turn(str(number), ids, tokens, data.draw(st.integers(0, 6)), delay=1.0))
    with tempfile.TemporaryDirectory() as directory:
        read = list(read_requests(write(Path(directory, "turns.jsonl"), lines)))

    prompts: dict[str, list[tuple[object, int]]] = {}
    expected = []
    for number, line in enumerate(lines):
        prompt = prompts.setdefault(str(line["session_id"]), [])
        rest = int(line["input_length"])
        for hash_id in line["hash_ids"]:
            prompt += [(hash_id, at) for at in range(min(SIZE, rest))]
            rest -= SIZE
        blocks = [tuple(prompt[: at + SIZE]) for at in range(0, len(prompt), SIZE)]
        expected.append((str(line["session_id"]), len(prompt), blocks))
        prompt += [(f"answer {number}", at) for at in range(int(line["output_length"]))]

    numbers: dict[int, object] = {}
    seen: set[object] = set()
    for each in read:
        found = (each.session, each.input_length)
        session, length, blocks = next(
            mine for mine in expected if mine[:2] == found and len(mine[2]) == len(each.hash_ids)
        )
        expected.remove((session, length, blocks))
        for hash_id, block in zip(each.hash_ids, blocks, strict=True):
            assert numbers.setdefault(hash_id, block) == block
            seen.add(block)
    assert not expected
    assert len(numbers) == len(seen)


def call(t: float, ids: list[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": 2, "hash_ids": ids, **more}


def session(name: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local",
            "tool_tokens": 5, "requests": requests}  # fmt: skip


def test_weka_sessions_are_read_with_their_subagents(tmp_path: Path) -> None:
    absolute = {"t": 2.0, "type": "subagent", "agent_id": "agent_001", "status": "completed",
                "requests": [call(2.5, [1, 9])]}  # fmt: skip
    relative = {**absolute, "agent_id": "agent_002", "requests": [call(1.0, [1, 9, 8])]}
    one = session("one", [call(0.0, [1, 2]), absolute, relative, call(9.0, [1, 2, 3])])
    for name, trace in (("a", one), ("b", session("two", [call(1.0, [1, 2])]))):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace, indent=1))
    assert is_mooncake(tmp_path) and is_mooncake(tmp_path / "a.json")
    read = list(read_requests(tmp_path))
    assert [(each.session, each.time_s) for each in read] == [
        ("one", 0.0), ("two", 1.0), ("one/agent_001", 2.5), ("one/agent_002", 3.0), ("one", 9.0),
    ]  # fmt: skip
    assert {each.tokens_per_id for each in read} == {64}
    first, other, agent, second, last = (each.hash_ids for each in read)
    assert last[:2] == first and second[:2] == agent and agent[0] == first[0]
    assert not set(other) & set(first + last + agent + second)
    assert [len(each.keys) for each in read_trace([tmp_path]).requests] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "t.json"),
        ('{"id": "a", "block_size": 0, "requests": []}', "block_size"),
        ('{"id": "a", "block_size": 64, "requests": [{"t": -1}]}', "requests"),
        ('{"id": "a", "block_size": 64, "requests": [' + '{"t": 0, "requests": [' * 5000, "t.json"),
    ],
)
def test_a_weka_file_that_makes_no_sense_is_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=named):
        list(read_requests(path))


def test_lines_may_say_their_tokens_per_id(tmp_path: Path) -> None:
    line = {"timestamp": 5, "input_length": 40, "hash_ids": [1, 2, 3], "block_size": 16}
    for name in ("trace.jsonl", "trace.json"):
        (read,) = read_requests(write(tmp_path / name, [line]))
        assert (read.tokens_per_id, read.time_s, read.session) == (16, 0.005, "")
