"""`flexcache status`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flexcache.errors import FlexCacheError, ServerLostError
from flexcache.terminal import user_errors

if TYPE_CHECKING:
    from flexcache.status.watch import View

_UNBOUNDED_WIDTH = 160
"""Width of output to a file or a pipe, in characters."""
_HTTP_TIMEOUT_S = 10.0


def status(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Server endpoint; or http://HOST:PORT, a cache's http_endpoint or a router's "
            "control port."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show what a cache holds and does, and which engines use it; or how a router does.

    In a terminal the view refreshes every second until Ctrl-C.
    """
    from flexcache.status.watch import watch

    console = Console(stderr=as_json)
    with user_errors(console):
        is_http = endpoint is not None and endpoint.startswith(("http://", "https://"))
        read, view = _over_http(str(endpoint)) if is_http else _server(endpoint)
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
    from flexcache.client.link import read_status
    from flexcache.config import CacheConfig
    from flexcache.protocol.endpoints import private_endpoint

    chosen = {"endpoint": endpoint} if endpoint else {}
    settings = CacheConfig.from_env(None, {"endpoint": private_endpoint("server")}, **chosen)

    def read() -> dict[str, Any]:
        assert settings.endpoint is not None
        return read_status(settings.endpoint, settings.curve_keys, settings.server_timeout_s)

    return read, _view_of_cache(read)


def _view_of_cache(read: Callable[[], dict[str, Any]]) -> View[Any, Any]:
    from flexcache.status.rates import rates_between
    from flexcache.status.view import render
    from flexcache.status.watch import View
    from flexcache.tasks.stats import from_plain

    return View(lambda: from_plain(read()), rates_between, render)


def _over_http(url: str) -> tuple[Callable[[], Any], View[Any, Any]]:
    """Return a reader of the plain statistics of whatever serves HTTP there, and their view."""
    from flexcache.status.pages import TokenRequiredError, read_page

    refusal = FlexCacheError(
        f"{url} is neither the http_endpoint of a cache nor the control port of a router"
    )
    for path, token_name, reader in (
        ("/stats", "FLEXCACHE_ROUTER_CONTROL_TOKEN", _router),
        ("/status", "FLEXCACHE_HTTP_TOKEN", _cache),
    ):
        token = os.environ.get(token_name)
        page = partial(read_page, url, path, token, _HTTP_TIMEOUT_S)
        try:
            if page() is not None:
                return reader(url, page)
        except TokenRequiredError as error:
            refusal = error
    raise refusal


def _router(url: str, page: Callable[[], bytes | None]) -> tuple[Callable[[], Any], View[Any, Any]]:
    import msgspec

    from flexcache.router.stats import RouterStats, from_json
    from flexcache.status.router import rates_between, render
    from flexcache.status.watch import View

    def read() -> RouterStats:
        return from_json(_present(url, page()))

    return lambda: msgspec.to_builtins(read()), View(read, rates_between, render)


def _cache(url: str, page: Callable[[], bytes | None]) -> tuple[Callable[[], Any], View[Any, Any]]:
    def read() -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(_present(url, page()))
        return stats

    return read, _view_of_cache(read)


def _present(url: str, page: bytes | None) -> bytes:
    if page is None:
        raise ServerLostError(f"another program answers at {url}")
    return page
