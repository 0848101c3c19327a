"""A real engine's run is traced and replayed: every look-up finds the same blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import MODELS
from test_processes import assert_exact, run

from flexcache.ids import OpKind, TaskKind
from flexcache.replay.history import chrome_trace, histories, tell
from flexcache.replay.replay import replay, replay_config
from flexcache.replay.traces import RecordedTrace
from flexcache.tracing.records import TaskMatched

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("together", [False, True])
def test_a_replay_of_an_engines_run_reproduces_its_hits(tmp_path: Path, together: bool) -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")
    prompts = [700, 900, 800, 65, 64, 63]
    options: dict[str, Any] = {
        "model": "tiny",
        "prompts": prompts,
        # One by one, the first prompts must come back from SSD. Together, what is evicted depends
        # on what is being written.
        "cpu_blocks": 256 if together else 64,
        "together": together,
        "settle": True,  # a look-up amid the SSD writes need not find the same in a replay
        "extra": {
            "trace_dir": str(tmp_path / "trace"),
            "eviction_policy": "lru",
            "skip_slow_loads": False,
            "transfer_chunk_mb": 0.3,
        },
    }
    seen = run(options)
    trace = RecordedTrace([tmp_path / "trace"])

    config = replay_config(trace.header, None, {}, trace.header.block_bytes)
    report = replay(trace, config, trace.header.block_bytes)
    assert report.then is not None
    assert report.differences == []
    assert report.now.hit_blocks == report.then.hit_blocks
    assert report.then.hit_blocks["CPU"] > 0
    assert report.then.hit_blocks.total() * 32 >= sum(seen["cached"])
    gets = [r for r in trace.records() if isinstance(r, TaskMatched) and r.kind is TaskKind.GET]
    assert len({get.request for get in gets}) >= 2 * len(prompts)
    if together:
        return

    assert_exact(seen, 1, [672, 896, 800, 64, 64, 32])
    assert report.then.hit_blocks["SSD"] > 0
    loaded = next(get for get in gets if get.sources.get("SSD", 0) > 8)
    story = [chapter.text for chapter in tell(trace, loaded.request)]
    assert story[0].startswith("get of blocks 0 to")
    assert "launched, to wait for the engine's step" in story
    assert any(text.startswith("DISK2H") for text in story)
    assert any(text.startswith("ended: success") for text in story)

    ops = [op for task in histories(trace.records()).values() for op in task.ops]
    assert any(
        read.started < copy.time and copy.started < read.time
        for read in ops
        for copy in ops
        if read.kind is OpKind.DISK2H and copy.kind in (OpKind.H2D, OpKind.D2H)
    )
    assert any(e["name"].startswith("DISK2H") for e in chrome_trace(trace)["traceEvents"])
