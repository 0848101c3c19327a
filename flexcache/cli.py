"""The `flexcache` command."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flexcache.config import CacheConfig, ServerConfig, describe_settings
from flexcache.errors import ConfigError, ServerLostError
from flexcache.storage.block_io import io_uring_problem
from flexcache.storage.pool_directory import supports_direct_io

app = typer.Typer(no_args_is_help=True, help=__doc__)
_console = Console()


@app.callback()
def _main() -> None:
    """A KV-cache memory hierarchy for LLM serving."""


@app.command()
def server(
    config: Annotated[
        Path | None,
        typer.Option(help="Settings (.toml, .json, .yaml), with an optional table `model`."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Where to serve; by default the user's private socket.")
    ] = None,
    keygen: Annotated[
        Path | None, typer.Option(help="Only make CURVE keys in this directory.")
    ] = None,
) -> None:
    """Keep a cache that several engines share, until stopped.

    Without a `model` in the file, the first engine decides what is cached.
    """
    from flexcache.server.curve import make_keys
    from flexcache.server.process import run_server, set_up_logging

    with _errors_named():
        if keygen is not None:
            make_keys(keygen)
            _console.print(f"keys made; servers and clients set FLEXCACHE_CURVE_KEYS={keygen}")
            return
        path = None if config is None else str(config)
        chosen = {"endpoint": endpoint} if endpoint else {}
        settings = ServerConfig.load(path, None, **chosen, default_endpoint=_default_endpoint())
        set_up_logging(settings.cache.log_level)
        _console.print(
            f"serving; engines set FLEXCACHE_ENDPOINT={settings.cache.endpoint}", soft_wrap=True
        )
        run_server(settings)


@app.command()
def status(
    endpoint: Annotated[str | None, typer.Option(help="Of the server to ask.")] = None,
) -> None:
    """Show who uses a server and what it holds."""
    from flexcache.server.status import read_status

    with _errors_named():
        chosen = {"endpoint": endpoint} if endpoint else {}
        settings = CacheConfig.from_env(defaults={"endpoint": _default_endpoint()}, **chosen)
        assert settings.endpoint is not None
        report = read_status(settings.endpoint, settings.curve_keys, settings.server_timeout_s)
    _show_status(report)


def _show_status(report: dict[str, Any]) -> None:
    _console.print(
        f"{report['endpoint']}, process {report['server_pid']}\n"
        f"{report.get('fingerprint', 'no engine yet: nothing is decided')}",
        soft_wrap=True,
    )
    tiers = Table("tier", "blocks", "indexed", "leased", "free", "hits", "misses", "evicted")
    for name, tier in report["tiers"].items():
        columns = ("capacity", "indexed", "leased", "free", "hit_blocks", "miss_blocks",
                   "evicted_blocks")  # fmt: skip
        tiers.add_row(name, *(f"{tier[column]:,}" for column in columns))
    engines = Table("engine", "process", "ranks", "open tasks")
    for name, engine in report["engines"].items():
        engines.add_row(name, *(str(engine[k]) for k in ("pid", "ranks", "open_tasks")))
    for table in (tiers, engines):
        if table.row_count:
            _console.print(table)
    for title in ("dropped_blocks", "counters"):
        counts = report.get(title)
        if counts:
            _console.print(f"{title}: " + ", ".join(f"{k} {v:,}" for k, v in counts.items()))


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


def _default_endpoint() -> str:
    from flexcache.server.runtime import private_endpoint

    return private_endpoint("server")


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    """What the user can mend is said without a traceback."""
    try:
        yield
    except (ConfigError, ServerLostError) as error:
        _console.print(f"[red]error[/] {error}", soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
