"""Starts a server process, detached from the engine, if the endpoint has none.

Data-parallel rank 0 does so at once, other ranks after a delay, in case their rank 0 is on another
host or gone. If two try, the lock on the endpoint admits one. The server is not a child of the
engine: it serves other engines too, and outlives this one.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys

import msgspec

from flexcache.config import ServerConfig
from flexcache.logs import log_event
from flexcache.processes import tell_of_forks
from flexcache.protocol.runtime import is_served

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 5.0  # longer than a server takes to lock its endpoint
_LONGEST_BACKOFF_S = 30.0
_LONGEST_START_S = 60.0  # from a server's start to its lock, on a busy machine
# The child forks at once and exits, so that no parent has to reap the server.
_DETACH = "import os; os.fork() and os._exit(0); from flexcache.server.process import main; main()"


class ServerLauncher:
    """Starts servers for a client. The client's thread calls it and passes in the time.

    Args:
        config: The server's configuration; it must name an endpoint.
        patience_s: Start a server if the endpoint has not been served for this long.
    """

    def __init__(self, config: ServerConfig, patience_s: float) -> None:
        self._config = config
        self._patience_s = patience_s
        self._next_start_s: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._alive_fd = -1
        """This side of a pipe to the last started server. Each side sees when the other closes."""
        self._started_s = 0.0
        tell_of_forks(self)

    def ensure(self, now: float) -> None:
        """Start a server unless one is running or was started recently."""
        endpoint = self._config.cache.endpoint
        assert endpoint is not None
        if is_served(endpoint):
            self._next_start_s = None
            return
        if self._next_start_s is None:
            self._next_start_s = now + self._patience_s
        if now < self._next_start_s or self._is_starting(now):
            return
        self._next_start_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        log_event(logger, logging.INFO, "server_starting", endpoint=endpoint)
        self.close()
        self._alive_fd, held_fd = os.pipe()
        self._started_s = now
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _DETACH, str(held_fd)], stdin=subprocess.PIPE,
                start_new_session=True, pass_fds=[held_fd],
            )  # fmt: skip
            process.communicate(msgspec.json.encode(self._config.to_dict()))
        except OSError as error:  # the process limit, say
            log_event(logger, logging.ERROR, "server_not_started", error=error)
        finally:
            os.close(held_fd)

    def _is_starting(self, now: float) -> bool:
        """Return whether the last started server is alive but not serving yet. A second one would
        only be refused, or start when it is no longer needed."""
        if self._alive_fd < 0 or now - self._started_s > _LONGEST_START_S:
            return False
        poller = select.poll()  # select.select accepts low descriptors only
        poller.register(self._alive_fd, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        """Release the last started server, which exits unless it has a client. Idempotent."""
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1

    def forked(self) -> None:
        self.close()  # else the server could not see the engine's end

    def succeeded(self) -> None:
        """Reset the backoff after a server accepted the client: restart at once after a loss."""
        self.close()
        self._backoff_s = _FIRST_BACKOFF_S
        self._next_start_s = None
