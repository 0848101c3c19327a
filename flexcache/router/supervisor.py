"""Keeps one decider and several proxies running, each a process of its own.

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
from dataclasses import replace
from pathlib import Path

import msgspec

from flexcache.config.router import RouterConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.logs import log_event, set_up_logging
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.workers import WorkerSupervisor

logger = logging.getLogger(__name__)

_DECIDER = "flexcache.router.decider.process"
_PROXY = "flexcache.router.proxy.process"
_DECIDER_STOP_S = 5.0


class ChildSettings(msgspec.Struct, frozen=True):
    """What a child reads from its standard input.

    Attributes:
        config: Of `RouterConfig.to_dict`.
        link: Endpoint of the link between decider and proxies.
    """

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
        settings = ChildSettings(self.config.to_dict(), self._link)
        self._decider = WorkerSupervisor("decider", _DECIDER, lambda _: settings, ())
        self._proxies = [
            WorkerSupervisor(f"proxy {number}", _PROXY, lambda _: settings, ())
            for number in range(config.proxies)
        ]

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


def read_settings() -> tuple[RouterConfig, str]:
    """Read the settings of this child, set up its log, and ignore the terminal's Ctrl-C, which the
    supervisor handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSettings)
    config = RouterConfig.from_layers(settings.config)
    set_up_logging(config.log_level, config.log_format)
    return config, settings.link


def stop_with_supervisor(stopped: asyncio.Event) -> None:
    """Set the event on SIGTERM, and when the supervisor ends, which closes standard input."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)

    def at_end() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stopped.set()

    loop.add_reader(sys.stdin.fileno(), at_end)


def exit_on_config_error(error: ConfigError) -> None:
    """Log why this child cannot run, and end it."""
    log_event(logger, logging.ERROR, "router_process_not_started", error=str(error))
    sys.exit(1)
