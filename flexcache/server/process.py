"""Server process: started by hand (`flexcache server`) or by an engine."""

from __future__ import annotations

import logging
import select
import signal
import sys
from collections.abc import Callable

import msgspec

from flexcache.config import ServerConfig
from flexcache.errors import ConfigError
from flexcache.logs import log_event, set_up_logging
from flexcache.server.server import KVServer

logger = logging.getLogger(__name__)


def run_server(
    config: ServerConfig,
    starter_fd: int | None = None,
    began: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM, SIGINT or idleness; then drain.

    Args:
        starter_fd: As in `has_left`, if an engine started this process.
        began: Called with the address once it is bound.

    Raises:
        ConfigError: The endpoint or a directory cannot be used.
    """
    server = KVServer(
        config.cache, model=config.model, idle_exit_s=config.idle_exit_s,
        is_needed=lambda: starter_fd is None or not has_left(starter_fd),
    )  # fmt: skip
    # The handler only wakes the loop, which then drains: bytes land, dirty blocks are written.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.serve(began)


def main() -> None:
    """Entry point of a server that an engine started.

    Reads the config from standard input. The only argument is this end of the engine's pipe.
    """
    # Its launcher has forked it away: the death of data-parallel rank 0 must not take the cache of
    # the other ranks along, and no engine has to reap it. It ends by itself (`IdleExit`).
    config = ServerConfig.from_layers(msgspec.json.decode(sys.stdin.buffer.read()))
    set_up_logging(config.cache.log_level, config.cache.log_format)
    try:
        run_server(config, int(sys.argv[1]))
    except ConfigError as error:
        log_event(logger, logging.ERROR, "server_not_started", error=error)
        sys.exit(1)


def has_left(starter_fd: int) -> bool:
    """Whether the engine that started this server has ended, or found another server.

    Args:
        starter_fd: This end of the pipe that the engine's `ServerLauncher` made.
    """
    poller = select.poll()
    poller.register(starter_fd, 0)
    return bool(poller.poll(0))
