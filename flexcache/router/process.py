"""The processes of a router: one that does everything, or a decider beside proxies."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.router.control.api import ControlApi
from flexcache.router.decider.service import DeciderService
from flexcache.router.proxy.config import ProxyConfig, read_api_keys
from flexcache.router.proxy.server import make_app, serve

logger = logging.getLogger(__name__)


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end.

    Raises:
        ConfigError: A setting, file or address cannot be used.
    """
    uvloop.run(_run_alone(config))


async def _run_alone(config: RouterConfig) -> None:
    """Decide and relay in one process."""
    stopped = stop_event()
    address = address_of(config)
    service = DeciderService(config, address)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(service.close)
        await service.start()
        control = ControlApi(service)
        stack.push_async_callback(control.close)
        await control.start()
        app = make_app(service.decider, proxy_config(config), lambda: service.is_ready)
        try:
            serving = await serve(app, host=config.host, port=config.port)
        except OSError as error:
            raise ConfigError(f"port = {config.port}: {error.strerror or error}") from None
        log_event(
            logger, logging.INFO, "router_serving", address=address,
            control=f"http://{config.control_host}:{control.port}",
        )  # fmt: skip
        await stopped.wait()
        log_event(logger, logging.INFO, "router_stopping")
        await serving.stop()


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def address_of(config: RouterConfig) -> str:
    """Return where clients connect."""
    scheme = "http" if config.tls_cert is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{config.port}"


def proxy_config(config: RouterConfig) -> ProxyConfig:
    """Return the part of the settings that a proxy needs.

    Raises:
        ConfigError: The file of API keys cannot be used.
    """
    file = config.api_key_file
    keys = [] if file is None else read_api_keys(Path(file))
    return ProxyConfig(
        api_keys=(*config.api_keys, *keys),
        tls_cert=None if config.tls_cert is None else Path(config.tls_cert),
        tls_key=None if config.tls_key is None else Path(config.tls_key),
        max_body_bytes=int(config.max_body_mb * 1e6),
        client_idle_s=config.idle_timeout_s,
        body_timeout_s=config.idle_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        max_retries=config.max_retries,
        stop_deadline_s=config.drain_timeout_s,
        reuse_port=config.proxies > 0,
    )
