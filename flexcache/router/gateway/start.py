"""Starts the endpoint picker of a router, if it has one: only then its packages are needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flexcache.config.router import RouterConfig
from flexcache.router.chooser import Chooser

if TYPE_CHECKING:
    from flexcache.router.gateway.server import GatewayConfig


def gateway_config(config: RouterConfig) -> GatewayConfig | None:
    """Return the part of the settings that the picker needs; None: there is no picker.

    Raises:
        MissingDependencyError: The extra ``gateway`` is not installed.
    """
    if config.gateway_port is None:
        return None
    from flexcache.router.gateway.server import GatewayConfig

    return GatewayConfig(
        host=config.gateway_host,
        port=config.gateway_port,
        tls_cert=None if config.tls_cert is None else Path(config.tls_cert),
        tls_key=None if config.tls_key is None else Path(config.tls_key),
        max_body_bytes=int(config.max_body_mb * 1e6),
        drain_timeout_s=config.drain_timeout_s,
    )


async def start_gateway(
    stack: AsyncExitStack, config: RouterConfig, chooser: Chooser, is_ready: Callable[[], bool]
) -> None:
    """Start the picker, if the settings have one, and stop it with the stack.

    Raises:
        ConfigError: The port is taken, or the certificate cannot be used.
        MissingDependencyError: The extra ``gateway`` is not installed.
    """
    settings = gateway_config(config)
    if settings is None:
        return
    from flexcache.router.gateway.server import Gateway

    gateway = Gateway(chooser, settings, is_ready)
    stack.push_async_callback(gateway.stop)
    await gateway.start()
