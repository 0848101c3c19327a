"""The `flexcache` command."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexcache.config import describe_settings
from flexcache.storage.block_io import io_uring_problem
from flexcache.storage.disk_pool import supports_direct_io

app = typer.Typer(no_args_is_help=True, help=__doc__)
_console = Console()


@app.callback()
def _main() -> None:
    """A KV-cache memory hierarchy for LLM serving."""


@app.command()
def config() -> None:
    """Show every setting, its environment variable and its default."""
    table = Table("setting", "environment", "default", "unit", "meaning")
    for row in describe_settings():
        table.add_row(*(row[k] for k in ("field", "environment", "default", "unit", "meaning")))
    _console.print(table)


@app.command()
def doctor(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="SSD cache directories to look at.")
    ] = None,
) -> None:
    """Say what of this machine the SSD tier can use, and what it will do without."""
    findings = [("ok", f"kernel {platform.release()}")]
    problem = io_uring_problem()
    if problem is None:
        findings.append(("ok", "io_uring works"))
    else:
        findings.append(("warning", f"no io_uring, I/O runs on threads instead: {problem}"))
    failed = False
    for directory in directories or []:
        try:
            direct = supports_direct_io(directory)
        except OSError as error:
            findings.append(("error", f"{directory}: {error.strerror}; name a writable directory"))
            failed = True
            continue
        if direct:
            findings.append(("ok", f"{directory}: O_DIRECT works"))
        else:
            findings.append(
                ("warning", f"{directory}: no O_DIRECT, I/O goes through the page cache")
            )
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for level, text in findings:
        _console.print(f"[{colours[level]}]{level:8}[/]{text}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
