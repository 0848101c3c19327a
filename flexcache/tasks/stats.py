"""Statistics of a server as one typed, frozen tree.

Metrics, `flexcache status`, adapters and the doctor read it by attribute. `KVManager.stats` and
the wire have the same figures as one flat dictionary (`to_plain`), from which a reader on the
other side makes the tree again (`from_plain`). A part that a cache does not have (no remote store,
no events, no trace) is None here and missing there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flexcache.errors import FlexCacheError


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Only what a cache may lack has a default."""


class OpStats(_Part, frozen=True, kw_only=True):
    """Ops of one kind since startup.

    ``seconds``: the time in which at least one ran. ``device_bytes``: what the disk worker moved on
    the device, which compression makes less than ``bytes``; 0 for ops of others.
    """

    ops: int
    failed_ops: int
    blocks: int
    bytes: int
    seconds: float
    device_bytes: int = 0


class TotalsStats(_Part, frozen=True, kw_only=True):
    """What one engine, or all of them together, have had of the cache."""

    hit_blocks: dict[str, int]
    """By tier."""
    missed_blocks: int
    dropped_blocks: dict[str, int]
    """By reason, like the next."""
    skipped_blocks: dict[str, int]
    ended_tasks: dict[str, int]
    """By kind and status, as in ``get_success``."""
    ops: dict[str, OpStats]


class QuotaStats(_Part, frozen=True, kw_only=True):
    """A tenant's part of a tier, in blocks (`QuotaUse`)."""

    quota: int
    used: int
    evicted: int
    hit: int
    missed: int


class TierStats(_Part, frozen=True, kw_only=True):
    """Occupancy in blocks, and counts since startup."""

    capacity: int
    free: int
    indexed: int
    leased: int
    hit_blocks: int
    miss_blocks: int
    stored_blocks: int
    evicted_blocks: int
    dropped_blocks: int
    expired_blocks: int
    """Not used for longer than the retention time."""
    read_bytes: int
    written_bytes: int
    available: int
    """1 while the tier takes part, else 0."""
    restoring: int = 0
    """Survived the last process, and cannot be found yet."""
    tails: int = 0
    """How many tails can be found; their units count as blocks."""
    known_absent: int | None = None
    """Blocks that a remote store is known to lack."""
    seen_blocks: int | None = None
    """Only for a tier that does not take every block, like the next four."""
    refused_blocks: int | None = None
    writes_paused: int | None = None
    """1 while nothing is written (`ReuseWatch`), else 0."""
    refused_returns: int | None = None
    """Prompts that came back and would have been found, had they been written."""
    dirty_blocks: int | None = None
    """Blocks that wait to be written back."""
    write_limit_bytes_per_s: int | None = None
    quotas: dict[str, QuotaStats] | None = None
    """By tenant, `*` for those that are not named; only for a tier with quotas."""


class HistogramStats(_Part, frozen=True, kw_only=True):
    """``counts`` has one more entry than ``bounds``, for what is above the last; each counts only
    what lies between two bounds."""

    bounds: list[float]
    counts: list[int]
    sum: float


class OpHistograms(_Part, frozen=True, kw_only=True):
    seconds: HistogramStats
    bytes: HistogramStats


class HitRateStats(_Part, frozen=True, kw_only=True):
    """Hits in one window of time; the rate is 0 where nothing was asked for."""

    asked_blocks: int
    hit_blocks: int
    rate: float


class QueueStats(_Part, frozen=True, kw_only=True):
    """Ops that wait for a worker, and that it was given."""

    waiting: int
    running: int


class LoadDecisions(_Part, frozen=True, kw_only=True):
    """Blocks of a tier that gets loaded, and that computing was faster for."""

    load: int
    recompute: int


class LoadCostStats(_Part, frozen=True, kw_only=True):
    """How fast loads of a tier were of late."""

    blocks_per_s: float
    seconds_per_op: float


class BreakerStats(_Part, frozen=True, kw_only=True):
    state: str
    openings: int
    last_reason: str


class LookUpStats(_Part, frozen=True, kw_only=True):
    asked: int
    late: int


class RemoteStats(_Part, frozen=True, kw_only=True):
    """How the remote store does."""

    available: bool
    breaker: BreakerStats
    lookups: LookUpStats


class SessionStats(_Part, frozen=True, kw_only=True):
    """Users' sessions, and what hints about them have done (`HintCounters`)."""

    known: int
    over: int
    returning: int
    unknown: int
    retired_blocks: int
    kept_blocks: int
    fetched_blocks: int
    returned_sessions: int


class EarlyLoadStats(_Part, frozen=True, kw_only=True):
    """Loads to DRAM ahead of their requests, in blocks (`EarlyLoadCounters`)."""

    open_blocks: int
    """On their way, or waiting for their request."""
    early: int
    late: int
    wasted: int


class CacheIdentity(_Part, frozen=True, kw_only=True):
    """What is cached."""

    fingerprint: str
    layout: str
    """Empty until the first rank has said."""
    block_bytes: int
    """Bytes of one block over all ranks."""
    tokens_per_block: int


class CacheStats(_Part, frozen=True, kw_only=True):
    """The tiers, and the tasks that use them."""

    identity: CacheIdentity
    totals: TotalsStats
    tiers: dict[str, TierStats]
    """Fastest first."""
    tasks: dict[str, int]
    """Open ones by state."""
    hit_rate: dict[str, HitRateStats]
    """By window."""
    op_histograms: dict[str, OpHistograms]
    task_histograms: dict[str, HistogramStats]
    """By kind of task: seconds from its launch to its answer."""
    queues: dict[str, QueueStats]
    """By worker; ``device`` stands for the engines' ranks."""
    unlaunched_tasks: int
    open_lookups: int
    store_backlog_blocks: int
    """Host blocks that are pinned until a tier below has them."""
    load_decisions: dict[str, LoadDecisions]
    sessions: SessionStats
    early_loads: EarlyLoadStats
    retention_s: float | None = None
    """Blocks that were not used for this long are dropped."""
    remote: RemoteStats | None = None
    load_cost: dict[str, LoadCostStats] | None = None


class EngineStats(_Part, frozen=True, kw_only=True):
    """A serving engine in session."""

    pid: int
    open_tasks: int
    ranks: int
    """How many are registered."""


class EventStats(_Part, frozen=True, kw_only=True):
    """KV events, in batches. Publisher and engine are each only there if there is one."""

    published_batches: int | None = None
    dropped_batches: int | None = None
    queued_batches: int | None = None
    sequence: int | None = None
    """Number of the next batch."""
    replayed_batches: int | None = None
    snapshot_pages: int | None = None
    bad_replay_requests: int | None = None
    untaken_batches: int
    lost_batches: int


class TraceStats(_Part, frozen=True, kw_only=True):
    lines: int
    dropped_lines: int
    bytes: int
    file: str
    """The one being written."""


class ServerStats(_Part, frozen=True, kw_only=True):
    """The process that keeps the cache."""

    version: str
    uptime_s: float
    endpoint: str
    server_pid: int
    workers: dict[str, int]
    """Process ids of ranks, disk and remote worker that are up."""
    worker_restarts: dict[str, int]
    events: EventStats | None = None
    trace: TraceStats | None = None


class Stats(_Part, frozen=True, kw_only=True):
    """Everything that a server tells of itself."""

    server: ServerStats
    counters: dict[str, int]
    """Refused messages and other trouble, by name."""
    engines: dict[str, EngineStats]
    cache: CacheStats | None = None
    """None before the first engine has said what to cache."""
    engine: TotalsStats | None = None
    """What the session that asks has had."""


def to_plain(stats: Stats) -> dict[str, Any]:
    """The same as nested dictionaries of numbers and strings, the server's and the cache's parts
    side by side: what `KVManager.stats` returns."""
    plain: dict[str, Any] = msgspec.to_builtins(stats)
    cache = plain.pop("cache", None) or {"tiers": {}, "tasks": {}}
    for part in (plain.pop("server"), cache, cache.pop("identity", {}), cache.pop("totals", {})):
        plain |= part
    return plain


def from_plain(plain: Mapping[str, Any]) -> Stats:
    """The inverse of `to_plain`.

    Raises:
        FlexCacheError: A part is missing or different: it comes from another version.
    """
    parts = {**plain, "server": plain}
    if plain.get("tiers"):
        parts["cache"] = {**plain, "identity": plain, "totals": plain}
    try:
        return msgspec.convert(parts, Stats)
    except msgspec.ValidationError as error:
        version = plain.get("version", "unknown")
        reason = f"statistics of a server of version {version} cannot be read: {error}"
        raise FlexCacheError(reason) from None
