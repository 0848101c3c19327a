"""`flexcache server`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexcache.terminal import user_errors


def server(
    config: Annotated[
        Path | None,
        typer.Option(help="Settings (.toml, .json, .yaml), with an optional table `model`."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Address to serve at. Default: a private socket of the user."),
    ] = None,
    keygen: Annotated[
        Path | None, typer.Option(help="Create CURVE keys in this directory and exit.")
    ] = None,
) -> None:
    """Run a cache that several engines share, until stopped.

    Without a `model` in the file, the first engine defines the model.
    """
    from flexcache.config import ServerConfig
    from flexcache.logs import set_up_logging
    from flexcache.protocol.endpoints import private_endpoint
    from flexcache.protocol.trust import make_keys
    from flexcache.server.process import run_server

    console = Console()
    with user_errors(console):
        if keygen is not None:
            make_keys(keygen)
            place = keygen.absolute()  # a setting has no working directory
            console.print(f"keys created; servers and clients set FLEXCACHE_CURVE_KEYS={place}")
            return
        path = None if config is None else str(config)
        chosen = {"endpoint": endpoint} if endpoint else {}
        settings = ServerConfig.load(
            path, None, **chosen, default_endpoint=private_endpoint("server")
        )
        set_up_logging(settings.cache.log_level, settings.cache.log_format)

        def show(address: str) -> None:
            console.print(f"serving; engines set FLEXCACHE_ENDPOINT={address}", soft_wrap=True)

        run_server(settings, began=show)
