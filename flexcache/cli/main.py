"""The `flexcache` command."""

from __future__ import annotations

import typer

from flexcache.cli.bench import bench
from flexcache.cli.config import config
from flexcache.cli.doctor import doctor
from flexcache.cli.events import app as events
from flexcache.cli.replay import replay
from flexcache.cli.router import app as router
from flexcache.cli.server import server
from flexcache.cli.status import status
from flexcache.cli.trace import app as trace

app = typer.Typer(
    no_args_is_help=True,
    help="A KV-cache memory hierarchy for LLM serving.",
)
for command in (server, status, config, doctor, bench, replay):
    app.command()(command)
app.add_typer(trace, name="trace")
app.add_typer(events, name="events")
app.add_typer(router, name="router")
