"""`flexcache status`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flexcache.terminal import user_errors

if TYPE_CHECKING:
    from flexcache.status.watch import View

_UNBOUNDED_WIDTH = 160
"""Width of output to a file or a pipe, in characters."""
_ROUTER_TIMEOUT_S = 10.0


def status(
    endpoint: Annotated[
        str | None,
        typer.Option(help="Server endpoint, or http://HOST:PORT of a router's control API."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show what a server holds and does, and which engines use it; or how a router does.

    In a terminal the view refreshes every second until Ctrl-C.
    """
    from flexcache.status.watch import watch

    console = Console(stderr=as_json)
    with user_errors(console):
        is_router = endpoint is not None and endpoint.startswith(("http://", "https://"))
        read, view = _router(str(endpoint)) if is_router else _server(endpoint)
        if as_json:
            typer.echo(json.dumps(read(), indent=1))
        elif once or not console.is_terminal:
            width = console.width if console.is_terminal else _UNBOUNDED_WIDTH
            Console(width=width).print(view.look(width), soft_wrap=False)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(view, console, interval)


def _server(endpoint: str | None) -> tuple[Callable[[], Any], View[Any, Any]]:
    """Return a reader of a server's plain statistics, and their view."""
    from flexcache.client.status import read_status
    from flexcache.config import CacheConfig
    from flexcache.protocol.runtime import private_endpoint
    from flexcache.status.rates import rates_between
    from flexcache.status.view import render
    from flexcache.status.watch import View
    from flexcache.tasks.stats import from_plain

    chosen = {"endpoint": endpoint} if endpoint else {}
    settings = CacheConfig.from_env(None, {"endpoint": private_endpoint("server")}, **chosen)

    def read() -> dict[str, Any]:
        assert settings.endpoint is not None
        return read_status(settings.endpoint, settings.curve_keys, settings.server_timeout_s)

    return read, View(lambda: from_plain(read()), rates_between, render)


def _router(url: str) -> tuple[Callable[[], Any], View[Any, Any]]:
    """Return a reader of a router's plain statistics, and their view."""
    import msgspec

    from flexcache.router.stats import RouterStats
    from flexcache.status.router import rates_between, read_router, render
    from flexcache.status.watch import View

    token = os.environ.get("FLEXCACHE_ROUTER_CONTROL_TOKEN")

    def read() -> RouterStats:
        return read_router(url, token, _ROUTER_TIMEOUT_S)

    return lambda: msgspec.to_builtins(read()), View(read, rates_between, render)
