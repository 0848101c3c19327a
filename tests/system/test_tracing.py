"""A real cache is traced; the trace is replayed, drawn and shown as stories."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import get_of, put_of
from cluster import Cluster, running_cluster, until
from load import LoadEngine, make_kv, make_model
from test_shared import Member, serving
from typer.testing import CliRunner

from flexcache import CacheConfig
from flexcache.cache.block_keys import EngineBlockKeys, make_root
from flexcache.cache.plan import PlannerSettings
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.cli import app
from flexcache.config import ModelConfig
from flexcache.errors import ConfigError, TraceError
from flexcache.ids import OpKind, RequestInfo, TaskKind, TierName
from flexcache.protocol.endpoints import is_served, private_endpoint
from flexcache.replay.history import chrome_trace, histories, tell
from flexcache.replay.replay import ReplayReport, replay, replay_config
from flexcache.replay.traces import MooncakeTrace, RecordedTrace, read_requests
from flexcache.tracing.records import TaskMatched, TraceHeader

BLOCK = 16
LONG = 40


def replayed(
    trace: RecordedTrace | MooncakeTrace, speed: float = 0.0, **chosen: object
) -> ReplayReport:
    settings = {name: str(value) for name, value in chosen.items()}
    block_bytes = trace.header.block_bytes
    config = replay_config(trace.header, None, settings, block_bytes)
    return replay(trace, config, block_bytes, speed=speed)


@contextlib.contextmanager
def traced_cluster(tmp_path: Path, *, ssd: bool = True, **settings: object) -> Iterator[Cluster]:
    (tmp_path / "ssd").mkdir()
    with running_cluster(
        [tmp_path / "ssd"] if ssd else [], trace_dir=str(tmp_path / "trace"), **settings
    ) as cluster:
        yield cluster


def opened(tmp_path: Path) -> RecordedTrace:
    return RecordedTrace([tmp_path / "trace"])


def run_load(tmp_path: Path, steps: int, **settings: object) -> RecordedTrace:
    """Put, get, prefetch and cancel at any moment."""
    model = make_model(dp_size=1)
    kv = make_kv(model)

    def the_kv(_: ModelConfig, __: int) -> Any:
        return kv

    with traced_cluster(tmp_path, model=model, make_kv=the_kv, **settings) as cluster:
        load = LoadEngine(cluster.manager, kv, seed=1)
        for _ in range(steps):
            load.step()
        assert load.seen.wrong == []
        assert load.seen.hits > 0
    return opened(tmp_path)


def run_one_by_one(cluster: Cluster, steps: int) -> None:
    """As `run_load`, but nothing is still going on when the next call is made. With the evictions
    and writes of a random load it would depend on the disk's speed what is found where."""
    rng, manager = np.random.default_rng(1), cluster.manager
    for step in range(steps):
        family, count = rng.integers(12), int(rng.integers(1, 20))
        tokens = np.arange(count * BLOCK) + 1000 * family
        match rng.choice(["get", "put", "prefetch", "cancel", "later get"]):
            case "get":
                cluster.get(tokens, range(count))
            case "put":
                cluster.put(tokens, range(count))
            case "prefetch":
                manager.wait([manager.prefetch_async(tokens)], 60, completely=True)
            case "cancel":
                task, _ = manager.put_match(tokens, priority=-1, ttl_s=5.0)
                manager.cancel([task])
            case "later get":  # of which the engine has the first block
                wanted = np.arange(len(tokens)) >= BLOCK
                task, mask = manager.get_match(tokens, wanted, namespace="of its own")
                assert not mask.any()
        if step == steps // 2:
            manager.clear("CPU")


@pytest.mark.parametrize("speed", [0.0, 20.0])
def test_a_replay_reproduces_the_hits(
    tmp_path: Path, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What early loads may evict depends on how long DRAM has lately held them.
    monkeypatch.setattr("flexcache.cache.early_loads._Experience.hold_s", lambda *_: 0.0)
    with traced_cluster(
        tmp_path, num_cpu_blocks=60, num_ssd_blocks=150, eviction_policy="lru",
        skip_slow_loads=False,
    ) as cluster:  # fmt: skip
        run_one_by_one(cluster, 300)
    trace = opened(tmp_path)
    report = replayed(trace, speed)
    assert report.then is not None
    assert report.then.hit_blocks["CPU"] > 100 and report.then.hit_blocks["SSD"] > 100
    assert all(tier["evicted_blocks"] > 20 for tier in report.tiers.values())
    assert report.differences == []
    assert report.now.hit_blocks == report.then.hit_blocks
    assert report.now.dropped_blocks == report.then.dropped_blocks
    assert report.now.moved_bytes == report.then.moved_bytes
    assert report.now.calls == report.then.calls
    assert report.notes == []
    if speed:
        assert report.now.wall_s > report.then.wall_s / speed / 2


def test_a_random_load_is_replayed_to_its_end(tmp_path: Path) -> None:
    trace = run_load(tmp_path, 300, num_cpu_blocks=120, num_ssd_blocks=400)
    report = replayed(trace)
    assert report.then is not None
    assert report.now.calls == report.then.calls
    assert report.now.asked_blocks == report.then.asked_blocks


def test_a_larger_cache_finds_more_and_a_smaller_one_less(tmp_path: Path) -> None:
    trace = run_load(tmp_path, 200, ssd=False, num_cpu_blocks=150)
    hits = {size: replayed(trace, num_cpu_blocks=size).now.hit_blocks["CPU"] for size in (30, 2000)}
    then = replayed(trace).then
    assert then is not None
    assert hits[30] < then.hit_blocks["CPU"] < hits[2000]


def test_a_tier_can_be_removed_and_another_added(tmp_path: Path) -> None:
    trace = run_load(tmp_path, 60, num_cpu_blocks=60, num_ssd_blocks=300)
    alone = replayed(trace, num_ssd_blocks="none")
    assert set(alone.tiers) == {"CPU"}
    assert OpKind.H2DISK.value not in alone.now.moved_bytes
    (tmp_path / "kv").mkdir()
    own = replayed(trace, num_ssd_blocks=300, ssd_cache_dirs=tmp_path / "kv")
    assert own.tiers["SSD"]["written_bytes"] > 0
    assert list((tmp_path / "kv").iterdir()) == []  # it took a directory of its own


def test_blocks_that_had_not_landed_are_not_found_in_the_replay_either(tmp_path: Path) -> None:
    with traced_cluster(tmp_path, ssd=False) as cluster:
        manager, (client,) = cluster.manager, cluster.clients
        tokens = np.arange(6 * BLOCK)
        slots = cluster.slots(range(6))
        put, _ = manager.put_match(tokens)
        manager.launch([put], [slots], gated=True)
        early, mask = manager.get_match(tokens)
        assert not mask.any()
        client.open_gates([put])
        manager.wait([put])
        late, mask = manager.get_match(tokens)
        assert mask.all()
        manager.launch([late], [slots])
        manager.wait([late])
    report = replayed(opened(tmp_path))
    assert report.differences == []
    assert report.now.hit_blocks == {"CPU": 6}
    assert report.now.missed_blocks == 6
    assert early != late


def test_blocks_that_were_there_before_the_trace_are_named(tmp_path: Path) -> None:
    settings: dict[str, object] = {"num_cpu_blocks": 48, "num_ssd_blocks": 96}
    (tmp_path / "ssd").mkdir()
    tokens = np.arange(8 * BLOCK)
    with running_cluster([tmp_path / "ssd"], **settings) as cluster:
        cluster.put(tokens, range(8))
    trace_dir = tmp_path / "trace"
    with running_cluster([tmp_path / "ssd"], trace_dir=str(trace_dir), **settings) as cluster:
        assert cluster.get(tokens, range(8)).mask.all()
    report = replayed(opened(tmp_path))
    assert [(then.sources, now.sources) for then, now in report.differences] == [({"SSD": 8}, {})]
    assert any("8 in SSD" in note for note in report.notes)


def test_a_trace_of_other_blocks_is_refused(tmp_path: Path) -> None:
    with traced_cluster(tmp_path, ssd=False):
        pass
    header = opened(tmp_path).header
    with pytest.raises(ConfigError, match="16 tokens"):
        replay_config(header, None, {"tokens_per_block": "32"}, header.block_bytes)
    with pytest.raises(ConfigError, match="block_bytes = 100"):
        replay(opened(tmp_path), replay_config(header, None, {}, 4096), 100)


# -- what a trace looks like ---------------------------------------------------------------------


@pytest.fixture
def half_and_half(tmp_path: Path) -> RecordedTrace:
    """Get a prompt of which DRAM has one half and the SSD the other, in several chunks."""
    with traced_cluster(
        tmp_path, num_cpu_blocks=120, num_ssd_blocks=120, skip_slow_loads=False
    ) as cluster:
        manager, tokens = cluster.manager, np.arange(LONG * BLOCK)
        assert cluster.put(tokens, range(LONG)).mask.all()
        manager.clear("CPU")
        half = manager.prefetch_async(tokens[: LONG // 2 * BLOCK])
        manager.wait([half])
        info = RequestInfo(request_id="req-7")
        task, mask = manager.get_async(tokens, cluster.slots(range(LONG)), request_info=info)
        assert mask.all()
        assert manager.wait([task], 60)[task].mask.all()
    return opened(tmp_path)


def test_dram_copies_run_while_the_ssd_is_read(half_and_half: RecordedTrace) -> None:
    (get,) = (t for t in histories(half_and_half.records()).values() if t.kind is TaskKind.GET)
    reads = [op for op in get.ops if op.kind is OpKind.DISK2H]
    copies = [op for op in get.ops if op.kind is OpKind.H2D]
    assert len(reads) > 2
    begin, end = min(op.started for op in reads), max(op.time for op in reads)
    assert any(op.started < end and op.time > begin for op in copies)


def test_the_chrome_trace_is_complete(half_and_half: RecordedTrace) -> None:
    events = json.loads(json.dumps(chrome_trace(half_and_half)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in slices:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        for (_, stop), (start, _) in pairwise(row):
            assert start >= stop - 0.11  # times are rounded to a tenth
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(named) == set(rows)
    assert {"get", "put", "prefetch", "H2D", "D2H", "DISK2H", "H2DISK"} <= set(named.values())
    ops = [event for event in slices if event["pid"] == 2]
    assert len(ops) == sum(len(t.ops) for t in histories(half_and_half.records()).values())
    arrows = {phase: [e for e in events if e["ph"] == phase] for phase in "sf"}
    assert sorted(e["id"] for e in arrows["s"]) == sorted(e["args"]["op"] for e in ops)
    for event in arrows["s"] + arrows["f"]:  # an arrow begins and ends in a slice
        assert any(
            start - 0.11 <= event["ts"] <= stop + 0.11
            for start, stop in rows[event["pid"], event["tid"]]
        )
    reads = [event for event in ops if event["name"].startswith("DISK2H")]
    get_reads = [event for event in reads if event["args"].get("request") == "req-7"]
    copies = [event for event in ops if event["name"].startswith("H2D ")]
    assert any(
        read["ts"] < copy["ts"] + copy["dur"] and copy["ts"] < read["ts"] + read["dur"]
        for read in get_reads
        for copy in copies
    )
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert all(count >= 0 for args in counters for count in args.values())
    last = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert set(last) == {"ops of device", "ops of disk"}
    assert all(args == {"waiting": 0, "running": 0} for args in last.values())


def test_rows_of_a_chrome_trace_belong_to_one_kind_however_many_overlap(tmp_path: Path) -> None:
    lines = ['{"block_bytes": 1, "tokens_per_block": 1}']
    for task in range(1, 1200):
        kind = "put" if task % 100 == 0 else "get"
        for time, what in ((0, "launch"), (1, "cancel")):
            lines.append(json.dumps({"type": what, "time": time, "task": task, "kind": kind}))
    (tmp_path / "many.jsonl").write_text("\n".join(lines) + "\n")
    events = chrome_trace(RecordedTrace([tmp_path]))["traceEvents"]
    rows = [event["tid"] for event in events if event["ph"] == "X"]
    named = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(set(rows)) == 1199
    assert sorted(rows) == sorted(named)


def test_a_requests_story_is_in_order(half_and_half: RecordedTrace) -> None:
    chapters = tell(half_and_half, "req-7")
    texts = [chapter.text for chapter in chapters]
    assert texts[0].startswith(f"get of blocks 0 to {LONG} ({LONG * BLOCK} tokens, engine dp0)")
    assert texts[0].endswith(f"{LONG} blocks found: {LONG // 2} CPU, {LONG // 2} SSD")
    assert texts[1] == "launched"
    assert texts[-1] == f"ended: success, {LONG} blocks arrived"
    assert sum(text.startswith("DISK2H of blocks") for text in texts) > 2
    assert [c.after_s for c in chapters] == sorted(c.after_s for c in chapters)
    assert chapters[0].after_s == 0
    by_task = tell(half_and_half, str(chapters[0].task))
    assert by_task == chapters
    assert tell(half_and_half, "req") == chapters  # as vLLM prolongs an id
    assert tell(half_and_half, "req-8") == []
    assert json.loads(json.dumps([c.report() for c in chapters]))[0]["sources"] == {
        "CPU": LONG // 2,
        "SSD": LONG // 2,
    }


def test_the_commands_show_the_trace(half_and_half: RecordedTrace, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return done.output

    run("trace", "chrome", trace, str(tmp_path / "chrome.json"))
    assert json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert "ended: success" in run("trace", "story", trace, "req-7")
    assert json.loads(run("trace", "story", trace, "req-7", "--json"))[0]["type"] == "match"
    files = [str(path) for path in sorted((tmp_path / "trace").iterdir())]
    assert "ended: success" in run("trace", "story", *files, *files, "req-7")
    shown = run(
        "replay", trace, "--json", str(tmp_path / "report.json"), "--block-bytes", "4096",
        "--trace-dir", str(tmp_path / "again"),
    )  # fmt: skip
    assert "hits in SSD" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["differing_gets"] == 0
    assert report["trace"]["hit_blocks"] == report["replay"]["hit_blocks"]
    assert RecordedTrace([tmp_path / "again"]).header.block_bytes == 4096
    for wrong in (
        ["replay", trace, "--set", "num_cpu_block=3"],
        ["replay", trace, "--set", "num_cpu_blocks"],
        ["replay", str(tmp_path / "nothing")],
        ["replay", trace, "--trace-dir", "/proc/nothing"],
        ["replay", trace, "--set", "ssd_cache_dirs=/proc/nothing"],
        ["trace", "story", trace, "req-9"],
        ["trace", "chrome", *files, *files],
    ):
        done = CliRunner().invoke(app, wrong)
        assert done.exit_code == 1
        assert "error" in done.output and "Traceback" not in done.output


def test_a_traces_settings_decide_what_is_kept_and_nothing_else(tmp_path: Path) -> None:
    header = TraceHeader(
        block_bytes=1024, tokens_per_block=BLOCK, capacities={"CPU": 8},
        settings={"eviction_policy": "lru", "remote_url": f"file://{tmp_path}", "of_later": 1},
    )  # fmt: skip
    config = replay_config(header, None, {}, 1024)
    assert (config.eviction_policy, config.remote_url) == ("lru", None)


def test_a_put_of_the_lowest_priority_is_replayed(tmp_path: Path) -> None:
    with traced_cluster(tmp_path, ssd=False) as cluster:
        cluster.manager.put_match(range(64), priority=-1000)
    report = replayed(opened(tmp_path))
    assert report.now.calls["put"] == 1


@pytest.mark.parametrize("number", [-1, 2**64])
def test_an_id_that_is_not_a_hash_is_not_a_mooncake_trace(tmp_path: Path, number: int) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [number]}))
    with pytest.raises(TraceError, match="line 1"):
        list(read_requests(path))


@pytest.mark.parametrize(
    "torn", ['{"timestamp": 3, "hash_', '{"timestamp": 3, "hash_ids": [1]', ""]
)
def test_a_torn_last_line_of_a_mooncake_trace_is_ignored(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [json.dumps({"timestamp": number, "hash_ids": [number]}) for number in range(2)]
    path.write_text("\n".join([*lines, torn]))
    assert [request.timestamp for request in read_requests(path)] == [0, 1]
    path.write_text("\n".join(lines))  # whole, though it has no end of line
    assert [request.timestamp for request in read_requests(path)] == [0, 1]
    path.write_text("\n".join([*lines, torn, lines[0]]))
    with pytest.raises(TraceError, match="line 3"):
        list(read_requests(path))


HEADER = {"block_bytes": 256, "tokens_per_block": BLOCK, "capacities": {"CPU": 8}}
MATCH = {
    "type": "match", "time": 0.0, "task": 1, "kind": "get", "start": 0, "stop": 1,
    "num_tokens": BLOCK, "keys": "AAAAAAAAAAE=", "found_start": 0, "num_blocks": 0,
}  # fmt: skip


def replayed_by_command(path: Path, *lines: dict[str, object], speed: int = 0) -> tuple[int, str]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(app, ["replay", str(path), "--speed", str(speed)])
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"capacities": {"CPU": 10**9}}, "1,000,000,000 blocks of 256 bytes in DRAM"),
        ({"capacities": {"CPU": 8, "SSD": 10**9}}, "1,000,000,000 on SSD"),
        ({"capacities": {"CPU": 10**30}}, "capacities"),
        ({"capacities": {"CPU": -1}}, "capacities"),
        ({"block_bytes": 10**12}, "blocks of 1,000,000,000,000 bytes"),
        ({"tokens_per_block": 10**12, "block_bytes": 10**12}, "tokens_per_block"),
    ],
)
def test_sizes_that_a_trace_claims_are_refused_by_name_if_they_do_not_fit(
    tmp_path: Path, header: dict[str, object], named: str
) -> None:
    code, output = replayed_by_command(tmp_path / "t.jsonl", {**HEADER, **header}, MATCH)
    assert code == 1
    assert named in output


@pytest.mark.parametrize(
    ("match", "named"),
    [
        ({"stop": 10**9}, "8 key bytes"),
        ({"stop": 10**30}, "stop"),
        ({"time": 1e300}, "time"),
        ({"prefill_blocks_per_s": -1.0}, "prefill_blocks_per_s"),
        ({"kind": "post"}, "kind"),
    ],
)
def test_a_line_that_claims_the_impossible_is_refused_by_name(
    tmp_path: Path, match: dict[str, object], named: str
) -> None:
    lines = (HEADER, MATCH, {**MATCH, "task": 2, **match})
    code, output = replayed_by_command(tmp_path / "t.jsonl", *lines, speed=1)
    assert code == 1
    assert named in output and "line 3" in output


def test_a_prompt_with_fewer_keys_than_tokens_takes_no_memory_for_the_rest(
    tmp_path: Path,
) -> None:
    match = {**MATCH, "num_tokens": 10**12, "retain_s": 1e300}
    code, output = replayed_by_command(tmp_path / "t.jsonl", HEADER, match)
    assert code == 0, output


def test_engines_at_a_server_are_traced_by_the_server(tmp_path: Path) -> None:
    """Their prompts come through memory that the next call writes over."""
    endpoint, directory = private_endpoint("traced"), tmp_path / "trace"
    with serving(
        "--endpoint", endpoint, FLEXCACHE_NUM_CPU_BLOCKS="64", FLEXCACHE_TRACE_DIR=str(directory)
    ):
        until(lambda: is_served(endpoint))
        engines = [Member(CacheConfig(endpoint=endpoint), engine_id=name) for name in ("a", "b")]
        for engine in engines:
            engine.manager.wait_ready(60)
        for prompt in range(8):
            engines[prompt % 2].load.put(prompt, 12)
            assert engines[1 - prompt % 2].load.get(prompt, 12) == 12
        assert [engine.load.seen.wrong for engine in engines] == [[], []]
        for engine in engines:
            engine.close()
    trace = RecordedTrace([directory])
    matches = [record for record in trace.records() if isinstance(record, TaskMatched)]
    assert {match.engine for match in matches} == {"a/dp0", "b/dp0"}
    report = replayed(trace)
    assert report.differences == []
    assert report.now.hit_blocks == {"CPU": 8 * 12}


def test_a_trace_in_mooncakes_format_is_replayed(tmp_path: Path) -> None:
    rng, path, capacity = np.random.default_rng(3), tmp_path / "requests.jsonl", 60
    lines, numbers = [], iter(range(10_000))
    chats: list[list[int]] = [[] for _ in range(12)]
    for step in range(200):
        chat = chats[rng.integers(len(chats))]
        chat += [next(numbers) for _ in range(rng.integers(1, 4))]
        lines.append(json.dumps({"timestamp": step * 100, "input_length": 1, "hash_ids": chat}))
        if len(chat) > 15:
            chat.clear()
    path.write_text("\n".join(lines) + "\n")

    tier = Tier(TierName.CPU, capacity)
    settings = PlannerSettings(chunk_blocks=1000, max_store_backlog=capacity)
    cache, root, expected = TieredCache(Tiers([tier]), settings), make_root("m", (), "k"), 0
    for request in read_requests(path):
        keys = [number.to_bytes(8, "big") for number in request.hash_ids]
        prompt = EngineBlockKeys(root, keys, len(keys))
        cache.tiers.advance(request.time_s)
        get = cache.loads.plan_get(get_of(prompt))
        expected += get.num_blocks
        cache.finish(get)
        put = cache.stores.plan_put(put_of(prompt))
        cache.publish_staging(put, put.num_blocks)
        cache.finish(put)
    report = replayed(MooncakeTrace(path), num_cpu_blocks=capacity, eviction_policy="lru")
    assert report.then is None
    assert 0 < expected < report.now.asked_blocks
    assert report.now.hit_blocks == {"CPU": expected}
    with pytest.raises(ConfigError, match="no tier to cache in"):
        replayed(MooncakeTrace(path))
