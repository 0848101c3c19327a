"""The catalog of a router's metrics, over invented statistics."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from router_stats import CACHE_A, SHARED, SOURCE_A, SOURCE_B, A, B, make_stats, make_worker

from flexcache import counters
from flexcache.counters import MetricType, families, plain
from flexcache.router.stats import RouterStats
from flexcache.stats import Stats

UNSHOWN = {
    "workers.*.url", "workers.*.sources", "process.pid",
    "process.address", "process.uptime_s", "tokens.models.a-model chat",
    "tokens.reasons.a-model chat", "tokens.memo_bytes", "tokens.checks",
    "peers.*.last_batch_age_s", "peers.*.batches", "peers.*.gaps", "routing.expired_requests",
    "peers.*.requests", "caches.*.failure",
    "caches.*.circuit", "caches.*.running", "caches.*.tokens", "queue.capacity", "trouble",
    "sources.*.batches", "sources.*.snapshots", "sources.*.replayed_batches",
    "sources.*.lag_s", "sources.*.last_batch_age_s", "workers.*.is_approximate",
    "workers.*.health_failures",
    "index.events.stored", "index.events.removed", "index.events.cleared",
    "routing.service_time.is_learned",
    "routing.service_time.samples", "routing.service_time.base_s",
    "routing.service_time.token_s", "routing.service_time.attention_s",
    "routing.service_time.load_s.dram", "routing.service_time.load_s.disk",
}  # fmt: skip
"""Statistics for people and programs that are not metrics."""


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(stats: RouterStats) -> Samples:
    """Return the samples as Prometheus reads them, without the names' common prefix."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from flexcache.metrics import Exposition

    text = Exposition(RouterStats, lambda: stats).render()[0].decode()
    return {
        key(sample.name.removeprefix("flexcache_router_"), **sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every number, word and list in a tree of dictionaries."""
    if isinstance(tree, dict) and tree.keys() != {"bounds", "counts", "sum"}:
        for step, value in tree.items():
            yield from leaves(value, (*path, step))
    else:
        yield path


def changed(stats: RouterStats, path: Sequence[Any]) -> RouterStats:
    """Return the statistics with one leaf changed."""
    tree = part = plain(stats)
    for step in path[:-1]:
        part = part[step]
    was = part[path[-1]]
    if isinstance(was, bool):
        part[path[-1]] = not was
    elif isinstance(was, dict):  # a histogram
        part[path[-1]] = was | {"counts": [n + 1 for n in was["counts"]], "sum": was["sum"] + 1}
    elif isinstance(was, list):
        part[path[-1]] = [*was, "another"]
    elif isinstance(was, str):
        words = {"up": "down", "draining": "up", "closed": "open", "open": "closed",
                 "half_open": "open"}  # fmt: skip
        part[path[-1]] = words.get(was, f"{was}!")
    else:
        part[path[-1]] = 1 if was is None else was + 1
    return msgspec.convert(tree, RouterStats)


def values(stats: RouterStats) -> dict[tuple[str, tuple[str, ...]], Any]:
    found = counters.samples(stats)
    return {(name, labels): value for name, rows in found.items() for labels, value in rows}


def test_every_statistic_moves_a_metric_and_every_metric_moves() -> None:
    stats = make_stats()
    before = values(stats)
    moved, still = set(), set()
    for path in leaves(plain(stats)):
        after = values(changed(stats, path))
        different = {
            name
            for name, labels in before.keys() | after.keys()
            if before.get((name, labels)) != after.get((name, labels))
        }
        moved |= different
        if not different:
            still.add(tuple("*" if part in (A, B) or ":" in part else part for part in path))
    assert {metric.name for metric in families(RouterStats)} - moved == set()
    assert {".".join(path) for path in still} == UNSHOWN


def test_values_and_labels() -> None:
    found = samples(make_stats())
    assert found[key("decisions_total", policy="ours", reason="tie")] == 15
    assert found[key("cached_token_predictions_total", result="exact")] == 60
    assert found[key("cached_token_predictions_total", result="unreported")] == 12
    assert found[key("predicted_cached_tokens_total")] == 51_000
    assert found[key("actual_cached_tokens_total")] == 49_500
    assert found[key("compared_prompt_tokens_total")] == 78_000
    assert found[key("ttft_seconds_sum")] == 13
    assert found[key("ttft_seconds_bucket", le="0.1")] == 30
    assert found[key("worker_state", worker=A, state="up")] == 1
    assert found[key("worker_state", worker=B, state="up")] == 0
    assert found[key("worker_state", worker=B, state="draining")] == 1
    assert found[key("worker_circuit", worker=B, state="open")] == 1
    assert found[key("worker_matched_tokens_total", worker=A, tier="dram")] == 9_000
    assert found[key("held_blocks", source=SHARED, tier="disk")] == 30_000
    assert found[key("held_blocks", source=SOURCE_A, tier="disk")] == 0
    assert found[key("source_silent", source=SOURCE_B)] == 1
    assert found[key("early_loads_total", cache=CACHE_A, result="accepted")] == 46
    assert found[key("early_loads_total", cache=CACHE_A, result="busy")] == 48
    assert found[key("build_info", version="1.2.3")] == 1


def test_a_library_without_processes_has_only_its_own_metrics() -> None:
    library = make_stats(
        process=None,
        sources={},
        tokens=None,
        queue=None,
        proxy=None,
        peers={},
        workers={A: make_worker(circuit=None, health_failures=None)},
    )
    found = samples(library)
    assert found[key("worker_requests", worker=A)] == 5
    absent = ("source_", "queue", "worker_circuit", "peer_", "build", "ended_")
    assert not [name for name, _ in found if name.startswith(absent)]


def test_counters_by_reason_exist_before_their_first_event() -> None:
    stats = make_stats()
    assert stats.queue is not None
    assert stats.proxy is not None
    quiet = make_stats(
        queue=msgspec.structs.replace(stats.queue, refused={}),
        proxy=msgspec.structs.replace(stats.proxy, ended={}, rejected={}),
    )
    found = samples(quiet)
    assert found[key("refused_requests_total", reason="full")] == 0
    assert found[key("ended_requests_total", outcome="broken")] == 0
    assert found[key("rejected_requests_total", reason="too_large")] == 0


def test_names_follow_the_conventions() -> None:
    found = families(RouterStats)
    names = [metric.name for metric in found]
    assert len(set(names)) == len(names)
    assert not {metric.name for metric in families(Stats)} & set(names)
    rows = counters.samples(make_stats())
    for metric in found:
        assert re.fullmatch("flexcache_router_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
        assert metric.help.endswith(".")
        assert {len(labels) for labels, _ in rows[metric.name]} == {len(metric.labels)}


def test_any_worker_name_is_escaped() -> None:
    name = 'http://x/"}\n# TYPE'
    found = samples(make_stats(workers={name: make_worker()}))
    assert found[key("worker_requests", worker=name)] == 5


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics() -> None:
    pytest.importorskip("prometheus_client")
    from flexcache.metrics import Exposition

    text = Exposition(RouterStats, make_stats).render()[0]
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
