"""View: a server's statistics as tables. A narrow terminal drops the least important columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flexcache.ids import TierName
from flexcache.status.rates import Rates
from flexcache.tasks.stats import (
    CacheStats,
    EngineStats,
    OpStats,
    RemoteStats,
    ServerStats,
    Stats,
    TierStats,
    TraceStats,
)

_REMOTE = TierName.REMOTE.value  # FlexCache does not know the store's capacity
_GAP = 2
_WIDE = 100
_BAR = {True: 20, False: 8}
"""Characters of an occupancy bar, by whether the view is at least `_WIDE` characters wide."""

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class _Column(Generic[Row]):
    """A column. In a narrow view the highest ``rank`` is dropped first; rank 0 always stays."""

    title: str
    value: Callable[[str, Row], str | Text]
    rank: int = 0
    is_number: bool = True


def render(stats: Stats, rates: Rates | None, width: int) -> Group:
    """Render one reading of a server.

    Args:
        rates: Changes since the previous reading; None if unknown.
        width: Characters per line.
    """
    server, cache = stats.server, stats.cache
    parts: list[RenderableType] = [_title(stats)]
    if cache is None:
        parts.append(Text("waiting for the first engine to define the model", "yellow"))
    else:
        parts += [_tiers(cache, rates, width), *_hits(cache, rates), _ops(cache, rates, width)]
        parts += _work(cache)
    parts += [table for table in (_workers(server, width), _engines(stats.engines, width)) if table]
    parts += _others(stats)
    return Group(*parts)


def _title(stats: Stats) -> Text:
    server = stats.server
    text = Text(f"{server.endpoint}, process {server.server_pid}", "bold")
    up = _duration(server.uptime_s)
    text.append(f"\nflexcache {server.version}, up {up}", "not bold")
    if stats.cache is not None:
        text.append(f"\n{stats.cache.identity.fingerprint}", "not bold dim")
    return text


# -- tables ----------------------------------------------------------------------------------------


def _table(columns: Sequence[_Column[Row]], rows: Mapping[str, Row], width: int) -> Table | None:
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


def _name(name: str, _: object) -> str:
    return name


def _number(count: Callable[[Row], int]) -> Callable[[str, Row], str]:
    return lambda _, row: f"{count(row):,}"


def _tiers(cache: CacheStats, rates: Rates | None, width: int) -> Table:
    def capacity(name: str, tier: TierStats) -> str:
        return "-" if name == _REMOTE else f"{tier.capacity:,}"

    def occupancy(name: str, tier: TierStats) -> Text:
        if not tier.available:
            return Text("unavailable", "red")
        if name == _REMOTE:
            return Text("unknown", "dim")
        return _bar(tier.indexed, tier.leased, tier.capacity, _BAR[width >= _WIDE])

    def eviction_rate(name: str, _: TierStats) -> str:
        return "-" if rates is None else f"{rates.evicted_blocks[name]:,.0f}"

    columns: list[_Column[TierStats]] = [
        _Column("tier", _name, is_number=False),
        _Column("occupancy", occupancy, is_number=False),
        _Column("blocks", capacity, 1),
        _Column("indexed", _number(lambda tier: tier.indexed), 1),
        _Column("leased", _number(lambda tier: tier.leased), 3),
        _Column("hits", _number(lambda tier: tier.hit_blocks)),
        _Column("misses", _number(lambda tier: tier.miss_blocks), 4),
        _Column("stored", _number(lambda tier: tier.stored_blocks), 6),
        _Column("dropped", _number(lambda tier: tier.dropped_blocks), 7),
        _Column("evicted", _number(lambda tier: tier.evicted_blocks), 2),
        _Column("evicted/s", eviction_rate, 5),
    ]
    table = _table(columns, cache.tiers, width)
    assert table is not None
    return table


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

    columns: list[_Column[OpStats]] = [
        _Column("ops", _name, is_number=False),
        _Column("GB/s now", now),
        _Column("while busy", while_busy, 1),
        _Column("GB", lambda _, op: f"{op.bytes / 1e9:,.2f}"),
        _Column("count", _number(lambda op: op.ops), 2),
        _Column("blocks", _number(lambda op: op.blocks), 3),
        _Column("failed", _number(lambda op: op.failed_ops)),
    ]
    ended = {kind: op for kind, op in cache.totals.ops.items() if op.ops}
    return _table(columns, ended, width) or Text("no op has ended yet", "dim")


def _workers(server: ServerStats, width: int) -> Table | None:
    """Return workers and ranks, each with its number of restarts."""
    rows = {name: server.worker_restarts.get(name, 0) for name in sorted(server.workers)}
    rows |= server.worker_restarts

    def pid(name: str, _: int) -> Text:
        there = server.workers.get(name)
        return Text("down", "red") if there is None else Text(str(there))

    columns: list[_Column[int]] = [
        _Column("worker", _name, is_number=False),
        _Column("process", pid),
        _Column("restarts", _number(lambda restarts: restarts)),
    ]
    return _table(columns, dict(sorted(rows.items())), width)


def _engines(engines: Mapping[str, EngineStats], width: int) -> Table | None:
    columns: list[_Column[EngineStats]] = [
        _Column("engine", _name, is_number=False),
        _Column("process", lambda _, engine: str(engine.pid)),
        _Column("ranks", _number(lambda engine: engine.ranks)),
        _Column("open tasks", _number(lambda engine: engine.open_tasks)),
    ]
    return _table(columns, engines, width)


# -- lines -----------------------------------------------------------------------------------------


def _line(title: str, *told: str) -> Text:
    return Text.assemble((f"{title}: ", "bold cyan"), ", ".join(filter(None, told)))


def _hits(cache: CacheStats, rates: Rates | None) -> Iterator[Text]:
    if rates is not None:
        asked = rates.hit_tokens + rates.missed_tokens
        yield _line(
            f"last {rates.seconds:.1f} s",
            f"{rates.hit_tokens:,.0f} of {asked:,.0f} requested tokens/s found",
            f"{rates.ended_tasks:,.0f} tasks/s",
        )
    windows = cache.hit_rate.items()
    known = [f"{window.rate:.1%} in {name}" for name, window in windows if window.asked_blocks]
    yield _line("hit rate", *known or ["no requests yet"])


def _work(cache: CacheStats) -> Iterator[Text]:
    unlaunched = _counts({"not launched": cache.unlaunched_tasks})
    yield _line("tasks", _counts(cache.tasks) or "none", unlaunched)
    yield _line("ended", _by_kind(cache.totals.ended_tasks) or "none")
    waiting = [
        f"{name} {queue.waiting:,} + {queue.running:,}"
        for name, queue in cache.queues.items()
        if queue.waiting or queue.running
    ]
    backlog = {"blocks to store": cache.store_backlog_blocks}
    look_ups = {"lookups": cache.open_lookups}
    yield _line("waiting + running", *waiting or ["none"], _counts(backlog), _counts(look_ups))


def _others(stats: Stats) -> Iterator[Text]:
    """Yield the lines that appear only if they have something to show."""
    server, cache = stats.server, stats.cache
    if cache is not None and cache.remote is not None:
        yield _remote(cache.remote)
    for title, counts in (
        ("blocks not stored", cache.totals.dropped_blocks if cache else {}),
        ("blocks not loaded", cache.totals.skipped_blocks if cache else {}),
        ("counters", stats.counters),
        ("KV events", msgspec.to_builtins(server.events) if server.events else {}),
    ):
        if told := _counts(counts):
            yield _line(title, told)
    decided: dict[str, int] = {}
    for tier, decision in (cache.load_decisions if cache else {}).items():
        decided |= {f"{tier} load": decision.load, f"{tier} recompute": decision.recompute}
    if any(decided.values()):
        yield _line("load or recompute, in blocks", _counts(decided))
    if server.trace is not None:
        yield _trace(server.trace)


def _trace(trace: TraceStats) -> Text:
    lines = {"lines": trace.lines, "dropped": trace.dropped_lines}
    return _line("trace", _counts(lines), f"{trace.bytes / 1e6:,.1f} MB", trace.file)


def _remote(remote: RemoteStats) -> Text:
    breaker, lookups = remote.breaker, remote.lookups
    line = _line("remote store", "available" if remote.available else "")
    if not remote.available:
        line.append("not available", "red")
    if breaker.state != "closed":
        line.append(f", breaker {breaker.state} ({breaker.last_reason})", "red")
    return line.append(
        f", breaker opened {breaker.openings:,} times; {lookups.asked:,} lookups, "
        f"{lookups.late:,} answered late"
    )


def _counts(counts: Mapping[str, int]) -> str:
    """Format the counts that are not zero."""
    return ", ".join(f"{key.replace('_', ' ')} {n:,}" for key, n in counts.items() if n)


def _by_kind(ended: Mapping[str, int]) -> str:
    """Format counts named like ``get_success``, grouped by kind of task."""
    kinds: dict[str, dict[str, int]] = {}
    for name, count in sorted(ended.items()):
        kind, _, how = name.partition("_")
        kinds.setdefault(kind, {})[how] = count
    return "; ".join(f"{kind} {_counts(counts)}" for kind, counts in kinds.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
