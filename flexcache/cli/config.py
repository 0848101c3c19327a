"""`flexcache config`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def config() -> None:
    """Show every setting, its environment variable and its default."""
    from flexcache.config import describe_settings

    columns = ("field", "environment", "default", "unit", "meaning")
    table = Table("setting", *columns[1:])
    for row in describe_settings():
        table.add_row(*(row[column] for column in columns))
    Console().print(table)
