"""Counters as statistics and as metrics: the walk, and a server's page over invented statistics."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Annotated, Any

import pytest

pytest.importorskip("prometheus_client")

from msgspec import field
from prometheus_client.parser import text_string_to_metric_families

from flexcache import counters
from flexcache.counters import (
    UNSERVED,
    By,
    Counters,
    Histogram,
    MetricType,
    counter,
    families,
    from_plain,
    gauge,
    histogram,
    plain,
)
from flexcache.ids import BreakerState, OpKind
from flexcache.metrics import Exposition
from flexcache.stats import (
    BreakerStats,
    CacheIdentity,
    CacheStats,
    ControlStats,
    EarlyLoadStats,
    EngineStats,
    EventStats,
    HitRateStats,
    LoanStats,
    LookUpStats,
    OpStats,
    QueueStats,
    QuotaStats,
    RemoteStats,
    ServerCounters,
    ServerStats,
    SessionStats,
    Stats,
    TierStats,
    TotalsStats,
    TraceStats,
)


class Part(Counters):
    TITLE = "Parts"

    ran: Annotated[int, counter("ran", "Runs.")] = 0
    lost: Annotated[int | None, counter("lost", "Losses.")] = None


class Tree(Counters):
    TITLE = "All"

    state: Annotated[BreakerState, gauge("state", "State.", "state")] = BreakerState.CLOSED
    name: Annotated[str, gauge("info", "Always 1.", "version")] = "1.2"
    is_up: Annotated[bool, gauge("up", "Whether it is up.")] = True
    good: Annotated[int, counter("ends", "Ends.", how="good")] = 0
    bad: Annotated[int, counter("ends", "", how="bad")] = 0
    why: Annotated[dict[str, int], counter("reasons", "Reasons.", "why", known=("a", "b"))] = {}
    held: Annotated[dict[str, dict[str, int]], gauge(
        "held", "Held.", "source", "tier", known=("gpu",)
    )] = {}  # fmt: skip
    pairs: Annotated[dict[str, int], counter(
        "pairs", "Pairs.", "kind", "status", known=("get_not_found",), is_joined=True
    )] = {}  # fmt: skip
    times: Annotated[Histogram, histogram("times", "Times.")] = field(
        default_factory=lambda: Histogram((1.0, 2.0))
    )
    parts: Annotated[dict[str, Part], By("part"), gauge("parts", "Number of parts.")] = {}
    twin: Part | None = None
    own: Annotated[Part, UNSERVED] = field(default_factory=Part)
    _since_s: float = 0.0


def rows(tree: Counters, name: str) -> dict[tuple[str, ...], Any]:
    return dict(counters.samples(tree)[f"flexcache_{name}"])


def test_each_kind_of_field_has_its_samples() -> None:
    tree = Tree(bad=2, why={"b": 3, "new": 1}, held={"s": {"disk": 4}}, pairs={"put_success": 5})
    assert rows(tree, "state") == {("closed",): 1, ("open",): 0, ("half_open",): 0}
    assert rows(tree, "info") == {("1.2",): 1}
    assert rows(tree, "up") == {(): True}
    assert rows(tree, "ends_total") == {("good",): 0, ("bad",): 2}
    assert rows(tree, "reasons_total") == {("a",): 0, ("b",): 3, ("new",): 1}
    assert rows(tree, "held") == {("s", "gpu"): 0, ("s", "disk"): 4}
    assert rows(tree, "pairs_total") == {("get", "not_found"): 0, ("put", "success"): 5}


def test_tables_of_records_give_their_metrics_a_label() -> None:
    tree = Tree(parts={"x": Part(ran=1), "y": Part(ran=2, lost=3)}, own=Part(ran=9))
    assert rows(tree, "ran_total") == {("x",): 1, ("y",): 2}
    assert rows(tree, "lost_total") == {("y",): 3}
    assert rows(tree, "parts") == {(): 2}


def test_metrics_are_described_once_with_all_their_labels() -> None:
    class Whole(Counters):
        tree: Tree
        parts: Annotated[dict[str, dict[str, Part]], By("of", "part")]

    with pytest.raises(TypeError, match=r"flexcache_ran_total is declared in two ways"):
        families(Whole)
    found = {each.name: each for each in families(Part)}
    assert found["flexcache_ran_total"] == (
        "Parts",
        "flexcache_ran_total",
        MetricType.COUNTER,
        (),
        "Runs.",
    )


def test_a_snapshot_is_independent_and_takes_what_is_looked_up() -> None:
    tree = Tree(parts={"x": Part()}, why={"a": 1})
    copy = tree.snapshot(good=7)
    tree.times.observe(1.5)
    tree.parts["x"].ran += 1
    tree.why["a"] += 1
    assert (copy.good, tree.good) == (7, 0)
    assert (copy.times.counts, copy.parts["x"].ran, copy.why) == ([0, 0, 0], 0, {"a": 1})
    assert (tree.times.counts, tree.times.sum) == ([0, 1, 0], 1.5)


def test_plain_figures_come_back_and_a_missing_one_is_refused() -> None:
    tree = Tree(parts={"x": Part(ran=1)}, state=BreakerState.OPEN)
    content = plain(tree)
    assert content["state"] == "open"
    assert content["parts"] == {"x": {"ran": 1}}
    assert "_since_s" not in content
    assert from_plain(Tree, content) == tree
    del content["parts"]["x"]["ran"]
    with pytest.raises(ValueError, match="Part without `ran`"):
        from_plain(Tree, content)


# -- a server's page -------------------------------------------------------------------------------

TIER = TierStats(
    capacity=10, free=5, indexed=3, leased=2, hit_blocks=7, available=1, writes_paused=1,
    refused_returns=2, quotas={"*": QuotaStats(quota=4, used=5, evicted=6, hit=7, missed=8)},
)  # fmt: skip
TIMES = Histogram((0.1, 1.0), [2, 3, 4], 12.5)
SERVER = ServerStats(
    version="1.2", uptime_s=60.0, endpoint="ipc:///a/socket", server_pid=4, workers={"disk": 77},
    worker_restarts={"disk": 1, "remote": 0}, worker_up={"disk": True, "remote": False},
    events=EventStats(
        published_batches=5, dropped_batches=1, queued_batches=2, replayed_batches=1,
    ),
    trace=TraceStats(lines=9, dropped_lines=1, bytes=900, file="a.jsonl"),
)  # fmt: skip
CACHE = CacheStats(
    identity=CacheIdentity(fingerprint="a model", layout="", block_bytes=100, tokens_per_block=16),
    totals=TotalsStats(
        missed_blocks=5,
        dropped_blocks={"host_tier_full": 6, "brand_new_reason": 1},
        ended_tasks={"get_success": 4},
        ops={kind.value: OpStats(ops=2, bytes=300) for kind in OpKind},
    ),
    hit_rate={"1m": HitRateStats(), "1h": HitRateStats(asked_blocks=4, hit_blocks=1, rate=0.25)},
    tiers={"CPU": TIER, "SSD": TIER, "PEER": TIER, "REMOTE": TIER.snapshot(available=0)},
    tasks={"created": 1, "running": 2},
    op_seconds={kind.value: TIMES for kind in OpKind},
    task_seconds={"get": TIMES},
    queues={"disk": QueueStats(waiting=1, running=2)},
    unlaunched_tasks=1,
    open_lookups=1,
    store_backlog_blocks=2,
    sessions=SessionStats(over=1, retired_blocks=7),
    early_loads=EarlyLoadStats(early=5),
    control=ControlStats(pins=1, deleted_blocks={"SSD": 2}),
    remote=RemoteStats(
        available=False,
        breaker=BreakerStats(state=BreakerState.HALF_OPEN, openings=2, last_reason="late"),
        lookups=LookUpStats(asked=8, late=2),
    ),
    peers=LoanStats(up=3, blocks=8, lent=5, expired=1, moved=4, taken=2),
)
STATS = Stats(
    server=SERVER,
    counters=ServerCounters(rejected_messages={"malformed": 3}),
    engines={'an "engine"\n': EngineStats(pid=1, open_tasks=2, ranks=1)},
    cache=CACHE,
    engine=TotalsStats(missed_blocks=1),
)
NEW_SERVER = Stats(
    server=SERVER.snapshot(events=None, trace=None), counters=ServerCounters(), engines={}
)


def samples(stats: Stats) -> dict[str, float]:
    """Return the samples as Prometheus reads them: name and labels to value."""
    text = Exposition(Stats, lambda: stats).render()[0].decode()
    return {
        sample.name + str(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_reads_the_statistics_once() -> None:
    reads = []
    exposition = Exposition(
        Stats,
        lambda: reads.append(1) or STATS,  # type: ignore[func-returns-value]
    )
    assert not reads
    exposition.render()
    assert len(reads) == 1


def test_every_metric_has_a_sample_of_every_existing_statistic() -> None:
    found = counters.samples(STATS)
    for metric in families(Stats):
        assert {len(labels) for labels, _ in found[metric.name]} == {len(metric.labels)}


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
    available = [found[f"flexcache_tier_available{{'tier': '{t}'}}"] for t in CACHE.tiers]
    assert available == [1, 1, 1, 0]
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
    assert not [name for name in found if name.startswith(("flexcache_tier", "flexcache_remote"))]


def test_any_engine_name_is_escaped() -> None:
    assert samples(STATS)["flexcache_engine_ranks" + str({"engine": 'an "engine"\n'})] == 1


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in families(Stats)]
    assert len(set(names)) == len(names)
    for metric in families(Stats):
        assert re.fullmatch("flexcache_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
        assert metric.help.endswith(".")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    text = Exposition(Stats, lambda: STATS).render()[0]
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
