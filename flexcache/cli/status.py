"""`flexcache status`."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from flexcache.terminal import user_errors

_UNBOUNDED_WIDTH = 160
"""Width of output to a file or a pipe, in characters."""


def status(
    endpoint: Annotated[str | None, typer.Option(help="Server endpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show what a server holds and does, and which engines use it.

    In a terminal the view refreshes every second until Ctrl-C.
    """
    from flexcache.client.status import read_status
    from flexcache.config import CacheConfig
    from flexcache.protocol.runtime import private_endpoint
    from flexcache.status.view import render
    from flexcache.status.watch import watch
    from flexcache.tasks.stats import Stats, from_plain

    console = Console(stderr=as_json)
    with user_errors(console):
        chosen = {"endpoint": endpoint} if endpoint else {}
        settings = CacheConfig.from_env(None, {"endpoint": private_endpoint("server")}, **chosen)

        def read_plain() -> dict[str, Any]:
            assert settings.endpoint is not None
            return read_status(settings.endpoint, settings.curve_keys, settings.server_timeout_s)

        def read() -> Stats:
            return from_plain(read_plain())

        if as_json:
            typer.echo(json.dumps(read_plain(), indent=1))
        elif once or not console.is_terminal:
            width = console.width if console.is_terminal else _UNBOUNDED_WIDTH
            Console(width=width).print(render(read(), None, width), soft_wrap=False)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(read, console, interval)
