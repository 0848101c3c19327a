"""`flexcache router`: serve, and the commands below it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flexcache.cli.router_simulate import simulate
from flexcache.terminal import user_errors

app = typer.Typer(help="Route requests to the engine that will answer them soonest.")
app.command()(simulate)


@app.callback(invoke_without_command=True)
def router(
    context: typer.Context,
    worker: Annotated[
        list[str] | None, typer.Option(help="URL of an engine. Repeat for each engine.")
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            help="URL=ENDPOINT[,REPLAY] of an engine's KV events; * as URL for a shared cache."
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="URL=CACHE_URL, FlexCache's HTTP API; * as URL for a shared cache."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings (.toml, .json, .yaml).")] = None,
    host: Annotated[str | None, typer.Option(help="Address that clients connect to.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that clients connect to.")] = None,
    control_host: Annotated[str | None, typer.Option(help="Address of the control API.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Port of the control API.")] = None,
    gateway_host: Annotated[str | None, typer.Option(help="Address of the picker.")] = None,
    gateway_port: Annotated[
        int | None, typer.Option(help="Port of the endpoint picker for Envoy (ext_proc).")
    ] = None,
    proxies: Annotated[int | None, typer.Option(help="Proxy processes; 0: one process.")] = None,
    policy: Annotated[str | None, typer.Option(help="How an engine is chosen.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory or name of the model's tokenizer.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="Keys that clients must present, one per line.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Private key (PEM).")] = None,
    sync_endpoint: Annotated[
        str | None, typer.Option(help="ENDPOINT,REPLAY where other routers follow this one.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="ENDPOINT,REPLAY of another router. Repeat for each.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API in front of engines, until stopped.

    Each request goes to the engine that will answer it soonest: what it holds of the prompt, on GPU
    and below, is known from KV events. All other settings are in docs/configuration.md; options
    override FLEXCACHE_ROUTER_* variables, which override the file.
    """
    if context.invoked_subcommand is not None:
        return
    given: dict[str, Any] = {
        "workers": worker, "events": events, "caches": cache, "host": host, "port": port,
        "control_host": control_host, "control_port": control_port, "proxies": proxies,
        "gateway_host": gateway_host, "gateway_port": gateway_port,
        "policy": policy, "tokenizer": tokenizer, "api_key_file": api_key_file,
        "tls_cert": tls_cert, "tls_key": tls_key, "sync_endpoint": sync_endpoint, "peers": peer,
    }  # fmt: skip
    with user_errors():
        from flexcache.config import RouterConfig
        from flexcache.logs import set_up_logging

        chosen = {name: value for name, value in given.items() if value not in (None, [])}
        for name in ("api_key_file", "tls_cert", "tls_key", "tokenizer"):
            # A setting must be absolute; who types an option means his own directory.
            if os.path.exists(chosen.get(name, "")):
                chosen[name] = os.path.abspath(chosen[name])
        settings = RouterConfig.load(None if config is None else str(config), **chosen)
        set_up_logging(settings.log_level, settings.log_format)
        _run(settings)


def _run(settings: Any) -> None:
    from flexcache.errors import MissingDependencyError

    try:
        from flexcache.router.process import run_router
    except ImportError as error:
        raise MissingDependencyError(
            f"a router needs the package {error.name}: pip install '.[router]'"
        ) from None
    run_router(settings)
