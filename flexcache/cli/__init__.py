"""Command line `flexcache`: assembled here, with a module for each command.

A command imports what it needs when it runs: torch and ZMQ would make `flexcache --help` slow.
"""

from __future__ import annotations

import typer

from flexcache.cli import bench, cache, config, doctor, events, router, server, status, trace

app = typer.Typer(
    no_args_is_help=True,
    help="A KV-cache memory hierarchy for LLM serving.",
)
for command in (
    server.server, status.status, config.config, doctor.doctor, bench.bench, trace.replay,
    cache.drain,
):  # fmt: skip
    app.command()(command)
app.add_typer(cache.app, name="cache")
app.add_typer(trace.app, name="trace")
app.add_typer(events.app, name="events")
app.add_typer(router.app, name="router")
