"""A look at a server as tables. Where the width does not do, the columns that matter least go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flexcache.ids import TierName
from flexcache.status.rates import Rates, Stats

_REMOTE = TierName.REMOTE.value  # whose capacity is the store's business, not ours
_GAP = 2
_WIDE = 100
_BAR = {True: 20, False: 8}
"""Characters of an occupancy bar: where there are `_WIDE` for all, and where not."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Where the width does not do, the column of the highest ``rank`` goes first; 0 stays."""

    title: str
    value: Callable[[str, Mapping[str, Any]], str | Text]
    rank: int = 0
    is_number: bool = True


def render(stats: Stats, rates: Rates | None, width: int) -> Group:
    """
    Args:
        rates: What has happened since the look before; None if that is not known.
        width: Characters that there are.
    """
    parts: list[RenderableType] = [_title(stats)]
    if not stats["tiers"]:
        parts.append(Text("no engine yet: nothing is decided", "yellow"))
    else:
        parts += [_tiers(stats, rates, width), *_hits(stats, rates), _ops(stats, rates, width)]
        parts += _work(stats)
    parts += [table for table in (_workers(stats, width), _engines(stats, width)) if table]
    parts += _others(stats)
    return Group(*parts)


def _title(stats: Stats) -> Text:
    text = Text(f"{stats['endpoint']}, process {stats['server_pid']}", "bold")
    up = _duration(stats["uptime_s"])
    text.append(f"\nflexcache {stats['version']}, up {up}", "not bold")
    if "fingerprint" in stats:
        text.append(f"\n{stats['fingerprint']}", "not bold dim")
    return text


# -- tables ----------------------------------------------------------------------------------------


def _table(
    columns: Sequence[_Column], rows: Mapping[str, Mapping[str, Any]], width: int
) -> Table | None:
    """A row for each entry; None where there is none."""
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
    """Names come from engines: what looks like markup in them is none."""
    return cell if isinstance(cell, Text) else Text(cell)


def _name(name: str, _: Mapping[str, Any]) -> str:
    return name


def _number(key: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda _, row: f"{row[key]:,}"


def _tiers(stats: Stats, rates: Rates | None, width: int) -> Table:
    def capacity(name: str, tier: Mapping[str, Any]) -> str:
        return "-" if name == _REMOTE else f"{tier['capacity']:,}"

    def occupancy(name: str, tier: Mapping[str, Any]) -> Text:
        if not tier["available"]:
            return Text("unavailable", "red")
        if name == _REMOTE:
            return Text("as known", "dim")
        return _bar(tier["indexed"], tier["leased"], tier["capacity"], _BAR[width >= _WIDE])

    def eviction_rate(name: str, _: Mapping[str, Any]) -> str:
        return "-" if rates is None else f"{rates.evicted_blocks[name]:,.0f}"

    table = _table(
        [
            _Column("tier", _name, is_number=False),
            _Column("occupancy", occupancy, is_number=False),
            _Column("blocks", capacity, 1),
            _Column("indexed", _number("indexed"), 1),
            _Column("leased", _number("leased"), 3),
            _Column("hits", _number("hit_blocks")),
            _Column("misses", _number("miss_blocks"), 4),
            _Column("stored", _number("stored_blocks"), 6),
            _Column("dropped", _number("dropped_blocks"), 7),
            _Column("evicted", _number("evicted_blocks"), 2),
            _Column("evicted/s", eviction_rate, 5),
        ],
        stats["tiers"],
        width,
    )
    assert table is not None
    return table


def _bar(indexed: int, leased: int, capacity: int, length: int) -> Text:
    """Indexed blocks, those that tasks hold, free ones."""
    held = round((indexed + leased) / capacity * length)
    in_use = round(leased / capacity * length)
    bar = Text("█" * (held - in_use), "green")
    bar.append("█" * in_use, "yellow").append("·" * (length - held), "dim")
    return bar.append(f" {(indexed + leased) / capacity:>4.0%}", "default")


def _ops(stats: Stats, rates: Rates | None, width: int) -> RenderableType:
    def now(kind: str, _: Mapping[str, Any]) -> str:
        return "-" if rates is None else f"{rates.op_bytes[kind] / 1e9:.2f}"

    def while_busy(_: str, op: Mapping[str, Any]) -> str:
        return f"{op['bytes'] / op['seconds'] / 1e9:.2f}" if op["seconds"] else "-"

    table = _table(
        [
            _Column("ops", _name, is_number=False),
            _Column("GB/s now", now),
            _Column("while busy", while_busy, 1),
            _Column("GB", lambda _, op: f"{op['bytes'] / 1e9:,.2f}"),
            _Column("count", _number("ops"), 2),
            _Column("blocks", _number("blocks"), 3),
            _Column("failed", _number("failed_ops")),
        ],
        {kind: op for kind, op in stats["ops"].items() if op["ops"]},
        width,
    )
    return table or Text("no op has ended yet", "dim")


def _workers(stats: Stats, width: int) -> Table | None:
    restarts = stats["worker_restarts"]
    names = sorted({*stats["workers"], *restarts})

    def pid(name: str, _: Mapping[str, Any]) -> Text:
        there = stats["workers"].get(name)
        return Text("down", "red") if there is None else Text(str(there))

    return _table(
        [
            _Column("worker", _name, is_number=False),
            _Column("process", pid),
            _Column("restarts", lambda name, _: f"{restarts.get(name, 0):,}"),
        ],
        {name: {} for name in names},
        width,
    )


def _engines(stats: Stats, width: int) -> Table | None:
    return _table(
        [
            _Column("engine", _name, is_number=False),
            _Column("process", lambda _, engine: str(engine["pid"])),
            _Column("ranks", _number("ranks")),
            _Column("open tasks", _number("open_tasks")),
        ],
        stats["engines"],
        width,
    )


# -- lines -----------------------------------------------------------------------------------------


def _line(title: str, *told: str) -> Text:
    return Text.assemble((f"{title}: ", "bold cyan"), ", ".join(filter(None, told)))


def _hits(stats: Stats, rates: Rates | None) -> Iterator[Text]:
    if rates is not None:
        asked = rates.hit_tokens + rates.missed_tokens
        yield _line(
            f"last {rates.seconds:.1f} s",
            f"{rates.hit_tokens:,.0f} tokens/s found of {asked:,.0f} asked for",
            f"{rates.ended_tasks:,.0f} tasks/s",
        )
    windows = stats["hit_rate"].items()
    known = [
        f"{window['rate']:.1%} in {name}" for name, window in windows if window["asked_blocks"]
    ]
    yield _line("hit rate", *known or ["nothing was asked for"])


def _work(stats: Stats) -> Iterator[Text]:
    counts = _counts(stats["tasks"])
    yield _line("tasks", counts or "none", _counts({"not launched": stats["unlaunched_tasks"]}))
    yield _line("ended", _by_kind(stats["ended_tasks"]) or "none")
    waiting = [
        f"{name} {queue['waiting']:,} + {queue['running']:,}"
        for name, queue in stats["queues"].items()
        if any(queue.values())
    ]
    backlog = {"blocks to be stored": stats["store_backlog_blocks"]}
    look_ups = {"look-ups": stats["open_lookups"]}
    yield _line("waiting + running", *waiting or ["none"], _counts(backlog), _counts(look_ups))


def _others(stats: Stats) -> Iterator[Text]:
    """What is there to be told only if there is anything."""
    if "remote" in stats:
        yield _remote(stats["remote"])
    for name, title in (
        ("dropped_blocks", "blocks not stored"),
        ("skipped_blocks", "blocks not loaded"),
        ("counters", "counters"),
        ("events", "KV events"),
    ):
        told = _counts(stats.get(name, {}))
        if told:
            yield _line(title, told)
    decided = {
        f"{tier} {choice}": count
        for tier, choices in stats.get("load_decisions", {}).items()
        for choice, count in choices.items()
    }
    if any(decided.values()):
        yield _line("load or recompute, in blocks", _counts(decided))
    if "trace" in stats:
        trace = stats["trace"]
        lines = {"lines": trace["lines"], "dropped": trace["dropped_lines"]}
        yield _line("trace", _counts(lines), f"{trace['bytes'] / 1e6:,.1f} MB", trace["file"])


def _remote(remote: Mapping[str, Any]) -> Text:
    breaker, lookups = remote["breaker"], remote["lookups"]
    line = _line("remote store", "available" if remote["available"] else "")
    if not remote["available"]:
        line.append("not available", "red")
    if breaker["state"] != "closed":
        line.append(f", breaker {breaker['state']} ({breaker['last_reason']})", "red")
    return line.append(
        f", opened {breaker['openings']:,} times; asked {lookups['asked']:,} times, "
        f"{lookups['late']:,} answers late"
    )


def _counts(counts: Mapping[str, int]) -> str:
    """Those that are not zero."""
    return ", ".join(f"{key.replace('_', ' ')} {n:,}" for key, n in counts.items() if n)


def _by_kind(ended: Mapping[str, int]) -> str:
    """``get_success`` and the like, a kind of task after the other."""
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
