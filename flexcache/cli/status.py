"""`flexcache status`: reads a server's or a router's statistics, over and over if need be."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPResponse
from typing import Annotated, Any, Generic, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flexcache.errors import ConfigError, FlexCacheError, ServerLostError
from flexcache.terminal import user_errors, wide_console

_MAX_BYTES = 64 << 20
_OPENER = build_opener(ProxyHandler({}))  # the token is for the server only


class TokenRequiredError(FlexCacheError):
    """A page needs a bearer token, or another one."""


@contextlib.contextmanager
def answer_of(
    url: str, path: str, token: str | None, timeout_s: float, body: bytes | None = None
) -> Iterator[HTTPResponse]:
    """Send a GET, or a POST of JSON, and give the answer to be read. Arguments as of `read_page`.

    Raises:
        HTTPError: The answer is a refusal.
        ServerLostError: There is no answer, or what reads it raises `ValueError`.
    """
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = Request(f"{url.rstrip('/')}{path}", body, headers)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        with _OPENER.open(request, timeout=timeout_s) as answer:
            yield answer
    except HTTPError:
        raise
    except (URLError, OSError, ValueError) as error:
        raise ServerLostError(f"{url} does not answer: {error}") from None


def read_page(url: str, path: str, token: str | None, timeout_s: float) -> bytes | None:
    """Return the body of a page; None if the server has no such page.

    Args:
        url: ``http://HOST:PORT``.
        token: The server's bearer token, if it needs one.

    Raises:
        ServerLostError: There is no answer.
        TokenRequiredError: The token is missing or wrong.
        FlexCacheError: The answer is another refusal.
    """
    try:
        with answer_of(url, path, token, timeout_s) as answer:
            body = answer.read(_MAX_BYTES + 1)
            if len(body) > _MAX_BYTES:
                raise FlexCacheError(f"{url} answers more than {_MAX_BYTES >> 20} MiB")
            return body
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        if error.code == 401:
            reason = (
                "set FLEXCACHE_HTTP_TOKEN to a cache's http_token, "
                "FLEXCACHE_ROUTER_CONTROL_TOKEN to a router's control_token"
            )
            raise TokenRequiredError(f"{url} requires a token: {reason}") from None
        raise FlexCacheError(f"{url} answers {error.code}") from None


Tree = TypeVar("Tree")
Rates = TypeVar("Rates")


class StatusView(Generic[Tree, Rates]):
    """Reads statistics and renders them, with their rates since the last reading.

    Args:
        fetch: Returns statistics as they came. May raise `ServerLostError`.
        parse: Makes a tree of them.
        rates_between: Returns the rates between two readings, this many seconds apart.
        render: Renders a reading for a width in characters.
    """

    def __init__(
        self,
        fetch: Callable[[], Any],
        parse: Callable[[Any], Tree],
        rates_between: Callable[[Tree, Tree, float], Rates | None],
        render: Callable[[Tree, Rates | None, int], RenderableType],
    ) -> None:
        self.fetch = fetch
        self._parse = parse
        self._rates_between = rates_between
        self._render = render
        self._before: tuple[float, Tree] | None = None

    def look(self, width: int) -> RenderableType:
        """Return what there is to see now.

        Raises:
            ServerLostError: There is no answer. The next look has no rates.
        """
        before, self._before = self._before, None
        stats, now = self._parse(self.fetch()), time.monotonic()
        self._before = now, stats
        rates = before and self._rates_between(before[1], stats, now - before[0])
        return self._render(stats, rates, width)


def watch(
    view: StatusView[Tree, Rates], console: Console, interval_s: float, *, rounds: int | None = None
) -> None:
    """Show a view until interrupted.

    Args:
        rounds: Stop after this many readings.
    """
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while rounds is None or rounds > 0:
            try:
                live.update(view.look(console.width), refresh=True)
            except ServerLostError as lost:
                live.update(Text(f"waiting for a server: {lost}", "yellow"), refresh=True)
            if rounds is not None:
                rounds -= 1
            time.sleep(interval_s)


def http_url(address: str) -> str:
    """Return the URL of a server at ``[http://][HOST:]PORT``; without a host it is on loopback."""
    if address.startswith(("http://", "https://")):
        return address.rstrip("/")
    return f"http://127.0.0.1:{address}" if address.isdecimal() else f"http://{address}"


_HTTP_TIMEOUT_S = 10.0


def status(
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Server endpoint; or HOST:PORT, a cache's http_endpoint or a router's control "
            "port. Default: FLEXCACHE_ENDPOINT, else the cache that runs here."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Show the status once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show what a cache holds and does, and which engines use it; or how a router does.

    In a terminal the view refreshes every second until Ctrl-C.
    """
    console = Console(stderr=as_json)
    with user_errors(console):
        if not endpoint or endpoint.startswith(("ipc:", "tcp:", "/")):
            view = _of_server(endpoint)
        else:
            view = _over_http(http_url(endpoint))
        if as_json:
            typer.echo(json.dumps(msgspec.to_builtins(view.fetch()), indent=1))
        elif once or not console.is_terminal:
            wide = wide_console(console)
            wide.print(view.look(wide.width), soft_wrap=False)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(view, console, interval)


def _of_server(endpoint: str | None) -> StatusView[Any, Any]:
    from flexcache.client.link import read_status
    from flexcache.config import CacheConfig
    from flexcache.protocol.endpoints import is_served, private_endpoint, served_privately

    chosen = {"endpoint": endpoint} if endpoint else {}
    default = private_endpoint("server")
    settings = CacheConfig.from_env(None, {"endpoint": default}, **chosen)
    if settings.endpoint == default and not is_served(default):
        caches = served_privately()  # of engines that have a cache each
        if len(caches) > 1:
            raise ConfigError(f"several caches run here, name one with --endpoint: {caches}")
        settings = dataclasses.replace(settings, endpoint=(caches or [default])[0])
    assert settings.endpoint is not None
    return _of_cache(
        partial(read_status, settings.endpoint, settings.curve_keys, settings.server_timeout_s)
    )


def _over_http(url: str) -> StatusView[Any, Any]:
    """Return a view of whatever serves HTTP there."""
    refusal = FlexCacheError(
        f"{url} is neither the http_endpoint of a cache nor the control port of a router (8090, "
        "unless set)"
    )
    for path, token_name, view_of in (
        ("/stats", "FLEXCACHE_ROUTER_CONTROL_TOKEN", _of_router),
        ("/status", "FLEXCACHE_HTTP_TOKEN", lambda body: _of_cache(lambda: json.loads(body()))),
    ):
        token = os.environ.get(token_name)
        page = partial(read_page, url, path, token, _HTTP_TIMEOUT_S)

        def body(page: Callable[[], bytes | None] = page) -> bytes:
            if (found := page()) is None:
                raise ServerLostError(f"another program answers at {url}")
            return found

        try:
            if page() is not None:
                return view_of(body)
        except TokenRequiredError as error:
            refusal = error
    raise refusal


def _of_cache(fetch: Callable[[], Any]) -> StatusView[Any, Any]:
    from flexcache.stats import from_plain
    from flexcache.status.view import rates_between, render

    return StatusView(fetch, from_plain, rates_between, render)


def _of_router(body: Callable[[], bytes]) -> StatusView[Any, Any]:
    from flexcache.router.stats import from_json
    from flexcache.status.router import rates_between, render

    return StatusView(lambda: from_json(body()), lambda stats: stats, rates_between, render)
