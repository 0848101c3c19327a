"""A router's main process: all of it, or the supervisor of a decider and several proxies."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack

import uvloop

from flexcache.config.router import RouterConfig
from flexcache.logs import log_event
from flexcache.processes import raise_limit
from flexcache.router.control.api import ControlApi
from flexcache.router.decider.service import THREAD_SWITCH_S, DeciderService
from flexcache.router.gateway.start import gateway_config, start_gateway
from flexcache.router.proxy.config import MAX_CONNECTIONS
from flexcache.router.proxy.process import counters_of
from flexcache.router.proxy.server import PROXY, make_app, serve
from flexcache.router.settings import (
    address_of,
    control_address_of,
    engine_headers,
    listing_of,
    proxy_config,
    routing_of,
)
from flexcache.router.supervisor import Supervisor, bind_port, with_ports

logger = logging.getLogger(__name__)


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end.

    Raises:
        ConfigError: A setting, file or address cannot be used.
    """
    for read in (listing_of, engine_headers, routing_of, proxy_config, gateway_config):
        read(config)  # a bad setting is reported here, and not by each child again and again
    if config.proxies:
        asyncio.run(_supervise(config))
    else:
        sys.setswitchinterval(THREAD_SWITCH_S)
        uvloop.run(_run_alone(config))


async def _run_alone(config: RouterConfig) -> None:
    """Decide and relay in one process."""
    stopped = _stop_event()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind_port(config.host, config.port, "port"))
        with bind_port(config.control_host, config.control_port, "control_port") as control_port:
            config = with_ports(config, listener, control_port)
        service = DeciderService(config, address_of(config))
        stack.push_async_callback(service.close)
        await service.start()
        control = ControlApi(service)
        stack.push_async_callback(control.close)
        await control.start()
        await start_gateway(stack, config, service.decider, lambda: service.is_ready)
        decider = service.decider
        app = make_app(decider, proxy_config(config), lambda: service.is_ready, decider)
        service.count_own_proxy = lambda: counters_of(app[PROXY])
        serving = await serve(app, sock=listener)
        _log_serving(config)
        await stopped.wait()
        log_event(logger, logging.INFO, "router_stopping")
        await serving.stop()


async def _supervise(config: RouterConfig) -> None:
    stopped = _stop_event()
    supervisor = Supervisor(config)
    _log_serving(supervisor.config)
    await supervisor.run(stopped)


def _log_serving(config: RouterConfig) -> None:
    num_clients = proxy_config(config).max_connections
    log_event(
        logger, logging.INFO, "router_serving", address=address_of(config),
        control=control_address_of(config), workers=len(config.workers),
        max_clients=num_clients * max(1, config.proxies),
    )  # fmt: skip
    if num_clients < MAX_CONNECTIONS:
        log_event(
            logger, logging.WARNING, "router_few_descriptors", limit=raise_limit(),
            max_clients=num_clients, hint="raise the hard limit: ulimit -Hn, LimitNOFILE=, "
            "docker run --ulimit nofile=65536",
        )  # fmt: skip


def _stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
