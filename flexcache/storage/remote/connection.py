"""Opens a remote store that may not be up yet, retrying in the background until it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.storage.remote.base import RemoteStore, StoreUnavailableError

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 5.0


class Connection:
    """A store, once it could be opened. From then on the store handles its own failures."""

    def __init__(self, open_store: Callable[[], RemoteStore]) -> None:
        self._open_store = open_store
        self._store: RemoteStore | None = None
        self._problem = "not connected yet"
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._connect, name="flexcache-remote-connect", daemon=True
        )
        self._thread.start()

    def store(self) -> RemoteStore:
        """Return the open store.

        Raises:
            StoreUnavailableError: It has not been opened yet; the message says why.
        """
        if self._store is None:
            raise StoreUnavailableError(self._problem)
        return self._store

    def close(self) -> None:
        """Close the store and stop trying to open it. No call of the store may be running."""
        self._closing.set()
        self._thread.join()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _connect(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            try:
                self._store = self._open_store()
            except (ConfigError, MissingDependencyError) as error:  # waiting does not help
                self._problem = str(error)
                log_event(logger, logging.ERROR, "remote_store_unusable", error=error)
                return
            except Exception as error:
                if str(error) != self._problem:
                    log_event(logger, logging.WARNING, "remote_store_unreachable", error=error)
                self._problem = str(error)
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            else:
                log_event(logger, logging.INFO, "remote_store_connected", store=self._store.name)
                return
