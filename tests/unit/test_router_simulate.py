"""The simulator: its engines, its traces, its command."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexcache.cli import app
from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.replay.traces import read_requests
from flexcache.router.dispatcher import Dispatcher
from flexcache.router.policy import POLICIES, make_policy
from flexcache.router.simulate.comparison import Simulated, Simulation, compare, spec_for
from flexcache.router.simulate.engine import EngineSpec
from flexcache.router.simulate.workload import (
    Agents,
    AgentSpec,
    Recorded,
    SimRequest,
    read_trace,
    tool_agents,
)
from flexcache.tracing.records import TaskMatched, TraceHeader

BLOCK = 512
SPEC = EngineSpec()


def request(
    name: str, time_s: float, tokens: int, output: int = 1, keys: object = None
) -> SimRequest:
    blocks = range(-(-tokens // BLOCK))
    return SimRequest(name, time_s, tokens, output, [(keys or name, i) for i in blocks])


def run(workload: Recorded, spec: EngineSpec = SPEC, engines: int = 1) -> Simulated:
    dispatcher = Dispatcher(make_policy("ours"), engines)
    simulation = Simulation(dispatcher, [spec] * engines, workload)
    outcome = simulation.run()
    simulation.check()
    dispatcher.check()
    assert len(dispatcher.load) == 0
    return outcome


def step_s(prefill: int = 0, context: int = 0, running: int = 0, kv_tokens: int = 0) -> float:
    """Section by section what a step costs: the model itself."""
    attended = prefill * (context + prefill / 2)
    return 18e-3 + 83e-6 * prefill + 2.2e-9 * attended + 80e-6 * running + 35e-9 * kv_tokens


def test_a_lone_request_takes_its_steps() -> None:
    outcome = run(Recorded([request("a", 0.0, 1000, output=3)], BLOCK))
    first = step_s(prefill=1000)
    assert outcome.ttft_s == [pytest.approx(first)]
    last = first + step_s(running=1, kv_tokens=1001) + step_s(running=1, kv_tokens=1002)
    assert outcome.e2e_s == [pytest.approx(last)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    outcome = run(Recorded([request("a", 0.0, 20_000)], BLOCK))
    chunks = (0, 8192), (8192, 8192), (16384, 20_000 - 16384)
    assert outcome.ttft_s == [pytest.approx(sum(step_s(n, context) for context, n in chunks))]


def test_a_prefix_that_is_cached_is_not_computed() -> None:
    requests = [request("a", 0.0, 5000), request("b", 10.0, 5000, keys="a")]
    outcome = run(Recorded(requests, BLOCK))
    assert outcome.cached_tokens == 9 * BLOCK
    new = 5000 - 9 * BLOCK
    assert outcome.ttft_s[1] == pytest.approx(step_s(prefill=new, context=9 * BLOCK))


def test_a_prefix_in_dram_costs_its_load() -> None:
    requests = [
        request("a", 0.0, 5000),
        request("x", 5.0, 5000),
        request("b", 10.0, 5000, keys="a"),
    ]
    spec = EngineSpec(gpu_blocks=10, dram_blocks=100)
    outcome = run(Recorded(requests, BLOCK), spec)
    new = 5000 - 9 * BLOCK
    expected = step_s(prefill=new, context=9 * BLOCK) + 9 * 4e-3
    assert outcome.ttft_s[2] == pytest.approx(expected)
    assert run(Recorded(requests, BLOCK), replace(spec, dram_blocks=0)).cached_tokens == 0


def test_a_request_that_arrives_while_others_decode_waits_for_the_step_only() -> None:
    requests = [request("a", 0.0, 1000, output=1000), request("b", 5.0, 100)]
    outcome = run(Recorded(requests, BLOCK))
    assert outcome.ttft_s[0] < step_s(prefill=100) + 2 * step_s(running=1, kv_tokens=2000)


def test_requests_wait_for_memory_and_those_too_long_are_refused() -> None:
    spec = EngineSpec(gpu_blocks=20)
    requests = [request("a", 0.0, 9000, output=500), request("b", 0.1, 9000, output=500)]
    outcome = run(Recorded(requests, BLOCK), spec)
    assert outcome.ttft_s[1] > outcome.e2e_s[0] - 0.1, "it starts when the first has ended"
    huge = run(Recorded([*requests, request("c", 0.2, 20 * BLOCK + 1)], BLOCK), spec)
    assert (huge.num_refused, len(huge.ttft_s)) == (1, 2)


def test_many_steps_at_once_take_as_long_as_one_by_one() -> None:
    long = request("a", 0.0, 1000, output=40)
    ends = [step_s(prefill=1000)]
    for i in range(39):
        ends.append(ends[-1] + step_s(running=1, kv_tokens=1001 + i))
    assert run(Recorded([long], BLOCK)).e2e_s == [pytest.approx(ends[-1])]
    # A request that comes in the middle of a step is computed in the next one.
    arrival_s = (ends[10] + ends[11]) / 2
    outcome = run(Recorded([long, request("b", arrival_s, 100)], BLOCK))
    own = step_s(prefill=100, running=1, kv_tokens=1001 + 11)
    assert outcome.ttft_s[0] == pytest.approx(ends[11] - arrival_s + own)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_a_seed_decides_everything(policy: str) -> None:
    first, second = (
        compare(Agents(AgentSpec(num_sessions=12, duration_s=40), seed=3), [policy],
                [EngineSpec(gpu_blocks=300, dram_blocks=600)] * 3, seed=3)
        for _ in range(2)
    )  # fmt: skip
    assert first == second
    assert first.num_requests[policy] >= 40


def test_all_policies_meet_the_same_requests() -> None:
    workload = tool_agents(300, seed=2)
    result = compare(workload, ["ours", "round_robin"], [SPEC] * 2)
    assert set(result.num_requests.values()) == {300}
    assert result.policies["ours"].hit_rate > result.policies["round_robin"].hit_rate


def test_sizes_are_in_blocks_of_512_tokens_whatever_the_trace_has() -> None:
    assert spec_for(EngineSpec(gpu_blocks=10, dram_blocks=1), 16).gpu_blocks == 320
    assert spec_for(SPEC, 512) == SPEC


# -- traces ----------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [1, 3]},
]


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_traces_are_read_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    trace = read_trace([write(tmp_path / name, MOONCAKE)], load=2.0)
    assert trace.block_tokens == 512
    assert [r.time_s for r in trace.requests] == [0.0, 1.0]
    assert [r.num_tokens for r in trace.requests] == [700, 1024]
    assert [list(r.keys) for r in trace.requests] == [[1, 2], [1, 3]]
    assert [r.output_tokens for r in trace.requests] == [5, 7]


def test_bailian_traces_have_seconds_small_blocks_and_sessions(tmp_path: Path) -> None:
    chat = {"type": "text", "turn": 1, "input_length": 30, "output_length": 9, "hash_ids": [1, 2]}
    lines = [
        {**chat, "chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5},
        {**chat, "chat_id": 8, "parent_chat_id": -1, "timestamp": 2.0},
        {**chat, "chat_id": 9, "parent_chat_id": 7, "timestamp": 3.5},
    ]
    trace = read_trace([write(tmp_path / "chat.jsonl", lines)])
    assert trace.block_tokens == 16
    assert [r.time_s for r in trace.requests] == [0.0, 0.5, 2.0]
    sessions = [r.session for r in trace.requests]
    assert sessions[0] == sessions[2] != sessions[1]


def test_our_own_traces_have_prompts_and_answers(tmp_path: Path) -> None:
    keys = bytes(range(24))
    matched = TaskMatched(
        time=2.0, task=1, kind=TaskKind.GET, engine="e", request="r", start=0, stop=3,
        num_tokens=50, keys=keys, found_start=0, num_blocks=0,
    )  # fmt: skip
    stored = TaskMatched(
        time=3.0, task=2, kind=TaskKind.PUT, engine="e", request="r", start=0, stop=4,
        num_tokens=64, base=1, base_blocks=3, keys=keys[:8], found_start=3, num_blocks=1,
    )  # fmt: skip
    import msgspec

    header = TraceHeader(block_bytes=4096, tokens_per_block=16)
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in (header, matched, stored)))
    trace = read_trace([path])
    assert trace.block_tokens == 16
    (only,) = trace.requests
    assert (only.num_tokens, only.output_tokens) == (50, 14)
    assert list(only.keys) == [keys[:8], keys[8:16], keys[16:]]


@pytest.mark.parametrize("line", ["{", '{"timestamp": -1, "hash_ids": []}', "[]", '{"a": 1}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=r"bad\.jsonl, line 2: "):
        read_trace([path])


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "ids.jsonl"])
def test_a_line_that_is_too_much_for_any_memory_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("gz"):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(40):
                file.write(bytes(16 << 20))
        expected = "line 1: more than 16 MiB"
    else:
        ids = ",".join(["1"] * 3_000_000)
        lines = [f'{{"timestamp": 0, "hash_ids": [{each}]}}\n' for each in ("1", ids)]
        path.write_text("".join(lines))
        expected = "line 2: .*hash_ids"
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=expected):
            list(read_requests(path))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_torn_archive_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "torn.jsonl.gz", MOONCAKE * 200)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="torn"):
        read_trace([path])


# -- the command -----------------------------------------------------------------------------------


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["router", "simulate", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_the_command_writes_figures(tmp_path: Path) -> None:
    trace, out = write(tmp_path / "t.jsonl", MOONCAKE), tmp_path / "out.json"
    status, text = invoke(trace, "--policy", "ours", "--policy", "lmetric", "--json", out)
    assert status == 0, text
    policies = json.loads(out.read_text())["policies"]
    assert list(policies) == ["ours", "lmetric"]
    assert set(policies["ours"]) == {
        "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "e2e_mean_s", "hit_rate",
    }  # fmt: skip
    assert policies["ours"]["hit_rate"] == pytest.approx(512 / 1724)


def test_a_bad_trace_exits_with_2_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\nnonsense\n")
    status, text = invoke(path)
    assert status == 2
    assert "bad.jsonl, line 2" in text
    assert invoke(tmp_path / "missing.jsonl")[0] == 2


def test_generated_requests_need_no_file() -> None:
    status, text = invoke("agents", "--requests", 20, "--engines", 2, "--policy", "ours")
    assert status == 0 and "ours" in text
    assert invoke("toolagent", "--requests", 20, "--policy", "least")[0] == 0


def test_an_unknown_policy_is_refused_with_the_names(tmp_path: Path) -> None:
    status, text = invoke(write(tmp_path / "t.jsonl", MOONCAKE), "--policy", "best")
    assert status == 1
    assert "round_robin" in text
