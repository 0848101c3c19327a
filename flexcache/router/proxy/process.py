"""A proxy process, whose requests a decider in another process places."""

from __future__ import annotations

import asyncio

import uvloop

from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError
from flexcache.router.link.messages import ProxyCounters
from flexcache.router.link.remote import RemoteChooser
from flexcache.router.proxy.proxy import Proxy
from flexcache.router.proxy.server import PROXY, make_app, serve
from flexcache.router.settings import proxy_config
from flexcache.router.supervisor import (
    exit_on_config_error,
    read_settings,
    stop_with_supervisor,
)


def counters_of(
    proxy: Proxy, *, is_serving: bool = True, num_unsupervised: int = 0
) -> ProxyCounters:
    """Return what a proxy counts, for the decider's statistics."""
    return ProxyCounters(
        is_serving, proxy.num_running, proxy.num_retries, dict(proxy.rejected), num_unsupervised
    )


async def _relay(config: RouterConfig, link: str) -> None:
    stopped = asyncio.Event()
    stop_with_supervisor(stopped)
    is_serving = False

    def count() -> ProxyCounters:
        return counters_of(proxy, is_serving=is_serving, num_unsupervised=chooser.num_unsupervised)

    chooser = RemoteChooser(link, count)
    app = make_app(chooser, proxy_config(config), lambda: chooser.has_workers, chooser)
    proxy = app[PROXY]
    linked = asyncio.create_task(chooser.open())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait((linked, stopping), return_when=asyncio.FIRST_COMPLETED)
    if linked.done():
        serving = await serve(app, host=config.host, port=config.port)
        is_serving = True
        await stopping
        await serving.stop()
    linked.cancel()
    await chooser.close()


def main() -> None:
    config, link = read_settings()
    try:
        uvloop.run(_relay(config, link))
    except ConfigError as error:
        exit_on_config_error(error)


if __name__ == "__main__":
    main()
