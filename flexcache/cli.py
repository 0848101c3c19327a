"""The `flexcache` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexcache.config import ServerConfig
from flexcache.config.settings import describe_settings
from flexcache.doctor.command import doctor
from flexcache.errors import ConfigError
from flexcache.events.commands import app as events
from flexcache.status.command import status
from flexcache.terminal import errors_named
from flexcache.tracing.commands import app as trace
from flexcache.tracing.commands import replay

app = typer.Typer(no_args_is_help=True, help=__doc__)
app.add_typer(events, name="events")
app.add_typer(trace, name="trace")
app.command()(replay)
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
    from flexcache.logs import set_up_logging
    from flexcache.protocol.curve import make_keys
    from flexcache.server.process import run_server

    with errors_named(_console):
        if keygen is not None:
            make_keys(keygen)
            _console.print(f"keys made; servers and clients set FLEXCACHE_CURVE_KEYS={keygen}")
            return
        path = None if config is None else str(config)
        chosen = {"endpoint": endpoint} if endpoint else {}
        settings = ServerConfig.load(path, None, **chosen, default_endpoint=_default_endpoint())
        set_up_logging(settings.cache.log_level, settings.cache.log_format)
        _console.print(
            f"serving; engines set FLEXCACHE_ENDPOINT={settings.cache.endpoint}", soft_wrap=True
        )
        run_server(settings)


app.command()(status)


@app.command()
def config() -> None:
    """Show every setting, its environment variable and its default."""
    table = Table("setting", "environment", "default", "unit", "meaning")
    for row in describe_settings():
        table.add_row(row.name, row.environment, row.default_text, row.unit, row.meaning)
    _console.print(table)


app.command()(doctor)


@app.command()
def bench(
    sections: Annotated[
        list[str] | None, typer.Argument(help="Which parts; all by default.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Just the cases with this in their title.")] = "",
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Larger, longer: many minutes instead of two.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 1 also if a target is missed.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="For files of the SSD tier and of stores.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep every sample in this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the ratios (.png, .svg, .pdf).")
    ] = None,
    remote_url: Annotated[
        str | None, typer.Option(help="A remote store to be measured as well.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
) -> None:
    """Measure what this machine can do, and how close FlexCache comes.

    Sections: control, plan, index, server, dram, overlap, ssd, remote, gpu. Each figure stands
    beside a bound measured in the same run. Ends with 1 if a case failed.
    """
    from flexcache.bench.plot import check_plot_file, draw
    from flexcache.bench.progress import CaseProgress
    from flexcache.bench.report import show_report, write_json
    from flexcache.bench.suite import SECTIONS, Settings, run_suite

    with errors_named(_console):
        settings = Settings(
            tuple(sections or SECTIONS), only, thorough, directory, seed, remote_url
        )
        for path in filter(None, (json_file, plot_file)):  # before minutes are spent
            if not path.parent.is_dir():
                raise ConfigError(f"{path}: there is no directory {path.parent}")
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ConfigError(f"{path}: cannot be written")
        if plot_file is not None:
            check_plot_file(plot_file)
        with CaseProgress(Console(stderr=True)) as progress:
            report = run_suite(settings, progress.announce)
        show_report(report, _wide(_console))
        if json_file is not None:
            write_json(report, json_file)
        if plot_file is not None:
            draw(report, plot_file)
    if report.was_interrupted:
        raise typer.Exit(130)
    if report.has_failed or (strict and report.misses_targets):
        raise typer.Exit(1)


def _wide(console: Console) -> Console:
    """Tables that go to a file or a pipe need not fit a terminal."""
    return console if console.is_terminal else Console(width=180)


def _default_endpoint() -> str:
    from flexcache.protocol.runtime import private_endpoint

    return private_endpoint("server")


if __name__ == "__main__":
    app()
