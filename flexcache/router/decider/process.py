"""The deciding process of a router that has proxies of its own."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import uvloop

from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError
from flexcache.router.control.api import ControlApi
from flexcache.router.decider.service import THREAD_SWITCH_S, DeciderService
from flexcache.router.gateway.start import start_gateway
from flexcache.router.settings import address_of
from flexcache.router.supervisor import (
    exit_on_config_error,
    read_settings,
    stop_with_supervisor,
)


async def _decide(config: RouterConfig, link: str) -> None:
    stopped = asyncio.Event()
    stop_with_supervisor(stopped)
    service = DeciderService(config, address_of(config), link)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(service.close)
        await service.start()
        control = ControlApi(service)
        stack.push_async_callback(control.close)
        await control.start()
        await start_gateway(stack, config, service.decider, lambda: service.is_ready)
        await stopped.wait()


def main() -> None:
    config, link = read_settings()
    try:
        sys.setswitchinterval(THREAD_SWITCH_S)
        uvloop.run(_decide(config, link))
    except ConfigError as error:
        exit_on_config_error(error)


if __name__ == "__main__":
    main()
