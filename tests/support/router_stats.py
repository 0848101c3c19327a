"""Invented statistics of a router, with every part."""

from __future__ import annotations

import msgspec

from flexcache.counters import Histogram
from flexcache.router.stats import (
    CachedTokensStats,
    IndexStats,
    LineStats,
    PeerStats,
    PrefetchStats,
    ProcessStats,
    ProxyStats,
    RouterStats,
    RoutingStats,
    ServiceTimeStats,
    SourceStats,
    TokenizerStats,
    TTFTStats,
    WorkerStats,
)

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
SOURCE_A, SOURCE_B = "tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"
SHARED = "tcp://10.0.0.9:5560"
CACHE_A, CACHE_B = "http://10.0.0.1:9470", "http://10.0.0.2:9470"


def histogram(*counts: int, total: float = 1.0) -> Histogram:
    return Histogram(bounds=(0.01, 0.1, 1.0), counts=list(counts), sum=total)


def make_worker(**changes: object) -> WorkerStats:
    worker = {
        "url": A,
        "state": "up",
        "sources": [SOURCE_A, SHARED],
        "requests": 5,
        "waiting_requests": 2,
        "wait_s": 0.75,
        "speed_factor": 1.25,
        "decisions": 70,
        "prompt_tokens": 70_000,
        "matched_tokens": {"gpu": 40_000, "dram": 9_000, "disk": 1_000},
        "is_approximate": False,
        "circuit": "closed",
        "health_failures": 3,
    } | changes
    return msgspec.convert(worker, WorkerStats)


def make_source(**changes: object) -> SourceStats:
    source = {
        "is_connected": True,
        "is_silent": False,
        "is_unmatched": False,
        "last_batch_age_s": 0.5,
        "batches": 900,
        "lag_s": 0.004,
        "gaps": 6,
        "losses": 1,
        "replayed_batches": 31,
        "restarts": 2,
        "snapshots": 8,
        "bad_batches": 9,
    } | changes
    return SourceStats(**source)  # type: ignore[arg-type]


def make_cache(**changes: object) -> PrefetchStats:
    cache = {
        "circuit": "closed",
        "running": 45,
        "results": {"accepted": 46, "failed": 47, "busy": 48, "circuit": 49},
        "tokens": 50_000,
        "failure": "",
    } | changes
    return msgspec.convert(cache, PrefetchStats)


def make_routing() -> RoutingStats:
    return RoutingStats(
        policy="ours",
        decisions={"cost": 80, "tie": 15, "load": 5},
        prompt_tokens=100_000,
        matched_tokens={"gpu": 50_000, "dram": 12_000, "disk": 3_000},
        cached_tokens=CachedTokensStats(
            exact=60,
            over=11,
            under=7,
            unreported=12,
            unpredicted=4,
            predicted_tokens=51_000,
            actual_tokens=49_500,
            prompt_tokens=78_000,
        ),
        ttft=TTFTStats(
            predicted_s=histogram(10, 20, 30, 1, total=12.0),
            actual_s=histogram(12, 18, 29, 2, total=13.0),
            error_s=histogram(50, 8, 2, 1, total=1.5),
        ),
        service_time=ServiceTimeStats(
            samples=61,
            is_learned=True,
            base_s=0.02,
            token_s=8e-5,
            attention_s=2.2e-9,
            load_s={"dram": 1e-5, "disk": 4e-5},
        ),
        expired_requests=13,
    )


def make_index() -> IndexStats:
    return IndexStats(
        blocks=123_456,
        held_blocks={
            SOURCE_A: {"gpu": 20_000},
            SOURCE_B: {"gpu": 17_000},
            SHARED: {"dram": 90_000, "disk": 30_000},
        },
        bytes=20_000_000,
        max_blocks=10_000_000,
        refused_blocks=21,
        orphans=22,
        events={"stored": 800, "removed": 90, "cleared": 1},
        event_blocks={"stored": 140_000, "removed": 16_000},
        ignored_events={"medium": 23},
    )


def make_stats(**changes: object) -> RouterStats:
    """Return the statistics of two engines, B draining with an open circuit, and a shared cache."""
    second = make_worker(
        url=B,
        state="draining",
        sources=[SOURCE_B, SHARED],
        requests=1,
        waiting_requests=0,
        wait_s=0.0,
        speed_factor=0.9,
        decisions=30,
        prompt_tokens=30_000,
        matched_tokens={"gpu": 10_000, "dram": 3_000, "disk": 2_000},
        is_approximate=True,
        circuit="open",
        health_failures=14,
    )
    parts = {
        "routing": make_routing(),
        "index": make_index(),
        "workers": {A: make_worker(), B: second},
        "process": ProcessStats(
            version="1.2.3", pid=4242, uptime_s=3723.0, ready=True, address="http://0.0.0.0:8000"
        ),
        "sources": {
            SOURCE_A: make_source(),
            SOURCE_B: make_source(is_connected=False, is_silent=True, last_batch_age_s=None),
            SHARED: make_source(batches=901),
        },
        "caches": {
            CACHE_A: make_cache(),
            CACHE_B: make_cache(circuit="half_open", failure="no answer within 2 s"),
        },
        "tokens": TokenizerStats(
            requests={"ids": 1, "local": 90, "render": 7, "unknown": 2},
            unknown={"media": 2},
            tokens=99_000,
            remembered_tokens=88_000,
            seconds=histogram(90, 6, 2, 1, total=0.6),
            checks=24,
            mismatches=25,
            models={"a-model chat": "local"},
            reasons={"a-model chat": "checked"},
            memo_bytes=1 << 20,
        ),
        "queue": LineStats(
            waiting=17,
            capacity=1024,
            queued_prefill_s={"engines": 29.5, "router": 30.5},
            waits_s=histogram(70, 9, 8, 7, total=3.25),
            refused={"full": 26, "expired": 27, "no_worker": 28},
        ),
        "proxy": ProxyStats(
            processes=2,
            restarts=29,
            open_requests=32,
            ended={"done": 85, "aborted": 33, "refused": 34, "broken": 35},
            retries=36,
            rejected={"unauthorized": 37, "too_large": 38, "malformed": 39},
            unsupervised_requests=41,
        ),
        "peers": {
            "tcp://10.0.0.8:5570": PeerStats(
                is_up=True, requests=42, batches=43, gaps=44, last_batch_age_s=0.25
            )
        },
    } | changes
    return RouterStats(**parts)  # type: ignore[arg-type]
