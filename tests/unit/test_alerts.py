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

from flexcache.counters import MetricType, families
from flexcache.router.stats import RouterStats
from flexcache.stats import Stats

RULES = ROOT / "docs" / "grafana" / "alerts.yml"
DASHBOARDS = {
    ROOT / "docs" / "grafana" / "flexcache.json": 40,
    ROOT / "docs" / "grafana" / "router.json": 40,
}
"""Each with a number of queries that it exceeds."""
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
    'up{job="flexcache-router"}': "1x90",
    "flexcache_router_ready": "0x2 1x88",
    'flexcache_router_worker_state{worker="a",state="up"}': "1x40 0x1 1x49",
    'flexcache_router_worker_state{worker="a",state="down"}': "0x40 1x1 0x49",
    'flexcache_router_worker_state{worker="b",state="up"}': "1x90",
    'flexcache_router_worker_state{worker="b",state="down"}': "0x90",
    'flexcache_router_worker_circuit{worker="a",state="open"}': "0x40 1x2 0x48",
    'flexcache_router_decisions_total{policy="ours",reason="cost"}': "0+60x90",
    'flexcache_router_refused_requests_total{reason="full"}': "0x40 1x50",
    "flexcache_router_retries_total": "0+1x90",
    'flexcache_router_source_connected{source="a"}': "1x40 0x2 1x48",
    'flexcache_router_source_silent{source="a"}': "0x90",
    'flexcache_router_source_unmatched{source="a"}': "0x90",
    'flexcache_router_source_losses_total{source="a"}': "0x90",
    'flexcache_router_cached_token_predictions_total{result="exact"}': "0+60x90",
    'flexcache_router_cached_token_predictions_total{result="over"}': "0+1x90",
    'flexcache_router_cached_token_predictions_total{result="under"}': "0+1x90",
    'flexcache_router_matched_tokens_total{tier="gpu"}': "0+6000x90",
    "flexcache_router_prompt_tokens_total": "0+9000x90",
    'flexcache_router_converted_requests_total{way="local"}': "0+60x90",
    'flexcache_router_converted_requests_total{way="unknown"}': "0+6x90",
    "flexcache_router_refused_blocks_total": "0x90",
    "flexcache_router_proxy_restarts_total": "0x40 1x50",
    "flexcache_router_unsupervised_requests_total": "0x90",
    'flexcache_router_peer_up{peer="a"}': "1x90",
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
    "FlexCacheRouterDown": {'up{job="flexcache-router"}': "1x40 0x50"},
    "FlexCacheRouterNoEngine": {
        'flexcache_router_worker_state{worker="a",state="up"}': "1x40 0x50",
        'flexcache_router_worker_state{worker="b",state="up"}': "1x40 0x50",
    },
    "FlexCacheRouterRefuses": {
        'flexcache_router_refused_requests_total{reason="full"}': "0+6x90"
    },
    "FlexCacheRouterNotReady": {"flexcache_router_ready": "0x90"},
    "FlexCacheRouterEngineDown": {
        'flexcache_router_worker_state{worker="a",state="down"}': "0x40 1x50"
    },
    "FlexCacheRouterCircuitOpen": {
        'flexcache_router_worker_circuit{worker="a",state="open"}': "0x40 1x50"
    },
    "FlexCacheRouterRetries": {"flexcache_router_retries_total": "0+6x90"},
    "FlexCacheRouterPublisherTrouble": {'flexcache_router_source_silent{source="a"}': "0x40 1x50"},
    "FlexCacheRouterEventsLost": {'flexcache_router_source_losses_total{source="a"}': "0x85 1x5"},
    "FlexCacheRouterPredictionsWrong": {
        'flexcache_router_cached_token_predictions_total{result="over"}': "0+12x90"
    },
    "FlexCacheRouterFindsNothing": {
        'flexcache_router_matched_tokens_total{tier="gpu"}': "0x90"
    },
    "FlexCacheRouterTokensUnknown": {
        'flexcache_router_converted_requests_total{way="unknown"}': "0+80x90"
    },
    "FlexCacheRouterIndexFull": {"flexcache_router_refused_blocks_total": "0+50x90"},
    "FlexCacheRouterProcessesDie": {"flexcache_router_proxy_restarts_total": "0+1x90"},
    "FlexCacheRouterPeerAway": {'flexcache_router_peer_up{peer="a"}': "1x40 0x50"},
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
    page = (ROOT / "docs" / "operate" / "operations.md").read_text()
    assert not [alert for alert in TROUBLE if f"`{alert}`" not in page]


def test_dashboards_and_alerts_query_existing_metrics() -> None:
    known = set()
    for metric in (*families(Stats), *families(RouterStats)):
        known.add(metric.name)
        if metric.type is MetricType.HISTOGRAM:
            known |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    rules = re.sub(r"#.*|action: .*|job=\S+", "", RULES.read_text())
    assert set(re.findall(r"flexcache_\w+", rules)) <= known
    for dashboard, least in DASHBOARDS.items():
        panels = json.loads(dashboard.read_text())["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
        assert set(re.findall(r"flexcache_\w+", " ".join(queries))) <= known
        assert len(queries) > least
