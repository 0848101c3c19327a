"""The catalog of metrics and its HTTP page, over invented statistics."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from flexcache.ids import OpKind
from flexcache.metrics.catalog import CATALOG, SECTIONS, describe_metrics
from flexcache.metrics.collector import Exposition
from flexcache.metrics.metric import MetricType
from flexcache.metrics.page import render
from flexcache.tasks.stats import from_plain

TIER = {
    "capacity": 10, "free": 5, "indexed": 3, "leased": 2, "hit_blocks": 7, "miss_blocks": 1,
    "stored_blocks": 4, "evicted_blocks": 1, "dropped_blocks": 0, "expired_blocks": 2,
    "read_bytes": 70, "written_bytes": 40, "available": 1, "write_limit_bytes_per_s": 1000,
    "writes_paused": 1, "refused_returns": 2,
    "quotas": {"*": {"quota": 4, "used": 5, "evicted": 6, "hit": 7, "missed": 8}},
}  # fmt: skip
OPS = {"ops": 2, "failed_ops": 1, "blocks": 3, "bytes": 300, "seconds": 0.5}
TIMES = {"bounds": [0.1, 1.0], "counts": [2, 3, 4], "sum": 12.5}
STATS: dict[str, Any] = {
    "version": "1.2",
    "uptime_s": 60.0,
    "endpoint": "ipc:///a/socket",
    "server_pid": 4,
    "fingerprint": "a model",
    "layout": "",
    "block_bytes": 100,
    "tokens_per_block": 16,
    "counters": {"rejected_malformed": 3, "disk_worker_deaths": 1},
    "tiers": {"CPU": TIER, "SSD": TIER, "REMOTE": TIER | {"available": 0}},
    "tasks": {"created": 1, "running": 2},
    "hit_blocks": {"CPU": 7},
    "missed_blocks": 5,
    "ended_tasks": {"get_success": 4},
    "dropped_blocks": {"host_tier_full": 6, "brand_new_reason": 1},
    "skipped_blocks": {},
    "hit_rate": {
        "1m": {"asked_blocks": 0, "hit_blocks": 0, "rate": 0.0},
        "1h": {"asked_blocks": 4, "hit_blocks": 1, "rate": 0.25},
    },
    "ops": {kind.value: OPS for kind in OpKind},
    "op_histograms": {kind.value: {"seconds": TIMES, "bytes": TIMES} for kind in OpKind},
    "task_histograms": {"get": TIMES},
    "queues": {"disk": {"waiting": 1, "running": 2}, "device": {"waiting": 0, "running": 3}},
    "unlaunched_tasks": 1,
    "open_lookups": 1,
    "store_backlog_blocks": 2,
    "retention_s": 60.0,
    "load_decisions": {"SSD": {"load": 9, "recompute": 1}},
    "sessions": {
        "known": 3, "over": 1, "returning": 2, "unknown": 1, "retired_blocks": 7, "kept_blocks": 8,
        "fetched_blocks": 4, "returned_sessions": 1,
    },
    "early_loads": {"open_blocks": 3, "early": 5, "late": 2, "wasted": 1},
    "load_cost": {"SSD": {"blocks_per_s": 50.0, "seconds_per_op": 0.01}},
    "remote": {
        "available": False,
        "breaker": {"state": "half_open", "openings": 2, "last_reason": "late"},
        "lookups": {"asked": 8, "late": 2},
    },
    "engines": {'an "engine"\n': {"pid": 1, "open_tasks": 2, "ranks": 1}},
    "workers": {"disk": 77},
    "worker_restarts": {"disk": 1, "remote": 0},
    "events": {
        "published_batches": 5, "dropped_batches": 1, "queued_batches": 2, "sequence": 8,
        "replayed_batches": 1, "snapshot_pages": 2, "bad_replay_requests": 1,
        "untaken_batches": 3, "lost_batches": 1,
    },
    "trace": {"lines": 9, "dropped_lines": 1, "bytes": 900, "file": "a.jsonl"},
}  # fmt: skip
NEW_SERVER = {"version": "1.2", "uptime_s": 0.1, "endpoint": "ipc:///a/socket", "server_pid": 4,
              "counters": {}, "workers": {}, "worker_restarts": {}, "tiers": {}, "tasks": {},
              "engines": {}}  # fmt: skip


def samples(stats: dict[str, Any]) -> dict[str, float]:
    """Return the samples as Prometheus reads them: name and labels to value."""
    text = Exposition(CATALOG, lambda: from_plain(stats)).render()[0].decode()
    return {
        sample.name + str(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_reads_the_statistics_once() -> None:
    reads = []
    exposition = Exposition(
        CATALOG,
        lambda: reads.append(1) or from_plain(STATS),  # type: ignore[func-returns-value]
    )
    assert not reads
    exposition.render()
    assert len(reads) == 1


def test_every_metric_has_a_sample_of_every_existing_statistic() -> None:
    empty = [metric.name for metric in CATALOG if not list(metric.read(from_plain(STATS)))]
    assert not empty
    for metric in CATALOG:
        assert {len(labels) for labels, _ in metric.read(from_plain(STATS))} == {len(metric.labels)}


def test_values_are_in_the_unit_that_the_name_says() -> None:
    found = samples(STATS)
    assert found["flexcache_tier_hit_blocks_total{'tier': 'SSD'}"] == 7
    assert found["flexcache_tier_hit_tokens_total{'tier': 'SSD'}"] == 7 * 16
    assert found["flexcache_tier_indexed_bytes{'tier': 'CPU'}"] == 3 * 100
    assert found["flexcache_missed_tokens_total{}"] == 5 * 16
    assert found["flexcache_load_bytes_per_second{'tier': 'SSD'}"] == 50 * 100
    assert "flexcache_tier_indexed_bytes{'tier': 'REMOTE'}" not in found


def test_histograms_are_cumulative_and_end_with_the_total() -> None:
    found = samples(STATS)
    name, label = "flexcache_task_duration_seconds", "'kind': 'get'"
    buckets = [found[f"{name}_bucket{{{label}, 'le': '{le}'}}"] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 5, 9]
    assert found[f"{name}_count{{{label}}}"] == 9
    assert found[f"{name}_sum{{{label}}}"] == 12.5


def test_exactly_one_state_is_set() -> None:
    found = samples(STATS)
    states = [found[f"flexcache_breaker_state{{'state': '{s}'}}"]
              for s in ("closed", "half_open", "open")]  # fmt: skip
    assert states == [0, 1, 0]
    available = [found[f"flexcache_tier_available{{'tier': '{t}'}}"] for t in STATS["tiers"]]
    assert available == [1, 1, 0]
    assert found["flexcache_worker_up{'worker': 'disk'}"] == 1
    assert found["flexcache_worker_up{'worker': 'remote'}"] == 0


def test_counters_by_reason_exist_before_their_first_event() -> None:
    found = samples(STATS)
    assert found["flexcache_dropped_blocks_total{'reason': 'host_tier_full'}"] == 6
    assert found["flexcache_dropped_blocks_total{'reason': 'ssd_write_failed'}"] == 0
    assert found["flexcache_dropped_blocks_total{'reason': 'brand_new_reason'}"] == 1
    assert found["flexcache_rejected_messages_total{'reason': 'malformed'}"] == 3
    assert found["flexcache_rejected_messages_total{'reason': 'oversized'}"] == 0
    assert found["flexcache_failed_messages_total{}"] == 0
    assert found["flexcache_ended_tasks_total{'kind': 'put', 'status': 'failed'}"] == 0


def test_a_window_in_which_nothing_was_asked_for_has_no_ratio() -> None:
    found = samples(STATS)
    assert found["flexcache_hit_ratio{'window': '1h'}"] == 0.25
    assert "flexcache_hit_ratio{'window': '1m'}" not in found


def test_a_server_without_a_model_yet_has_metrics() -> None:
    found = samples(NEW_SERVER)
    assert found["flexcache_build_info{'version': '1.2'}"] == 1
    assert found["flexcache_engines{}"] == 0
    assert not [name for name in found if name.startswith(("flexcache_tier", "flexcache_remote"))]


def test_any_engine_name_is_escaped() -> None:
    assert samples(STATS)["flexcache_engine_ranks" + str({"engine": 'an "engine"\n'})] == 1


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in CATALOG]
    assert len(set(names)) == len(names)
    for metric in CATALOG:
        assert re.fullmatch("flexcache_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
        assert metric.help.endswith(".")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    text = Exposition(CATALOG, lambda: from_plain(STATS)).render()[0]
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_the_page_has_every_metric_once() -> None:
    page = render("Head", SECTIONS)
    for row in describe_metrics(SECTIONS):
        assert page.count(f"| `{row['name']}` | {row['type']} | {row['labels']} |") == 1
