"""Processes of a router: all in one, or the supervisor of a decider and several proxies.

The proxies share the clients' port (SO_REUSEPORT). Whatever dies is restarted with back-off; the
others go on meanwhile. A child ends by itself when its supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from flexcache.config.router import RouterConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.logs import log_event, set_up_logging
from flexcache.processes import WorkerSupervisor, raise_limit
from flexcache.protocol.endpoints import private_endpoint
from flexcache.router.chooser import Chooser
from flexcache.router.control import ControlApi
from flexcache.router.link import RemoteChooser
from flexcache.router.messages import ProxyCounters
from flexcache.router.proxy.proxy import PROXY, Proxy, make_app, serve
from flexcache.router.service import THREAD_SWITCH_S, DeciderService
from flexcache.router.settings import (
    MAX_CONNECTIONS,
    address_of,
    control_address_of,
    engine_headers,
    listing_of,
    proxy_config,
    routing_of,
)

if TYPE_CHECKING:
    from flexcache.router.gateway.server import Gateway

logger = logging.getLogger(__name__)

_DECIDER_STOP_S = 5.0


def gateway_class(config: RouterConfig) -> type[Gateway] | None:
    """Return the endpoint picker; None: the settings have none.

    Raises:
        MissingDependencyError: The extra ``gateway`` is not installed.
    """
    if config.gateway_port is None:
        return None
    from flexcache.router.gateway.server import Gateway

    return Gateway


async def start_gateway(
    stack: AsyncExitStack, config: RouterConfig, chooser: Chooser, is_ready: Callable[[], bool]
) -> None:
    """Start the picker, if the settings have one, and stop it with the stack.

    Raises:
        ConfigError: The port is taken, or the certificate cannot be used.
        MissingDependencyError: The extra ``gateway`` is not installed.
    """
    kind, port = gateway_class(config), config.gateway_port
    if kind is None or port is None:
        return
    gateway = kind(chooser, proxy_config(config), config.gateway_host, port, is_ready)
    stack.push_async_callback(gateway.stop)
    await gateway.start()


class ChildSettings(msgspec.Struct, frozen=True):
    """What a child reads from its standard input.

    Attributes:
        is_proxy: It is a proxy; otherwise the decider.
        config: Of `RouterConfig.to_dict`.
        link: Endpoint of the link between decider and proxies.
    """

    is_proxy: bool
    config: dict[str, object]
    link: str


class Supervisor:
    """Runs the processes of a router.

    Raises:
        ConfigError: An address is in use, or cannot be used.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._port = bind_port(config.host, config.port, "port")
        with bind_port(config.control_host, config.control_port, "control_port") as control_port:
            self.config = with_ports(config, self._port, control_port)
        self._is_stopping = False
        self._link = private_endpoint()
        self._decider = self._child("decider", is_proxy=False)
        self._proxies = [
            self._child(f"proxy {number}", is_proxy=True) for number in range(config.proxies)
        ]

    def _child(self, name: str, *, is_proxy: bool) -> WorkerSupervisor:
        settings = ChildSettings(is_proxy, self.config.to_dict(), self._link)
        return WorkerSupervisor(name, __name__, lambda _: settings, ())

    async def run(self, stopped: asyncio.Event) -> None:
        """Keep all running until stopped; then let the proxies finish their requests."""
        for child in (self._decider, *self._proxies):
            self._start(child)
        await stopped.wait()
        self._is_stopping = True
        log_event(logger, logging.INFO, "router_stopping")
        await asyncio.gather(
            *(
                _stop(child, self.config.drain_timeout_s + _DECIDER_STOP_S)
                for child in self._proxies
            )
        )
        has_gateway = self.config.gateway_port is not None  # it has requests to finish
        drain_s = self.config.drain_timeout_s if has_gateway else 0.0
        await _stop(self._decider, drain_s + _DECIDER_STOP_S)
        with contextlib.suppress(FileNotFoundError):
            Path(self._link.removeprefix("ipc://")).unlink()
        self._port.close()

    def _start(self, child: WorkerSupervisor) -> None:
        loop = asyncio.get_running_loop()
        if child.start(time.monotonic()):
            loop.add_reader(child.pidfd, self._died, child)
        else:
            self._start_later(child)

    def _died(self, child: WorkerSupervisor) -> None:
        if self._is_stopping:
            return
        asyncio.get_running_loop().remove_reader(child.pidfd)
        pid = child.pid
        log_event(
            logger, logging.ERROR, "router_process_died", process=child.name, pid=pid,
            how=child.died(time.monotonic()),
        )  # fmt: skip
        self._start_later(child)

    def _start_later(self, child: WorkerSupervisor) -> None:
        assert child.restart_at is not None
        delay_s = max(0.0, child.restart_at - time.monotonic())
        asyncio.get_running_loop().call_later(delay_s, self._restart, child)

    def _restart(self, child: WorkerSupervisor) -> None:
        if not self._is_stopping:
            self._start(child)


async def _stop(child: WorkerSupervisor, timeout_s: float) -> None:
    """Ask a child to stop; kill it if it does not."""
    if child.pid is not None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.kill(child.pid, signal.SIGTERM)
    await asyncio.to_thread(child.stop, timeout_s)


def with_ports(
    config: RouterConfig, port: socket.socket, control_port: socket.socket
) -> RouterConfig:
    """Return the settings with the ports that were bound, which may have been any free ones."""
    ports = [each.getsockname()[1] for each in (port, control_port)]
    return replace(config, port=ports[0], control_port=ports[1])


def bind_port(host: str, port: int, name: str) -> socket.socket:
    """Return a socket that holds a port for processes that share it; 0 takes a free one.

    Args:
        name: Of the setting, for the error.

    Raises:
        ConfigError: Another process has it, or the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))  # fails also if another router shares the port
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        raise reject(name, port, f"{host}: {error.strerror or error}") from None
    return holder


def stop_with_supervisor(stopped: asyncio.Event) -> None:
    """Set the event on SIGTERM, and when the supervisor ends, which closes standard input."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)

    def at_end() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stopped.set()

    loop.add_reader(sys.stdin.fileno(), at_end)


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
    app = make_app(chooser, proxy_config(config), lambda: chooser.has_workers)
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


async def _decide(config: RouterConfig, link: str) -> None:
    stopped = asyncio.Event()
    stop_with_supervisor(stopped)
    async with AsyncExitStack() as stack:
        await _open_decider(stack, config, link)
        await stopped.wait()


async def _open_decider(
    stack: AsyncExitStack, config: RouterConfig, link: str | None = None
) -> DeciderService:
    """Start a decider with all that asks it in its process, to be closed with the stack."""
    service = DeciderService(config, address_of(config), link)
    stack.push_async_callback(service.close)
    await service.start()
    control = ControlApi(service)
    stack.push_async_callback(control.close)
    await control.start()
    await start_gateway(stack, config, service.decider, lambda: service.is_ready)
    return service


def run_child() -> None:
    """Run the decider or a proxy, as the settings on standard input say, until told to stop.

    The terminal's Ctrl-C is ignored: the supervisor handles it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSettings)
    config = RouterConfig.from_layers(settings.config)
    set_up_logging(config.log_level, config.log_format)
    try:
        if settings.is_proxy:
            uvloop.run(_relay(config, settings.link))
        else:
            sys.setswitchinterval(THREAD_SWITCH_S)
            uvloop.run(_decide(config, settings.link))
    except ConfigError as error:
        log_event(logger, logging.ERROR, "router_process_not_started", error=str(error))
        sys.exit(1)


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end.

    Raises:
        ConfigError: A setting, file or address cannot be used.
    """
    for read in (listing_of, engine_headers, routing_of, proxy_config, gateway_class):
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
        service = await _open_decider(stack, config)
        app = make_app(service.decider, proxy_config(config), lambda: service.is_ready)
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


_FEW_CLIENTS = 1_000  # more than a trial needs, and fewer than a busy fleet


def _log_serving(config: RouterConfig) -> None:
    num_clients = proxy_config(config).max_connections
    log_event(
        logger, logging.INFO, "router_serving", address=address_of(config),
        control=control_address_of(config), workers=len(config.workers),
        max_clients=num_clients * max(1, config.proxies),
    )  # fmt: skip
    if num_clients < MAX_CONNECTIONS:
        log_event(
            logger, logging.WARNING if num_clients < _FEW_CLIENTS else logging.INFO,
            "router_few_descriptors", limit=raise_limit(),
            max_clients=num_clients, hint="raise the hard limit: ulimit -Hn, LimitNOFILE=, "
            "docker run --ulimit nofile=65536",
        )  # fmt: skip


def _stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


if __name__ == "__main__":
    run_child()
