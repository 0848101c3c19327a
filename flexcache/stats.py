"""Statistics of a cache and of the server that keeps it: what is counted, and what is metered.

One tree of records (`flexcache.counters`). Tiers, sessions, planners and the task engine count on
records of it; `/metrics`, `flexcache status`, adapters and the doctor read a copy.
`KVManager.stats` and the wire have the same figures as one flat dictionary (`to_plain`), of which a
reader on the other side makes the tree again (`from_plain`). A part that a cache does not have (no
remote store, no events, no trace) is None here and missing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import field

from flexcache import counters
from flexcache.counters import UNSERVED, By, Counters, Histogram, counter, gauge, histogram
from flexcache.errors import FlexCacheError
from flexcache.ids import BreakerState, KVStatus, OpKind, TaskKind, TierName
from flexcache.logs import NotedEvent

_WHY_DROPPED = (
    "host_tier_full", "prefix_not_cached", "parent_missing", "session_task_limit", "name_disputed",
    "ranks_missing", "ssd_nothing_returns",
    *(
        f"{tier}_{what}"
        for tier in ("ssd", "remote")
        for what in ("tier_full", "write_backlog", "write_throttled", "write_failed",
                     "unavailable", "bad_block", "never_written")
    ),
)  # fmt: skip
_WHY_REJECTED = (
    "malformed", "oversized", "misplaced", "without_session", "version", "crowded",
    "unknown_worker",
)  # fmt: skip
_WHY_SKIPPED = (
    *(f"{tier}_slower_than_recompute" for tier in ("ssd", "peer", "remote")), "host_worth_less",
)  # fmt: skip
_WHY_UNPINNED = ("expired", "unpinned", "deleted", "cleared", "weights", "layout", "lost")
_ENDS = tuple(
    f"{kind.value}_{status.value}"
    for kind in TaskKind
    for status in KVStatus
    if status is not KVStatus.TIMEOUT  # the caller stopped waiting; the task continues
)

# -- tiers -----------------------------------------------------------------------------------------


class QuotaStats(Counters):
    """A tenant's part of a tier, in blocks."""

    TITLE = "Quotas"

    quota: Annotated[int, gauge(
        "quota_blocks",
        "Blocks of the tier that a namespace is sure of; * is all that are not named.",
    )] = 0  # fmt: skip
    used: Annotated[int, gauge(
        "quota_used_blocks", "Blocks of the tier that a namespace has, borrowed ones included."
    )] = 0  # fmt: skip
    evicted: Annotated[int, counter(
        "quota_evicted_blocks",
        "Blocks of a namespace evicted to make room for its own or others' blocks.",
    )] = 0  # fmt: skip
    hit: Annotated[int, counter(
        "quota_hit_blocks", "Blocks that gets of a namespace found in the tier."
    )] = 0  # fmt: skip
    missed: Annotated[int, counter(
        "quota_miss_blocks",
        "Blocks requested by gets of a namespace that the tier did not supply; another may have.",
    )] = 0  # fmt: skip


class TierStats(Counters):
    """Occupancy in blocks, and counts since startup."""

    TITLE = "Tiers"

    capacity: Annotated[int, gauge(
        "tier_capacity_blocks",
        "Blocks that the tier can hold. For REMOTE: how many can be remembered.",
    )] = 0  # fmt: skip
    free: int = 0
    indexed: Annotated[int, gauge(
        "tier_indexed_blocks",
        "Blocks that can be found. For REMOTE: known to be in the store.",
    )] = 0  # fmt: skip
    leased: Annotated[int, gauge("tier_leased_blocks", "Blocks that tasks have reserved.")] = 0
    pinned: Annotated[int, gauge(
        "tier_pinned_blocks", "Blocks that pins keep from eviction; they count as indexed."
    )] = 0  # fmt: skip
    hit_blocks: Annotated[int, counter(
        "tier_hit_blocks",
        "Blocks that gets found in this tier, also if a load failed or was cancelled.",
    )] = 0  # fmt: skip
    miss_blocks: int = 0
    stored_blocks: Annotated[int, counter(
        "tier_stored_blocks", "Blocks that became findable in the tier."
    )] = 0  # fmt: skip
    evicted_blocks: Annotated[int, counter(
        "tier_evicted_blocks",
        "Blocks evicted to make room for others. For REMOTE: only forgotten here.",
    )] = 0  # fmt: skip
    dropped_blocks: int = 0
    """Found to be bad or missing, and those that depend on them."""
    expired_blocks: Annotated[int, counter(
        "tier_expired_blocks",
        "Blocks dropped since they were not used for longer than `retention_s`.",
    )] = 0  # fmt: skip
    read_bytes: int = 0
    """By ops, like the next."""
    written_bytes: int = 0
    available: Annotated[int, gauge(
        "tier_available",
        "1 while the tier is in use; 0 while its worker or store is down and every lookup misses.",
    )] = 0  # fmt: skip
    restoring: Annotated[int, gauge(
        "tier_restoring_blocks",
        "Blocks that survived a restart and cannot be found yet: a matter of seconds.",
    )] = 0  # fmt: skip
    tails: int = 0
    """How many tails can be found; their units count as blocks."""
    known_absent: int | None = None
    """Blocks that a remote store is known to lack."""
    seen_blocks: int | None = None
    """Only for a tier that does not take every block, like the next four."""
    refused_blocks: int | None = None
    writes_paused: Annotated[int | None, gauge(
        "tier_writes_paused",
        "1 while nothing is written to the tier, since nothing that was written there comes back "
        "(`skip_useless_ssd_writes`). Its blocks count as dropped, as `ssd_nothing_returns`.",
    )] = None  # fmt: skip
    refused_returns: Annotated[int | None, counter(
        "tier_refused_returns",
        "Prompts that came back and would have been found, had they been written to the tier.",
    )] = None  # fmt: skip
    dirty_blocks: int | None = None
    """Blocks that wait to be written back."""
    write_limit_bytes_per_s: int | None = None
    quotas: Annotated[dict[str, QuotaStats] | None, By("namespace")] = None
    """By tenant, `*` for those that are not named; only for a tier with quotas."""


# -- ops and tasks ---------------------------------------------------------------------------------


class OpStats(Counters):
    """Ops of one kind since startup."""

    TITLE = "Ops"

    ops: Annotated[int, counter("ops", "Ops that have ended, by kind.")] = 0
    failed_ops: Annotated[
        int, counter("failed_ops", "Ops that did not move all of their blocks.")
    ] = 0
    blocks: Annotated[int, counter("op_blocks", "Blocks that ops have moved.")] = 0
    bytes: Annotated[int, counter("op_bytes", "Bytes that ops have moved.")] = 0
    device_bytes: Annotated[int, counter(
        "op_device_bytes",
        "Bytes that the disk worker has moved on the SSD, as they are there (`ssd_compression`); 0 "
        "for ops of others.",
    )] = 0  # fmt: skip
    seconds: Annotated[float, counter(
        "op_busy_seconds",
        "Time in which at least one op of the kind was running; speed is bytes divided by it.",
    )] = 0.0  # fmt: skip
    _running: int = 0
    _busy_since_s: float = 0.0
    _counted_until_s: float = 0.0

    def started(self, now: float) -> None:
        if self._running == 0:
            self._busy_since_s = max(now, self._counted_until_s)  # a start may be told late
        self._running += 1

    def ended(
        self, now: float, num_wanted: int, num_ok: int, num_bytes: int, device_bytes: int = 0
    ) -> None:
        self.ops += 1
        self.failed_ops += num_ok < num_wanted
        self.blocks += num_ok
        self.bytes += num_bytes
        self.device_bytes += device_bytes
        self._running -= 1
        if self._running == 0:
            self.seconds += now - self._busy_since_s
            self._counted_until_s = now

    def keep_running(self, count: int, now: float) -> None:
        """Count only so many of the ops that run on; how the others ended is not known."""
        if self._running and not count:
            self.seconds += now - self._busy_since_s
        self._running = count


class TotalsStats(Counters):
    """What one engine, or all of them together, have had of the cache."""

    TITLE = "Hits and misses"

    hit_blocks: dict[str, int] = field(default_factory=Counter)
    """By tier."""
    missed_blocks: Annotated[int, counter(
        "missed_blocks",
        "Blocks requested by gets that were in no tier: the engine computes them.",
    )] = 0  # fmt: skip
    dropped_blocks: Annotated[dict[str, int], counter(
        "dropped_blocks",
        "Blocks that were not stored in some tier, or were lost from it, by reason.",
        "reason", known=_WHY_DROPPED,
    )] = field(default_factory=Counter)  # fmt: skip
    skipped_blocks: Annotated[dict[str, int], counter(
        "skipped_blocks", "Blocks that were cached but not loaded, by reason.",
        "reason", known=_WHY_SKIPPED,
    )] = field(default_factory=Counter)  # fmt: skip
    ended_tasks: Annotated[dict[str, int], counter(
        "ended_tasks", "Tasks that have ended.", "kind", "status", known=_ENDS, is_joined=True
    )] = field(default_factory=Counter)  # fmt: skip
    """By kind and status, as in ``get_success``."""
    ops: Annotated[dict[str, OpStats], By("op")] = field(
        default_factory=lambda: {kind: OpStats() for kind in OpKind}
    )


class HitRateStats(Counters):
    """Hits in one window of time."""

    TITLE = "Hits and misses"

    asked_blocks: int = 0
    hit_blocks: int = 0
    rate: Annotated[float | None, gauge(
        "hit_ratio",
        "Share of requested blocks that were found, over the last minute, 10 minutes and hour.",
    )] = None  # fmt: skip
    """None without requests: there is no ratio then, and no reason for an alert."""


class QueueStats(Counters):
    """Ops that wait for a worker, and that it was given."""

    TITLE = "Ops"

    waiting: Annotated[int, gauge(
        "waiting_ops", "Ops that are ready and wait for their turn at a worker."
    )] = 0  # fmt: skip
    running: Annotated[int, gauge(
        "running_ops",
        "Ops sent to a worker that it has not finished. device: the engines' ranks.",
    )] = 0  # fmt: skip


class LoadCostStats(Counters):
    """How fast loads of a tier were of late, by which FlexCache decides to load or to recompute."""

    blocks_per_s: float = 0.0
    seconds_per_op: float = 0.0


# -- the remote store ------------------------------------------------------------------------------


class BreakerStats(Counters):
    state: Annotated[BreakerState, gauge(
        "breaker_state",
        "1 for the current state of the remote store's circuit breaker, 0 for the others.",
        "state",
    )]  # fmt: skip
    openings: Annotated[int, counter(
        "breaker_openings", "How often the breaker opened and cut off the store."
    )] = 0  # fmt: skip
    last_reason: str = ""


class LookUpStats(Counters):
    asked: Annotated[int, counter("remote_lookups", "Lookups of a prompt in the remote store.")] = 0
    late: Annotated[int, counter(
        "late_remote_lookups", "Remote lookups that were not answered in time."
    )] = 0  # fmt: skip
    other_layouts: Annotated[int, gauge(
        "remote_other_layouts",
        "Other layouts in which the remote store was given this model: they are not found.",
    )] = 0  # fmt: skip


class RemoteStats(Counters):
    """How the remote store does."""

    TITLE = "Remote store"

    available: bool
    breaker: BreakerStats
    lookups: LookUpStats


class LoanStats(Counters):
    """Other hosts' caches, and what is lent to them."""

    TITLE = "Peers"

    up: Annotated[int, gauge("peers_up", "Other hosts' caches that answer.")] = 0
    open: int = 0
    """Loans that are not given back; their blocks are the next."""
    blocks: Annotated[int, gauge(
        "peer_lent_blocks", "Blocks of DRAM that are pinned while other hosts read them."
    )] = 0  # fmt: skip
    lent: Annotated[int, counter(
        "peer_loans",
        "Loans to other hosts: lent, refused since too much was lent already, expired since they "
        "were not given back.",
        outcome="lent",
    )] = 0  # fmt: skip
    refused: Annotated[int, counter("peer_loans", "", outcome="refused")] = 0
    expired: Annotated[int, counter("peer_loans", "", outcome="expired")] = 0
    moved: Annotated[int, counter(
        "peer_drained_blocks",
        "Blocks of drains: moved to another host, there already, left here; and taken over from "
        "another host.",
        outcome="moved",
    )] = 0  # fmt: skip
    there: Annotated[int, counter("peer_drained_blocks", "", outcome="there")] = 0
    left: Annotated[int, counter("peer_drained_blocks", "", outcome="left")] = 0
    taken: Annotated[int, counter("peer_drained_blocks", "", outcome="taken")] = 0


# -- sessions of users -----------------------------------------------------------------------------


class SessionStats(Counters):
    """Users' sessions, and what hints about them have done."""

    TITLE = "Sessions and early loads"

    known: int = 0
    """That are remembered."""
    over: Annotated[int, counter(
        "session_hints",
        "Hints about users' sessions: over, returning; unknown counts those that name no session.",
        hint="over",
    )] = 0  # fmt: skip
    returning: Annotated[int, counter("session_hints", "", hint="returning")] = 0
    unknown: Annotated[int, counter("session_hints", "", hint="unknown")] = 0
    retired_blocks: Annotated[int, counter(
        "session_hint_blocks",
        "Blocks that hints were about: retired (first to be evicted), kept, or fetched to DRAM.",
        effect="retired",
    )] = 0  # fmt: skip
    kept_blocks: Annotated[int, counter("session_hint_blocks", "", effect="kept")] = 0
    fetched_blocks: Annotated[int, counter("session_hint_blocks", "", effect="fetched")] = 0
    returned_sessions: int = 0
    """Sessions that went on after a hint that they were over."""


class ControlStats(Counters):
    """Calls of users about what is cached."""

    TITLE = "Look-ups, pins and deletes"

    calls: Annotated[dict[str, int], counter(
        "control_calls", "Calls about what is cached.", "call",
        known=("lookup", "pin", "unpin", "delete"),
    )] = field(default_factory=Counter)  # fmt: skip
    pins: int = 0
    """That hold now."""
    refused_pins: Annotated[dict[str, int], counter(
        "refused_pins",
        "Pins that were refused: nothing was cached, or the tiers had no room for more of them.",
        "reason", known=("not_cached", "no_room"),
    )] = field(default_factory=Counter)  # fmt: skip
    ended_pins: Annotated[dict[str, int], counter(
        "ended_pins",
        "Pins that have ended: their time was over; by a call, a clear or other weights; their "
        "blocks were lost.",
        "reason", known=_WHY_UNPINNED,
    )] = field(default_factory=Counter)  # fmt: skip
    deleted_blocks: Annotated[dict[str, int], counter(
        "deleted_blocks", "Blocks that users have deleted.", "tier"
    )] = field(default_factory=Counter)  # fmt: skip


class EarlyLoadStats(Counters):
    """Loads to DRAM ahead of their requests, in blocks."""

    TITLE = "Sessions and early loads"

    open_blocks: int = 0
    """On their way, or waiting for their request."""
    early: Annotated[int, counter(
        "early_load_blocks",
        "Blocks that were loaded to DRAM ahead of their request: early, there when it asked; late, "
        "still on their way; wasted, not asked for in time.",
        outcome="early",
    )] = 0  # fmt: skip
    late: Annotated[int, counter("early_load_blocks", "", outcome="late")] = 0
    wasted: Annotated[int, counter("early_load_blocks", "", outcome="wasted")] = 0


# -- the whole -------------------------------------------------------------------------------------


class CacheIdentity(Counters):
    """What is cached."""

    TITLE = "Server"

    fingerprint: str
    layout: str
    """Empty until the first rank has said."""
    block_bytes: Annotated[int, gauge("block_bytes", "Size of a block over all ranks.")]
    tokens_per_block: Annotated[int, gauge("block_tokens", "Tokens per block.")]


class CacheStats(Counters):
    """The tiers, and the tasks that use them."""

    TITLE = "Tasks"

    identity: CacheIdentity
    totals: TotalsStats
    hit_rate: Annotated[dict[str, HitRateStats], By("window")]
    tiers: Annotated[dict[str, TierStats], By("tier")]
    """Fastest first."""
    tasks: Annotated[dict[str, int], gauge("tasks", "Open tasks by state.", "state")]
    op_seconds: Annotated[dict[str, Histogram], histogram(
        "op_duration_seconds", "Time from an op's start at its worker to its end.", "op"
    )]  # fmt: skip
    task_seconds: Annotated[dict[str, Histogram], histogram(
        "task_duration_seconds", "Time from a task's launch to its answer.", "kind"
    )]  # fmt: skip
    queues: Annotated[dict[str, QueueStats], By("worker")]
    """``device`` stands for the engines' ranks."""
    unlaunched_tasks: int
    open_lookups: Annotated[int, gauge(
        "open_lookups", "Remote lookups that have not been answered yet."
    )]  # fmt: skip
    store_backlog_blocks: Annotated[int, gauge(
        "store_backlog_blocks",
        "Blocks in DRAM that are pinned until they are written to a tier below.",
    )]  # fmt: skip
    sessions: SessionStats
    early_loads: EarlyLoadStats
    control: ControlStats
    retention_s: float | None = None
    """Blocks that were not used for this long are dropped."""
    remote: RemoteStats | None = None
    peers: LoanStats | None = None
    load_cost: dict[str, LoadCostStats] | None = None
    """By tier, and ``SSD past DRAM``."""
    failing: dict[str, str] = {}
    """Why ops of SSD and store failed in the last minute, by kind."""


class EngineStats(Counters):
    """A serving engine in session."""

    pid: int
    open_tasks: Annotated[
        int, gauge("engine_open_tasks", "Tasks of an engine that have not ended.")
    ]
    ranks: Annotated[int, gauge(
        "engine_ranks", "Ranks of an engine that are registered and serving."
    )]  # fmt: skip


class ServerCounters(Counters):
    """Trouble since the server's start."""

    rejected_messages: Annotated[dict[str, int], counter(
        "rejected_messages", "Messages that were refused, by reason.",
        "reason", known=_WHY_REJECTED,
    )] = field(default_factory=Counter)  # fmt: skip
    failed_messages: Annotated[int, counter(
        "failed_messages",
        "Messages that the server failed to handle: a bug; its log has the traceback.",
    )] = 0  # fmt: skip
    cache_forgotten: Annotated[int, counter(
        "cache_forgotten",
        "How often all tiers were emptied after an error while they changed: a bug, or no memory.",
    )] = 0  # fmt: skip
    unread_messages: Annotated[int, counter(
        "unread_messages", "Messages that a client did not read in time."
    )] = 0  # fmt: skip
    expired_clients: Annotated[int, counter(
        "expired_clients", "Clients that were considered dead because they were silent."
    )] = 0  # fmt: skip
    worker_deaths: dict[str, int] = field(default_factory=Counter)
    """By worker."""


class EventStats(Counters):
    """KV events, in batches. Publisher and engine are each only there if there is one."""

    TITLE = "Events and traces"

    published_batches: Annotated[int | None, counter(
        "published_event_batches", "Batches of KV events that were sent."
    )] = None  # fmt: skip
    dropped_batches: Annotated[int | None, counter(
        "dropped_event_batches",
        "Batches dropped unsent because too many were waiting: subscribers see a gap.",
    )] = None  # fmt: skip
    queued_batches: Annotated[int | None, gauge(
        "queued_event_batches", "Batches waiting to be sent."
    )] = None  # fmt: skip
    sequence: int | None = None
    """Number of the next batch."""
    replayed_batches: Annotated[int | None, counter(
        "replayed_event_batches", "Batches resent to subscribers that had missed them."
    )] = None  # fmt: skip
    snapshot_pages: int | None = None
    bad_replay_requests: int | None = None
    untaken_batches: int = 0
    lost_batches: int = 0
    """Lost because too many were waiting for the engine."""


class TraceStats(Counters):
    TITLE = "Events and traces"

    lines: int
    dropped_lines: Annotated[int, counter(
        "dropped_trace_lines", "Lines missing from the trace because its writer was behind."
    )]  # fmt: skip
    bytes: int
    file: str
    """The one being written."""


class ServerStats(Counters):
    """The process that keeps the cache."""

    TITLE = "Server"

    version: Annotated[str, gauge(
        "build_info", "Always 1; the label is the running version.", "version"
    )]  # fmt: skip
    uptime_s: Annotated[float, gauge("uptime_seconds", "Time since startup.")]
    endpoint: str
    server_pid: int
    workers: dict[str, int]
    """Process ids of ranks, disk and remote worker that are up."""
    worker_restarts: Annotated[dict[str, int], counter(
        "worker_restarts", "How often a worker's process was restarted.", "worker"
    )]  # fmt: skip
    worker_up: Annotated[dict[str, bool], gauge(
        "worker_up", "1 while the worker's process runs.", "worker"
    )]  # fmt: skip
    events: EventStats | None = None
    trace: TraceStats | None = None
    missing: list[str] = []
    """Workers, ranks and observers that should be there and are not."""


class Stats(Counters):
    """Everything that a server tells of itself."""

    TITLE = "Processes and messages"

    server: ServerStats
    counters: ServerCounters
    engines: Annotated[dict[str, EngineStats], By("engine")]
    cache: CacheStats | None = None
    """None before the first engine has said what to cache."""
    engine: Annotated[TotalsStats | None, UNSERVED] = None
    """What the session that asks has had."""
    trouble: list[str] = []
    """What `find_trouble` says; `to_plain` adds it."""


def to_plain(stats: Stats) -> dict[str, Any]:
    """The same as nested dictionaries of numbers and strings, with their trouble, the server's and
    the cache's parts side by side: what `KVManager.stats` returns."""
    plain: dict[str, Any] = counters.plain(stats) | {"trouble": list(find_trouble(stats))}
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
        return counters.from_plain(Stats, parts)
    except (msgspec.ValidationError, ValueError) as error:
        version = plain.get("version", "unknown")
        reason = f"statistics of a server of version {version} cannot be read: {error}"
        raise FlexCacheError(reason) from None


# -- for people ------------------------------------------------------------------------------------

_NEARLY_ALL = 0.9
_FALLEN = 0.5
_ENOUGH_BLOCKS = 1000
_WITHOUT_WORKER = {
    "disk worker": "What is on SSD is not found, and nothing is written there.",
    "remote worker": "What is in the remote store is not found, and nothing is written there.",
    "peer worker": "Nothing is read from other hosts.",
}

_FAILING = {
    "H2DISK": "Writes to SSD", "DISK2H": "Reads from SSD", "D2DISK": "Writes past DRAM to SSD",
    "DISK2D": "Reads past DRAM from SSD", "COMMIT": "Records of blocks on SSD",
    "H2REMOTE": "Writes to the remote store", "REMOTE2H": "Reads from the remote store",
}  # fmt: skip


def find_trouble(stats: Stats) -> Iterator[str]:
    """Yield a sentence for each thing that costs hits now."""
    for part in stats.server.missing:
        yield f"Missing: {part}. {_WITHOUT_WORKER.get(part, 'The log says why.')}"
    if not stats.engines:
        yield "No engine is connected."
    if stats.cache is not None:
        yield from _of_tiers(stats.cache)
        yield from _of_hit_rate(stats.cache.hit_rate)


def _of_tiers(cache: CacheStats) -> Iterator[str]:
    host = cache.tiers.get(TierName.CPU.value)
    if host is not None and host.leased > _NEARLY_ALL * host.capacity:
        yield "Running tasks hold nearly all of DRAM: new blocks find no room."
    failing = dict(cache.failing)
    if cache.remote is not None and cache.remote.breaker.state is not BreakerState.CLOSED:
        yield f"The remote store is cut off: {cache.remote.breaker.last_reason}."
        for of_store in (OpKind.H2REMOTE, OpKind.REMOTE2H):
            failing.pop(of_store, None)
    for kind, error in failing.items():
        yield f"{_FAILING[kind]} failed in the last minute: {error}."
    if cache.peers is not None and not cache.peers.up:
        yield "No other host's cache answers."


def _of_hit_rate(windows: Mapping[str, HitRateStats]) -> Iterator[str]:
    lately, before = windows.get("10m", HitRateStats()), windows.get("1h", HitRateStats())
    if lately.rate is None or before.rate is None or lately.asked_blocks < _ENOUGH_BLOCKS:
        return
    if lately.rate < _FALLEN * before.rate:
        yield f"The hit rate fell: {lately.rate:.0%} in ten minutes, {before.rate:.0%} in the hour."


class MinuteStats(Counters):
    """What gets of one minute have found."""

    minutes_ago: int
    """By the clock: 0 is the minute that is not over."""
    hit_blocks: dict[str, int] = field(default_factory=Counter)
    missed_blocks: int = 0


class UserSession(Counters):
    """A session of a user that was active lately."""

    session_id: str
    prompts: int
    """That are remembered of it."""
    blocks: int
    """In its last prompt."""
    tier: str | None = None
    """The fastest that has all of them; None if none does any more."""
    is_over: bool = False
    returns_in_s: float | None = None
    """As its user has said."""


class PeerLine(Counters):
    """The line to another host's cache."""

    name: str
    state: str
    reason: str = ""
    """Why it failed last."""
    answer_s: float = 0.0
    """How long its answers take."""


class Lately(Counters):
    """What a server tells people, besides its figures."""

    time: float
    """Now, in seconds since 1970, as of `events`."""
    minutes: list[MinuteStats] = []
    sessions: list[UserSession] = []
    """The largest of those that were active last."""
    peers: list[PeerLine] = []
    events: list[NotedEvent] = []
    """Warnings and errors of the process, the latest first."""
