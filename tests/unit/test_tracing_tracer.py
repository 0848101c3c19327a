"""The content of a trace, rotation of files, and a full queue or disk."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from task_builders import ENGINE, ROOT, World, keys_of

from flexcache import CacheConfig
from flexcache.cache.block_keys import (
    BlockKeys,
    EngineBlockKeys,
    PackedBlockKeys,
    PromptContent,
    TokenBlockKeys,
)
from flexcache.cache.prompt import Prompt
from flexcache.errors import TraceError
from flexcache.ids import KVStatus, OpKind, RequestInfo, SessionId, TaskKind, TierName
from flexcache.replay.history import TaskHistory, histories
from flexcache.replay.traces import RecordedTrace
from flexcache.tracing import tracer as tracer_module
from flexcache.tracing.records import (
    KEY_BYTES,
    ClearedTier,
    OpEnded,
    SessionBegan,
    SessionEnded,
    TaskMatched,
    TraceHeader,
)
from flexcache.tracing.tracer import RotatingFiles, Tracer

HEADER = TraceHeader(
    version="1", block_bytes=4096, tokens_per_block=16, capacities={"CPU": 6}, pid=1
)
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
TOKENS = np.arange(8 * 16, dtype=np.int64)


def make_tracer(directory: Path, **settings: object) -> Tracer:
    config = CacheConfig(num_cpu_blocks=1, trace_dir=str(directory), **settings)  # type: ignore[arg-type]
    return Tracer(config, HEADER)


def traced_world(directory: Path, **options: object) -> tuple[World, Tracer]:
    world = World(**options)  # type: ignore[arg-type]
    world.engine.accounts.recorder = tracer = make_tracer(directory)
    return world, tracer


def read(directory: Path) -> dict[int, TaskHistory]:
    return histories(RecordedTrace([directory]).records(with_keys=True))


def test_a_put_and_a_get_are_recorded_with_all_their_ops(tmp_path: Path) -> None:
    world, tracer = traced_world(tmp_path)
    stored = world.put("abcd", retain_s=7.0)
    world.finish_all()
    world.clear(TierName.CPU)
    loaded = world.get("abcde")
    world.finish_all()
    nothing = world.get("xyz")
    tracer.close()
    tasks = read(tmp_path)

    put = tasks[stored]
    assert put.match is not None and put.launch is not None and put.end is not None
    assert (put.match.kind, put.match.engine) == (TaskKind.PUT, ENGINE)
    assert (put.match.start, put.match.stop, put.match.num_tokens) == (0, 4, 64)
    assert (put.match.found_start, put.match.num_blocks, put.match.retain_s) == (0, 4, 7.0)
    assert put.match.root == ROOT[:8].hex()
    assert (put.end.status, put.end.num_ok) == (KVStatus.SUCCESS, 4)
    copied = {op.op: op for op in put.ops if op.kind is OpKind.D2H}
    written = [op for op in put.ops if op.kind is OpKind.H2DISK]
    assert [(op.first, op.blocks, op.num_ok) for op in copied.values()] == [(0, 2, 2), (2, 2, 2)]
    assert [copied[op.after[0]].first for op in written] == [0, 2]
    assert all(op.started >= copied[op.after[0]].time for op in written)

    get = tasks[loaded]
    assert get.match is not None and get.end is not None
    assert get.match.sources == {"SSD": 4}
    assert get.match.stop - get.match.found_start - get.match.num_blocks == 1
    assert sorted(op.kind for op in get.ops) == [OpKind.DISK2H] * 2 + [OpKind.H2D] * 2
    assert get.latency_s is not None and get.latency_s > 0

    missed = tasks[nothing]
    assert missed.match is not None and missed.end is not None
    assert missed.end.status is KVStatus.NOT_FOUND
    assert missed.launch is None and missed.ops == []


def test_the_error_of_one_rank_is_recorded_whatever_the_others_report(tmp_path: Path) -> None:
    world, tracer = traced_world(tmp_path, load_ranks=(0, 1), store_ranks=(0, 1))
    stored = world.put("ab")
    first, second = world.ops(OpKind.D2H)
    world.finish(first, 0, error="out of memory")
    world.finish(second)
    world.finish_all()
    tracer.close()
    (copied,) = read(tmp_path)[stored].ops
    assert (copied.num_ok, copied.error) == (0, "out of memory")


def test_failures_and_cancels_are_recorded(tmp_path: Path) -> None:
    world, tracer = traced_world(tmp_path)
    world.put("abcd")
    world.finish_all()
    world.clear(TierName.CPU)
    world.rot("abcd")
    lost = world.get("abcd")
    world.finish_all()
    cancelled = world.match(TaskKind.PUT, "xyz")
    world.cancel(cancelled)
    tracer.close()
    tasks = read(tmp_path)
    failed = [op for op in tasks[lost].ops if op.num_ok < op.blocks]
    assert [(op.kind, op.num_ok) for op in failed[:1]] == [(OpKind.DISK2H, 1)]
    assert failed[0].error
    end = tasks[cancelled].end
    assert tasks[cancelled].cancel is not None
    assert end is not None and end.status is KVStatus.CANCELLED


def test_writes_that_the_cache_starts_itself_are_recorded(tmp_path: Path) -> None:
    world, tracer = traced_world(tmp_path, cpu=20, policy="write_back")
    world.put("abcd")
    world.finish_all()
    tracer.close()
    stores = [task for task in read(tmp_path).values() if task.kind is TaskKind.STORE]
    assert stores
    assert all(op.kind is OpKind.H2DISK for task in stores for op in task.ops)
    assert all(task.launch is not None and task.end is not None for task in stores)


def test_sessions_and_clears_are_recorded(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    tracer.session_began(SessionId(5), "engine-5")
    tracer.cleared("CPU", 12)
    tracer.cleared(None, 0)
    tracer.session_ended(SessionId(5))
    tracer.close()
    began, first, second, ended = RecordedTrace([tmp_path]).records()
    assert isinstance(began, SessionBegan) and (began.session, began.engine) == (5, "engine-5")
    assert isinstance(first, ClearedTier) and (first.tier, first.num_blocks) == ("CPU", 12)
    assert isinstance(second, ClearedTier) and (second.tier, second.num_blocks) == (None, 0)
    assert isinstance(ended, SessionEnded) and ended.session == 5
    assert began.time <= first.time <= second.time <= ended.time


def engine_keys() -> EngineBlockKeys:
    return EngineBlockKeys(ROOT, list(KEYS), 8, PromptContent((), RequestInfo("req-1")))


def engine_prompt() -> Prompt:
    return Prompt(TaskKind.GET, engine_keys(), 0, 8, 128)


@pytest.mark.parametrize("kind", ["engine", "packed", "tokens"])
def test_a_prompts_keys_are_recorded_as_of_the_call(tmp_path: Path, kind: str) -> None:
    memory = bytearray(b"".join(KEYS) if kind == "packed" else TOKENS.tobytes())
    makers: dict[str, BlockKeys] = {
        "engine": engine_keys(),
        "packed": PackedBlockKeys(ROOT, memoryview(memory), 16),
        "tokens": TokenBlockKeys(ROOT, np.frombuffer(memory, dtype=np.int64), 16),
    }
    keys = makers[kind]
    expected = keys.slice(0, 5)
    world, tracer = traced_world(tmp_path)
    task_id = world.ids.next()
    world.engine.match(task_id, Prompt(TaskKind.GET, keys, 0, 5, 80), world.now)
    memory[:] = bytes(len(memory))
    tracer.close()
    match = read(tmp_path)[task_id].match
    assert match is not None
    assert match.keys == b"".join(key[-KEY_BYTES:] for key in expected)
    assert match.request == ("req-1" if kind == "engine" else "")


def test_keys_of_several_sizes_are_recorded_too(tmp_path: Path) -> None:
    world, tracer = traced_world(tmp_path)
    task_id = world.get("abc")  # a key here is the prompt up to its block
    tracer.close()
    match = read(tmp_path)[task_id].match
    assert match is not None
    assert match.keys == b"".join(k.rjust(KEY_BYTES, b"\0") for k in keys_of("abc").slice(0, 3))


def test_the_oldest_files_are_removed_and_the_others_read_in_order(tmp_path: Path) -> None:
    config = CacheConfig(num_cpu_blocks=1, trace_dir=str(tmp_path), trace_file_mb=0.002)
    tracer = Tracer(config, HEADER, max_files=3)
    for number in range(500):
        tracer.cleared("CPU", number)
    tracer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    headers = [json.loads(file.read_bytes().splitlines()[0]) for file in files]
    assert [header["file"] for header in headers] == list(
        range(headers[0]["file"], headers[0]["file"] + 3)
    )
    assert headers[0]["file"] > 1
    trace = RecordedTrace(files[::-1])
    assert trace.header.file == headers[0]["file"]
    numbers = [r.num_blocks for r in trace.records() if isinstance(r, ClearedTier)]
    assert numbers == list(range(numbers[0], 500))
    assert all(2000 <= file.stat().st_size < 2300 for file in files[:-1])
    stats = tracer.stats()
    assert (stats["lines"], stats["dropped_lines"]) == (500, 0)
    assert stats["file"] == str(files[-1])
    assert stats["bytes"] > sum(file.stat().st_size for file in files)


def test_a_file_can_be_read_without_those_before_it(tmp_path: Path) -> None:
    config = CacheConfig(num_cpu_blocks=1, trace_dir=str(tmp_path), trace_file_mb=0.002)
    world = World()
    world.engine.accounts.recorder = tracer = Tracer(config, HEADER)
    task_ids = []
    for _ in range(40):  # of one prompt, that every line but the first refers to
        task_ids.append(world.ids.next())
        world.engine.match(task_ids[-1], engine_prompt(), world.now)
    tracer.close()
    last = RecordedTrace([max(tmp_path.iterdir())])
    assert last.header.file > 1
    matches = [r for r in last.records(with_keys=True) if isinstance(r, TaskMatched)]
    assert matches[-1].task == task_ids[-1]
    assert {match.keys for match in matches} == {b"".join(key[-KEY_BYTES:] for key in KEYS)}


def test_a_full_queue_drops_what_comes_and_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "_WRITE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(tracer_module, "_MAX_QUEUED", 10)
    tracer = make_tracer(tmp_path)
    for number in range(25):
        tracer.cleared("CPU", number)
    tracer.close()
    assert (tracer.stats()["lines"], tracer.stats()["dropped_lines"]) == (10, 15)
    records = RecordedTrace([tmp_path]).records()
    assert [r.num_blocks for r in records if isinstance(r, ClearedTier)] == list(range(10))


def test_prompts_that_wait_to_be_written_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "_WRITE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(tracer_module, "_MAX_QUEUED_BYTES", 300)
    world, tracer = traced_world(tmp_path)
    for _ in range(5):  # 128 bytes each
        world.engine.match(world.ids.next(), engine_prompt(), world.now)
    tracer.close()
    records = list(RecordedTrace([tmp_path]).records())
    assert sum(isinstance(record, TaskMatched) for record in records) == 3
    assert tracer.stats()["dropped_lines"] == 2


def test_prompts_dropped_by_a_full_queue_do_not_count_towards_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "_WRITE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(tracer_module, "_MAX_QUEUED", 0)
    monkeypatch.setattr(tracer_module, "_MAX_QUEUED_BYTES", 300)
    world, tracer = traced_world(tmp_path)

    def match() -> None:  # 128 bytes
        world.engine.match(world.ids.next(), engine_prompt(), world.now)

    for _ in range(5):
        match()
    monkeypatch.setattr(tracer_module, "_MAX_QUEUED", 100)
    match()
    tracer.close()
    assert sum(isinstance(r, TaskMatched) for r in RecordedTrace([tmp_path]).records()) == 1


_FILLS_THE_DISK = """
import logging, resource, sys
from pathlib import Path
from flexcache import CacheConfig
from flexcache.tracing import tracer as tracing
from flexcache.tracing.records import TraceHeader
tracing._WRITE_INTERVAL_S = 2.0
logging.basicConfig(format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
tracer = tracing.Tracer(
    CacheConfig(num_cpu_blocks=1, trace_dir=sys.argv[1]),
    TraceHeader(block_bytes=1, tokens_per_block=1),
)
for number in range(1000):
    tracer.cleared("CPU", number)
tracer._thread.join(60)
tracer.cleared("CPU", 0)
tracer.close()
stats = tracer.stats()
print(stats["lines"], stats["dropped_lines"] > 0, stats["bytes"])
"""


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FILLS_THE_DISK, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert run.stdout.split() == ["0", "True", "5000"]
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1
    assert "File too large" in errors[0]
    records = list(RecordedTrace([tmp_path]).records())  # but for the line that was torn
    assert [r.num_blocks for r in records if isinstance(r, ClearedTier)] == list(
        range(len(records))
    )
    assert len(records) > 10


def test_a_directory_that_cannot_be_created_costs_only_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = make_tracer(tmp_path / "later")
    tracer.close()  # so that it is there
    (tmp_path / "file").write_text("")
    config = CacheConfig(num_cpu_blocks=1, trace_dir=str(tmp_path))
    object.__setattr__(config, "trace_dir", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.ERROR):
        tracer = Tracer(config, HEADER)
        tracer.close()
    tracer.cleared("CPU", 1)
    assert tracer.stats()["dropped_lines"] == 1
    assert len(caplog.records) == 1


def test_a_torn_last_line_is_not_an_error(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    for number in range(3):
        tracer.cleared("CPU", number)
    tracer.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert len(list(RecordedTrace([file]).records())) == 2


def test_a_file_that_is_not_a_trace_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match=r"other\.jsonl is not a trace"):
        RecordedTrace([other])
    newer = tmp_path / "newer.jsonl"
    newer.write_text('{"format": 99, "block_bytes": 1, "tokens_per_block": 1}\n')
    with pytest.raises(TraceError, match="format 99"):
        RecordedTrace([newer])
    with pytest.raises(TraceError, match="No such file"):
        RecordedTrace([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no trace in"):
        RecordedTrace([tmp_path / "empty"])
    newer.write_text('{"block_bytes": 1, "tokens_per_block": 1}\n{"type": "what"}\n')
    with pytest.raises(TraceError, match=r"newer\.jsonl, line 2"):
        list(RecordedTrace([newer]).records())


_MATCH = (
    '{"type": "match", "time": 0, "task": 1, "kind": "get", "start": 0, "stop": %s, '
    '"num_tokens": 16, "found_start": 0, "num_blocks": 0, "keys": "AAAAAAAAAAA="}\n'
)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "session", "time": 0, "session": 1, "engine": "\xff"}\n',
        b'{"type": ' + b"[" * 100_000 + b"\n",
        _MATCH.encode() % b"-1",
        _MATCH.encode() % b"1000000000",  # of which it has one key
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "trace.jsonl"
    header = b'{"block_bytes": 1, "tokens_per_block": 1}\n'
    file.write_bytes(header + _MATCH.encode() % b"1" + line)
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3"):
        list(RecordedTrace([file]).records(with_keys=True))


@pytest.mark.parametrize(
    "header",
    [
        b'{"block_bytes": 0, "tokens_per_block": 1}\n',
        b'{"block_bytes": 1, "tokens_per_block": 1, "version": "\xff"}\n',
        b'{"settings": ' + b"[" * 100_000 + b"\n",
    ],
)
def test_a_header_that_is_wrong_is_named(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(header)
    with pytest.raises(TraceError, match=r"trace\.jsonl is not a trace"):
        RecordedTrace([file])


def test_a_file_that_disappears_while_it_is_read_is_named(tmp_path: Path) -> None:
    make_tracer(tmp_path).close()
    trace = RecordedTrace([tmp_path])
    (file,) = tmp_path.iterdir()
    file.unlink()
    with pytest.raises(TraceError, match="No such file"):
        list(trace.records())


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path)
    tracer.cleared("CPU", 1)
    tracer.close()
    (file,) = tmp_path.iterdir()
    assert len(list(RecordedTrace([tmp_path, file]).records())) == 1


def test_two_traces_in_a_directory_are_not_mixed(tmp_path: Path) -> None:
    for pid in (1, 2):
        line = f'{{"block_bytes": 1, "tokens_per_block": 1, "pid": {pid}}}\n'
        (tmp_path / f"{pid}.jsonl").write_text(line)
    with pytest.raises(TraceError, match="2 traces"):
        RecordedTrace([tmp_path])


def test_an_op_that_waited_records_when_it_became_ready() -> None:
    def op(number: int, started: float, time: float, after: tuple[int, ...] = ()) -> OpEnded:
        return OpEnded(
            time=time, task=1, op=number, kind=OpKind.H2DISK, started=started, first=0, blocks=1,
            num_ok=1, after=after,
        )  # fmt: skip

    task = TaskHistory(1, ops=[op(1, 1.0, 2.0), op(2, 3.5, 4.0, (1,)), op(3, 3.0, 5.0, (9,))])
    assert task.ready_s() == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_disk_that_hangs_does_not_keep_the_end_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracer_module, "_CLOSE_PATIENCE_S", 0.2, raising=False)
    answers, hangs = threading.Event(), threading.Event()

    def write(_: RotatingFiles, __: bytes) -> None:
        hangs.set()
        answers.wait(60)

    monkeypatch.setattr(RotatingFiles, "write", write)
    tracer = make_tracer(tmp_path)
    try:
        assert hangs.wait(60)
        closing = threading.Thread(target=tracer.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        assert "trace_ended" in caplog.text and "the disk has not answered" in caplog.text
        tracer.session_began(SessionId(1), "late")
        assert tracer.stats()["dropped_lines"] == 1
    finally:
        answers.set()
