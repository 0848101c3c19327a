"""Tables and lines of a view. A narrow terminal drops the least important columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.table import Table
from rich.text import Text

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
