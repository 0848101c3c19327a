"""View of a server: its statistics, and their changes, as tables that fit a width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flexcache.counters import plain
from flexcache.ids import TierName
from flexcache.stats import (
    CacheStats,
    EngineStats,
    OpStats,
    QuotaStats,
    RemoteStats,
    ServerCounters,
    ServerStats,
    Stats,
    TierStats,
    TotalsStats,
)

_GAP = 2

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column. In a narrow view the highest ``rank`` is dropped first; rank 0 always stays."""

    title: str
    value: Callable[[str, Row], str | Text]
    rank: int = 0
    is_number: bool = True


def table_of(columns: Sequence[Column[Row]], rows: Mapping[str, Row], width: int) -> Table | None:
    """Return a table with one row per entry; None without entries."""
    if not rows:
        return None
    cells = {column: [column.value(name, row) for name, row in rows.items()] for column in columns}
    widths = {
        column: _GAP + max(map(len, (column.title, *texts))) for column, texts in cells.items()
    }
    shown = list(columns)
    while sum(widths[column] for column in shown) - _GAP > width:
        least = max(shown, key=lambda column: column.rank)
        if not least.rank:
            break
        shown.remove(least)
    table = Table(box=None, pad_edge=False, header_style="bold cyan", padding=(0, _GAP, 0, 0))
    for column in shown:
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[column] for column in shown), strict=True):
        table.add_row(*map(_plain, row))
    return table


def _plain(cell: str | Text) -> Text:
    """Return a cell as plain text: names come from engines and are not markup."""
    return cell if isinstance(cell, Text) else Text(cell)


def entry_name(name: str, _: object) -> str:
    return name


def number(count: Callable[[Row], int]) -> Callable[[str, Row], str]:
    return lambda _, row: f"{count(row):,}"


def titled(title: str, *told: str) -> Text:
    return Text.assemble((f"{title}: ", "bold cyan"), ", ".join(filter(None, told)))


def listed(counts: Mapping[str, int]) -> str:
    """Format the counts that are not zero."""
    return ", ".join(f"{key.replace('_', ' ')} {n:,}" for key, n in counts.items() if n)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, averaged over ``seconds``.

    Attributes:
        hit_tokens: Tokens found, in any tier.
        missed_tokens: Tokens requested and not found.
        ended_tasks: Tasks of any kind that ended, with any outcome.
        op_bytes: Bytes moved, by kind of op.
        evicted_blocks: Blocks evicted, by tier.
    """

    seconds: float
    hit_tokens: float
    missed_tokens: float
    ended_tasks: float
    op_bytes: Mapping[str, float]
    evicted_blocks: Mapping[str, float]


def rates_between(before: Stats, after: Stats, seconds: float) -> Rates | None:
    """Return the rates between two readings, or None if the readings are not comparable.

    They are not if another server answered, or if the server had no engine yet in one of them. In
    a container a restarted server has the same process id as before.
    """
    is_another = before.server.server_pid != after.server.server_pid
    if is_another or after.server.uptime_s < seconds:
        return None
    if before.cache is None or after.cache is None:
        return None
    was, now = before.cache.totals, after.cache.totals
    per_block = after.cache.identity.tokens_per_block / seconds
    return Rates(
        seconds,
        hit_tokens=(_sum(now.hit_blocks) - _sum(was.hit_blocks)) * per_block,
        missed_tokens=(now.missed_blocks - was.missed_blocks) * per_block,
        ended_tasks=(_sum(now.ended_tasks) - _sum(was.ended_tasks)) / seconds,
        op_bytes={kind: (op.bytes - was.ops[kind].bytes) / seconds for kind, op in now.ops.items()},
        evicted_blocks=_evicted(before.cache, after.cache, seconds),
    )


def _evicted(before: CacheStats, after: CacheStats, seconds: float) -> dict[str, float]:
    return {
        name: (tier.evicted_blocks - before.tiers[name].evicted_blocks) / seconds
        for name, tier in after.tiers.items()
    }


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


_ELSEWHERE = (TierName.PEER.value, TierName.REMOTE.value)  # their capacities are not known
_WIDE = 100
_BAR = {True: 20, False: 8}
"""Characters of an occupancy bar, by whether the view is at least `_WIDE` characters wide."""


def render(stats: Stats, rates: Rates | None, width: int) -> Group:
    """Render one reading of a server.

    Args:
        rates: Changes since the previous reading; None if unknown.
        width: Characters per line.
    """
    server, cache = stats.server, stats.cache
    parts: list[RenderableType] = [_title(stats)]
    parts += [Text(f"! {sentence}", "yellow") for sentence in stats.trouble]
    if cache is None:
        parts.append(Text("waiting for the first engine to define the model", "yellow"))
    else:
        parts += [_tiers(cache, rates, width), *_quotas(cache, width), *_hits(cache, rates)]
        parts.append(_ops(cache, rates, width))
        parts += _work(cache)
    parts += [table for table in (_workers(server, width), _engines(stats.engines, width)) if table]
    parts += _others(stats)
    return Group(*parts)


def _title(stats: Stats) -> Text:
    server = stats.server
    text = Text(f"{server.endpoint}, process {server.server_pid}", "bold")
    up = duration(server.uptime_s)
    text.append(f"\nflexcache {server.version}, up {up}", "not bold")
    if stats.cache is not None:
        text.append(f"\n{stats.cache.identity.fingerprint}", "not bold dim")
    return text


# -- tables ----------------------------------------------------------------------------------------


def _tiers(cache: CacheStats, rates: Rates | None, width: int) -> Table:
    def capacity(name: str, tier: TierStats) -> str:
        return "-" if name in _ELSEWHERE else f"{tier.capacity:,}"

    def occupancy(name: str, tier: TierStats) -> Text:
        if not tier.available:
            return Text("unavailable", "red")
        if name in _ELSEWHERE:
            return Text("unknown", "dim")
        return _bar(tier.indexed, tier.leased, tier.capacity, _BAR[width >= _WIDE])

    def eviction_rate(name: str, _: TierStats) -> str:
        return "-" if rates is None else f"{rates.evicted_blocks[name]:,.0f}"

    columns: list[Column[TierStats]] = [
        Column("tier", entry_name, is_number=False),
        Column("occupancy", occupancy, is_number=False),
        Column("blocks", capacity, 1),
        Column("indexed", number(lambda tier: tier.indexed), 1),
        Column("leased", number(lambda tier: tier.leased), 3),
        Column("hits", number(lambda tier: tier.hit_blocks)),
        Column("misses", number(lambda tier: tier.miss_blocks), 4),
        Column("stored", number(lambda tier: tier.stored_blocks), 6),
        Column("dropped", number(lambda tier: tier.dropped_blocks), 7),
        Column("evicted", number(lambda tier: tier.evicted_blocks), 2),
        Column("evicted/s", eviction_rate, 5),
    ]
    table = table_of(columns, cache.tiers, width)
    assert table is not None
    return table


def _quotas(cache: CacheStats, width: int) -> Iterator[Table]:
    """Yield who has how much of the tiers, if there are quotas."""

    def hit_rate(_: str, part: QuotaStats) -> str:
        asked = part.hit + part.missed
        return f"{part.hit / asked:.1%}" if asked else "-"

    columns: list[Column[QuotaStats]] = [
        Column("namespace", entry_name, is_number=False),
        Column("quota", number(lambda part: part.quota)),
        Column("used", number(lambda part: part.used)),
        Column("hit rate", hit_rate),
        Column("evicted", number(lambda part: part.evicted), 1),
    ]
    rows = {
        f"{tenant} {tier}": part
        for tier, parts in cache.tiers.items()
        for tenant, part in (parts.quotas or {}).items()
    }
    table = table_of(columns, rows, width)
    if table is not None:
        yield table


def _bar(indexed: int, leased: int, capacity: int, length: int) -> Text:
    """Draw indexed blocks, those held by tasks, and free ones."""
    held = round((indexed + leased) / capacity * length)
    in_use = round(leased / capacity * length)
    bar = Text("█" * (held - in_use), "green")
    bar.append("█" * in_use, "yellow").append("·" * (length - held), "dim")
    return bar.append(f" {(indexed + leased) / capacity:>4.0%}", "default")


def _ops(cache: CacheStats, rates: Rates | None, width: int) -> RenderableType:
    def now(kind: str, _: OpStats) -> str:
        return "-" if rates is None else f"{rates.op_bytes[kind] / 1e9:.2f}"

    def while_busy(_: str, op: OpStats) -> str:
        return f"{op.bytes / op.seconds / 1e9:.2f}" if op.seconds else "-"

    def on_device(_: str, op: OpStats) -> str:
        return f"{op.device_bytes / 1e9:,.2f}" if op.device_bytes else "-"

    columns: list[Column[OpStats]] = [
        Column("ops", entry_name, is_number=False),
        Column("GB/s now", now),
        Column("while busy", while_busy, 1),
        Column("GB", lambda _, op: f"{op.bytes / 1e9:,.2f}"),
        Column("on SSD", on_device, 4),
        Column("count", number(lambda op: op.ops), 2),
        Column("blocks", number(lambda op: op.blocks), 3),
        Column("failed", number(lambda op: op.failed_ops)),
    ]
    ended = {kind: op for kind, op in cache.totals.ops.items() if op.ops}
    return table_of(columns, ended, width) or Text("no op has ended yet", "dim")


def _workers(server: ServerStats, width: int) -> Table | None:
    """Return workers and ranks, each with its number of restarts."""
    rows = {name: server.worker_restarts.get(name, 0) for name in sorted(server.workers)}
    rows |= server.worker_restarts

    def pid(name: str, _: int) -> Text:
        there = server.workers.get(name)
        return Text("down", "red") if there is None else Text(str(there))

    columns: list[Column[int]] = [
        Column("worker", entry_name, is_number=False),
        Column("process", pid),
        Column("restarts", number(lambda restarts: restarts)),
    ]
    return table_of(columns, dict(sorted(rows.items())), width)


def _engines(engines: Mapping[str, EngineStats], width: int) -> Table | None:
    columns: list[Column[EngineStats]] = [
        Column("engine", entry_name, is_number=False),
        Column("process", lambda _, engine: str(engine.pid)),
        Column("ranks", number(lambda engine: engine.ranks)),
        Column("open tasks", number(lambda engine: engine.open_tasks)),
    ]
    return table_of(columns, engines, width)


# -- lines -----------------------------------------------------------------------------------------


def _hits(cache: CacheStats, rates: Rates | None) -> Iterator[Text]:
    if rates is not None:
        asked = rates.hit_tokens + rates.missed_tokens
        yield titled(
            f"last {rates.seconds:.1f} s",
            f"{rates.hit_tokens:,.0f} of {asked:,.0f} requested tokens/s found",
            f"{rates.ended_tasks:,.0f} tasks/s",
        )
    windows = cache.hit_rate.items()
    known = [f"{each.rate:.1%} in {name}" for name, each in windows if each.rate is not None]
    yield titled("hit rate", *known or ["no requests yet"])


def _work(cache: CacheStats) -> Iterator[Text]:
    unlaunched = listed({"not launched": cache.unlaunched_tasks})
    yield titled("tasks", listed(cache.tasks) or "none", unlaunched)
    yield titled("ended", _by_kind(cache.totals.ended_tasks) or "none")
    waiting = [
        f"{name} {queue.waiting:,} + {queue.running:,}"
        for name, queue in cache.queues.items()
        if queue.waiting or queue.running
    ]
    backlog = {"blocks to store": cache.store_backlog_blocks}
    look_ups = {"lookups": cache.open_lookups}
    yield titled("waiting + running", *waiting or ["none"], listed(backlog), listed(look_ups))


def _others(stats: Stats) -> Iterator[Text]:
    """Yield the lines that appear only if they have something to show."""
    server, cache = stats.server, stats.cache
    totals = TotalsStats() if cache is None else cache.totals
    if cache is not None:
        yield from _other_hosts(cache)
    if cache is not None and (limits := list(_limits(cache))):
        yield titled("limits", *limits)
    for title, counts in (
        ("blocks not stored", totals.dropped_blocks),
        ("blocks not loaded", totals.skipped_blocks),
        ("counters", _trouble(stats.counters)),
        ("KV events", plain(server.events) if server.events else {}),
    ):
        if told := listed(counts):
            yield titled(title, told)
    if cache is not None and (decided := _decided(cache)):
        yield titled("load or recompute, in blocks", decided)
    if (trace := server.trace) is not None:
        lines = {"lines": trace.lines, "dropped": trace.dropped_lines}
        yield titled("trace", listed(lines), f"{trace.bytes / 1e6:,.1f} MB", trace.file)


def _decided(cache: CacheStats) -> str:
    """Format how many blocks below DRAM were loaded, and computed since that is faster."""
    decided, totals = dict[str, int](), cache.totals
    for tier in list(cache.tiers)[1:]:
        skipped = totals.skipped_blocks.get(f"{tier.lower()}_slower_than_recompute", 0)
        decided |= {f"{tier} load": totals.hit_blocks.get(tier, 0), f"{tier} recompute": skipped}
    return listed(decided)


def _trouble(counters: ServerCounters) -> dict[str, int]:
    counts: dict[str, Any] = plain(counters)
    rejected, deaths = counts.pop("rejected_messages"), counts.pop("worker_deaths")
    counts |= {f"rejected_{why}": count for why, count in rejected.items()}
    return counts | {f"{worker}_worker_deaths": count for worker, count in deaths.items()}


def _limits(cache: CacheStats) -> Iterator[str]:
    for name, tier in cache.tiers.items():
        if (limit := tier.write_limit_bytes_per_s) is not None:
            throttled = cache.totals.dropped_blocks.get(f"{name.lower()}_write_throttled", 0)
            yield f"{name} writes {limit / 1e6:,g} MB/s, {throttled:,} blocks throttled"
    if cache.retention_s is not None:
        expired = {name: tier.expired_blocks for name, tier in cache.tiers.items()}
        kept = duration(cache.retention_s)
        yield f"unused blocks kept {kept}, expired: {listed(expired) or 'none'}"


def _other_hosts(cache: CacheStats) -> Iterator[Text]:
    if (peers := cache.peers) is not None:
        lent = {"blocks lent": peers.blocks, "loans": peers.lent}
        lent |= {"refused": peers.refused, "expired": peers.expired}
        lent |= {"handed over": peers.moved, "taken over": peers.taken}
        yield titled("peers", f"{peers.up:,} answer", listed(lent))
    if cache.remote is not None:
        yield _remote(cache.remote)


def _remote(remote: RemoteStats) -> Text:
    breaker, lookups = remote.breaker, remote.lookups
    line = titled("remote store", "available" if remote.available else "")
    if not remote.available:
        line.append("not available", "red")
    if breaker.state != "closed":
        line.append(f", breaker {breaker.state.value} ({breaker.last_reason})", "red")
    line.append(
        f", breaker opened {breaker.openings:,} times; {lookups.asked:,} lookups, "
        f"{lookups.late:,} answered late"
    )
    if lookups.other_layouts:
        line.append(f"; has the model in {lookups.other_layouts} other layouts")
    return line


def _by_kind(ended: Mapping[str, int]) -> str:
    """Format counts named like ``get_success``, grouped by kind of task."""
    kinds: dict[str, dict[str, int]] = {}
    for name, count in sorted(ended.items()):
        kind, _, how = name.partition("_")
        kinds.setdefault(kind, {})[how] = count
    return "; ".join(f"{kind} {listed(counts)}" for kind, counts in kinds.items())
