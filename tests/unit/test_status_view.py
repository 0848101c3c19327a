"""`flexcache status`: how it presents a server's figures."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flexcache.counters import plain
from flexcache.stats import (
    ControlStats,
    EarlyLoadStats,
    OpStats,
    ServerCounters,
    SessionStats,
    TierStats,
    find_trouble,
    from_plain,
)
from flexcache.status.view import Rates, rates_between, render

COUNT = st.integers(0, 1_000_000)
SECONDS = 4.0


def tier(**counts: int) -> Any:
    return plain(TierStats(**{"capacity": 100, "available": 1, **counts}))


def op(**counts: float) -> Any:
    return plain(OpStats(**counts))


def figures(**changes: Any) -> dict[str, Any]:
    """Return the figures of a server with DRAM, SSD and a remote store."""
    return {
        "version": "1.2.3",
        "uptime_s": 3723.0,
        "endpoint": "ipc:///run/flexcache.sock",
        "server_pid": 4242,
        "fingerprint": "a-model|bfloat16|block=16",
        "layout": "",
        "block_bytes": 1000,
        "tokens_per_block": 16,
        "tiers": {
            "CPU": tier(indexed=50, leased=25, hit_blocks=1234),
            "SSD": tier(capacity=100_000, evicted_blocks=7),
            "REMOTE": tier(capacity=1 << 20, indexed=5),
        },
        "hit_blocks": {"CPU": 10, "SSD": 5},
        "missed_blocks": 5,
        "hit_rate": {
            "1m": {"asked_blocks": 20, "hit_blocks": 15, "rate": 0.75},
            "10m": {"asked_blocks": 0, "hit_blocks": 0},
        },
        "ops": {
            "H2D": op(ops=3, blocks=30, bytes=6_000_000_000, seconds=2.0),
            "D2H": op(),
        },
        "tasks": {"created": 0, "running": 2},
        "unlaunched_tasks": 1,
        "ended_tasks": {"get_success": 4, "get_not_found": 1, "put_success": 2},
        "queues": {
            "disk": {"waiting": 3, "running": 1},
            "remote": {"waiting": 0, "running": 0},
            "device": {"running": 2, "waiting": 0},
        },
        "store_backlog_blocks": 9,
        "open_lookups": 0,
        "dropped_blocks": {"remote_write_failed": 8},
        "skipped_blocks": {"ssd_slower_than_recompute": 2},
        "counters": plain(ServerCounters(worker_deaths={"disk": 1})),
        "early_loads": plain(EarlyLoadStats()),
        "control": plain(ControlStats()),
        "sessions": plain(SessionStats()),
        "workers": {"disk": 77},
        "worker_restarts": {"disk": 1, "remote": 0},
        "worker_up": {"disk": True, "remote": False},
        "engines": {"an-engine": {"pid": 55, "ranks": 2, "open_tasks": 3}},
        "peers": {
            "up": 2,
            "open": 1,
            "blocks": 8,
            "lent": 1_050,
            "refused": 3,
            "expired": 0,
            "moved": 0,
            "there": 0,
            "left": 0,
            "taken": 12,
        },
        "remote": {
            "available": False,
            "breaker": {"state": "open", "openings": 2, "last_reason": "too slow"},
            "lookups": {"asked": 11, "late": 1, "other_layouts": 2},
        },
        "op_seconds": {},
        "task_seconds": {},
        "failing": {},
        "events": {
            "published_batches": 12,
            "dropped_batches": 3,
            "untaken_batches": 0,
            "lost_batches": 0,
        },
        "trace": {"lines": 99, "dropped_lines": 0, "bytes": 2_500_000, "file": "/t/trace.jsonl"},
        "missing": ["remote worker"],
        "trouble": ["Missing: [remote] worker."],
        **changes,
    }


def before_any_engine() -> dict[str, Any]:
    return {
        key: value
        for key, value in figures(tiers={}, tasks={}, engines={}).items()
        if key in ("version", "uptime_s", "endpoint", "server_pid", "tiers", "tasks", "engines",
                   "counters", "workers", "worker_restarts", "worker_up", "missing", "trouble")
    }  # fmt: skip


def shown(stats: dict[str, Any], rates: Rates | None = None, width: int = 140) -> str:
    screen = io.StringIO()
    Console(width=width, file=screen).print(render(from_plain(stats), rates, width))
    return screen.getvalue()


@given(hits=COUNT, misses=COUNT, ended=COUNT, moved=COUNT, evicted=COUNT)
def test_rates_are_increases_per_second(
    hits: int, misses: int, ended: int, moved: int, evicted: int
) -> None:
    before, after = figures(), copy.deepcopy(figures())
    after["hit_blocks"]["SSD"] += hits
    after["missed_blocks"] += misses
    after["ended_tasks"]["get_cancelled"] = ended  # a kind that is new
    after["ops"]["D2H"]["bytes"] += moved
    after["tiers"]["SSD"]["evicted_blocks"] += evicted
    rates = rates_between(from_plain(before), from_plain(after), SECONDS)
    assert rates is not None
    assert rates.hit_tokens * SECONDS == pytest.approx(hits * 16)
    assert rates.missed_tokens * SECONDS == pytest.approx(misses * 16)
    assert rates.ended_tasks * SECONDS == pytest.approx(ended)
    assert rates.op_bytes == {"H2D": 0, "D2H": moved / SECONDS}
    assert rates.evicted_blocks == {"CPU": 0, "SSD": evicted / SECONDS, "REMOTE": 0}


def test_no_rates_are_shown_across_a_restart_or_before_the_first_engine() -> None:
    some, none = from_plain(figures()), from_plain(before_any_engine())
    assert rates_between(some, from_plain(figures(server_pid=4243)), SECONDS) is None
    assert rates_between(some, from_plain(figures(uptime_s=SECONDS / 2)), SECONDS) is None
    assert rates_between(none, some, SECONDS) is None
    assert rates_between(some, none, SECONDS) is None


@pytest.mark.parametrize(
    "text",
    [
        "ipc:///run/flexcache.sock, process 4242",
        "flexcache 1.2.3, up 1 h 2 min",
        "a-model|bfloat16|block=16",
        "! Missing: [remote] worker.\n",
        "██████████·····",
        " 75%",
        "1,234",
        "hit rate: 75.0% in 1m\n",
        "tasks: running 2, not launched 1",
        "ended: get not found 1, success 4; put success 2",
        "waiting + running: disk 3 + 1, device 0 + 2, blocks to store 9",
        "peers: 2 answer, blocks lent 8, loans 1,050, refused 3, taken over 12\n",
        "remote store: not available, breaker open (too slow), "
        "breaker opened 2 times; 11 lookups, 1 answered late; has the model in 2 other layouts",
        "blocks not stored: remote write failed 8",
        "counters: disk worker deaths 1",
        "KV events: published batches 12, dropped batches 3",
        "load or recompute, in blocks: SSD load 5, SSD recompute 2",
        "trace: lines 99, 2.5 MB, /t/trace.jsonl",
    ],
)
def test_all_that_matters_is_shown(text: str) -> None:
    assert text in shown(figures())


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return line.split()


def test_a_name_with_markup_is_shown_verbatim() -> None:
    engines = {"[/a] [red]": {"pid": 55, "ranks": 2, "open_tasks": 3}}
    assert "[/a] [red]" in shown(figures(engines=engines))


def test_rows_of_tables() -> None:
    now = figures()
    written = op(ops=1, blocks=10, bytes=2_000_000_000, device_bytes=1_340_000_000)
    now["ops"]["H2DISK"] = written
    text = shown(now)
    assert row(text, "H2D") == ["H2D", "-", "3.00", "6.00", "-", "3", "30", "0"]
    assert row(text, "H2DISK") == ["H2DISK", "-", "-", "2.00", "1.34", "1", "10", "0"]
    assert not [line for line in text.splitlines() if line.startswith("D2H")]
    assert row(text, "disk") == ["disk", "77", "1"]
    assert ["remote", "down", "0"] in [line.split() for line in text.splitlines()]
    assert row(text, "an-engine") == ["an-engine", "55", "2", "3"]
    assert row(text, "REMOTE")[1:4] == ["unknown", "-", "5"]


def test_quotas_are_shown_if_there_are_any() -> None:
    assert "namespace" not in shown(figures())
    parts = {
        "team-a": {"quota": 50, "used": 4321, "evicted": 9, "hit": 3, "missed": 1},
        "*": {"quota": 40, "used": 0, "evicted": 0, "hit": 0, "missed": 0},
    }
    tiers = {"CPU": {**tier(), "quotas": parts}, "SSD": tier()}
    text = shown(figures(tiers=tiers))
    assert row(text, "team-a") == ["team-a", "CPU", "50", "4,321", "75.0%", "9"]
    assert row(text, "*") == ["*", "CPU", "40", "0", "-", "0"]


def test_an_unavailable_tier_is_shown_as_such() -> None:
    tiers = {"CPU": tier(indexed=50), "SSD": tier(indexed=50, available=0)}
    text = shown(figures(tiers=tiers))
    assert row(text, "SSD")[1] == "unavailable"
    assert row(text, "CPU")[1] != "unavailable"


def test_rates_are_shown_once_they_are_known() -> None:
    after = figures(hit_blocks={"CPU": 20, "SSD": 5}, missed_blocks=10)
    after["ops"]["H2D"]["bytes"] += 2_000_000_000
    rates = rates_between(from_plain(figures()), from_plain(after), 1.0)
    text = shown(after, rates)
    assert "last 1.0 s: 160 of 240 requested tokens/s found, 0 tasks/s" in text
    assert row(text, "H2D")[1] == "2.00"


@pytest.mark.parametrize("width", range(40, 200, 7))
def test_a_terminal_of_any_width_shows_what_matters_most(width: int) -> None:
    text = shown(figures(), width=width)
    assert max(map(len, text.splitlines())) <= width
    for name in ("CPU", "SSD", "REMOTE", "H2D", "disk", "an-engine"):
        row(text, name)
    assert "1,234" in " ".join(row(text, "CPU"))


def test_a_server_without_an_engine_yet_is_shown_as_such() -> None:
    text = shown(before_any_engine())
    assert "waiting for the first engine to define the model" in text
    assert row(text, "disk") == ["disk", "77", "1"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "up 5 s"), (65, "up 1 min 5 s"), (7200, "up 2 h 0 min"), (200_000, "up 2 d 7 h")],
)
def test_uptime_is_shown_in_fitting_units(seconds: float, text: str) -> None:
    assert text in shown(figures(uptime_s=seconds))


def test_limits_are_shown_with_what_they_have_done() -> None:
    assert "limits:" not in shown(figures())
    tiers = {"CPU": tier(expired_blocks=3), "SSD": tier(write_limit_bytes_per_s=2_500_000)}
    text = shown(
        figures(tiers=tiers, retention_s=7200.0, dropped_blocks={"ssd_write_throttled": 1234})
    )
    assert "limits: SSD writes 2.5 MB/s, 1,234 blocks throttled" in text
    assert "unused blocks kept 2 h 0 min, expired: CPU 3" in text


def test_what_fails_at_a_store_that_is_cut_off_is_told_once() -> None:
    failing = {"H2DISK": "no space", "H2REMOTE": "too slow", "REMOTE2H": "too slow"}
    said = [line for line in find_trouble(from_plain(figures(failing=failing))) if ": " in line]
    assert [line for line in said if "too slow" in line] == [
        "The remote store is cut off: too slow."
    ]
    assert "Writes to SSD failed in the last minute: no space." in said
