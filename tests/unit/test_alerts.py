"""Each alert fires for its fault and none while all is well, checked with Prometheus' own tool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from paths import ROOT

from flexcache.metrics.catalog import CATALOG
from flexcache.metrics.metric import MetricType

RULES = ROOT / "docs" / "grafana" / "alerts.yml"
DASHBOARD = ROOT / "docs" / "grafana" / "flexcache.json"
MINUTES = 90

WELL: Mapping[str, str] = {
    'up{job="flexcache"}': "1x90",
    'flexcache_engine_ranks{engine="a"}': "2x90",
    'flexcache_worker_up{worker="disk"}': "1x90",
    'flexcache_worker_restarts_total{worker="disk"}': "0x40 1x50",
    'flexcache_tier_available{tier="REMOTE"}': "1x40 0x2 1x48",
    "flexcache_breaker_openings_total": "0x40 1x50",
    "flexcache_remote_lookups_total": "0+60x90",
    "flexcache_late_remote_lookups_total": "0+1x90",
    'flexcache_ops_total{op="DISK2H"}': "0+600x90",
    'flexcache_failed_ops_total{op="DISK2H"}': "0+1x90",
    'flexcache_ops_total{op="REMOTE2H"}': "0+600x90",
    'flexcache_failed_ops_total{op="REMOTE2H"}': "0+60x90",
    'flexcache_op_blocks_total{op="D2H"}': "0+600x90",
    'flexcache_dropped_blocks_total{reason="ssd_bad_block"}': "0x90",
    'flexcache_dropped_blocks_total{reason="ssd_write_backlog"}': "0+60x90",
    'flexcache_dropped_blocks_total{reason="host_tier_full"}': "0x90",
    'flexcache_tier_leased_blocks{tier="CPU"}': "10x90",
    'flexcache_tier_capacity_blocks{tier="CPU"}': "1000x90",
    'flexcache_task_duration_seconds_bucket{kind="get",le="1"}': "0+600x90",
    'flexcache_task_duration_seconds_bucket{kind="get",le="5"}': "0+602x90",
    'flexcache_task_duration_seconds_bucket{kind="get",le="+Inf"}': "0+602x90",
    'flexcache_hit_ratio{window="10m"}': "0.8x90",
    'flexcache_hit_ratio{window="1h"}': "0.8x90",
    "flexcache_failed_messages_total": "0x90",
    'flexcache_rejected_messages_total{reason="malformed"}': "0x40 1x50",
    "flexcache_dropped_event_batches_total": "0x90",
}
TROUBLE: Mapping[str, Mapping[str, str]] = {
    "FlexCacheDown": {'up{job="flexcache"}': "1x40 0x50"},
    "FlexCacheRanksMissing": {'flexcache_engine_ranks{engine="a"}': "2x40 0x50"},
    "FlexCacheWorkerDown": {'flexcache_worker_up{worker="disk"}': "1x40 0x50"},
    "FlexCacheWorkerRestarts": {'flexcache_worker_restarts_total{worker="disk"}': "0+1x90"},
    "FlexCacheStoreGivenUp": {'flexcache_tier_available{tier="REMOTE"}': "1x40 0x50"},
    "FlexCacheStoreFlaps": {"flexcache_breaker_openings_total": "0+1x90"},
    "FlexCacheStoreLate": {"flexcache_late_remote_lookups_total": "0+6x90"},
    "FlexCacheOpsFail": {'flexcache_failed_ops_total{op="DISK2H"}': "0+12x90"},
    "FlexCacheBadBlocks": {
        'flexcache_dropped_blocks_total{reason="ssd_bad_block"}': "0x40 1x50"
    },
    "FlexCacheWritesDropped": {
        'flexcache_dropped_blocks_total{reason="ssd_write_backlog"}': "0+200x90"
    },
    "FlexCacheDramTooSmall": {
        'flexcache_dropped_blocks_total{reason="host_tier_full"}': "0+1x90"
    },
    "FlexCacheLeasesHeld": {'flexcache_tier_leased_blocks{tier="CPU"}': "10x40 950x50"},
    "FlexCacheSlowGets": {
        'flexcache_task_duration_seconds_bucket{kind="get",le="1"}': "0+500x90"
    },
    "FlexCacheHitRateFell": {'flexcache_hit_ratio{window="10m"}': "0.8x40 0.3x50"},
    "FlexCacheBug": {"flexcache_failed_messages_total": "0x85 1x5"},
    "FlexCacheMessagesRefused": {
        'flexcache_rejected_messages_total{reason="malformed"}': "0+5x90"
    },
    "FlexCacheEventsLost": {"flexcache_dropped_event_batches_total": "0x85 1x5"},
}  # fmt: skip

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not there"
)


def check_firing(series: Mapping[str, str], alerts: Sequence[str], tmp_path: Path) -> None:
    """Check that exactly these alerts fire at the end of these values, one per minute."""

    def of_a_server(name: str) -> str:
        return name.replace("{", '{instance="a",') if "{" in name else name + '{instance="a"}'

    who_fires = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{MINUTES - 1}m",
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
    }
    inputs = [{"series": of_a_server(name), "values": each} for name, each in series.items()]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": [who_fires]}
    file = tmp_path / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_no_alert_fires_on_a_healthy_system(tmp_path: Path) -> None:
    check_firing(WELL, [], tmp_path)


@needs_promtool
@pytest.mark.parametrize("alert", TROUBLE)
def test_each_problem_fires_only_its_own_alert(alert: str, tmp_path: Path) -> None:
    check_firing({**WELL, **TROUBLE[alert]}, [alert], tmp_path)


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    rules = RULES.read_text().split("- alert: ")[1:]
    assert {rule.split()[0] for rule in rules} == set(TROUBLE)
    for rule in rules:
        assert " summary: " in rule
        assert " action: " in rule
    page = (ROOT / "docs" / "operations.md").read_text()
    assert not [alert for alert in TROUBLE if f"`{alert}`" not in page]


def test_dashboard_and_alerts_query_existing_metrics() -> None:
    known = set()
    for metric in CATALOG:
        known.add(metric.name)
        if metric.type is MetricType.HISTOGRAM:
            known |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    rules = re.sub(r"#.*|action: .*|job=\S+", "", RULES.read_text())
    asked = set(re.findall(r"flexcache_\w+", " ".join(queries) + rules))
    assert asked <= known
    assert len(queries) > 40
