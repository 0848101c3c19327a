"""Contract of a remote store: named objects that other hosts see too.

A store moves bytes without knowing their content, which `objects` defines. An object is passed as
*parts*, memoryviews that are contiguous in the object but not in memory, so that a store that can
gather and scatter copies nothing. Parts lie in the host pool, which belongs to this host alone: a
library that shows memory to the network must not see them (`mooncake.BounceMemory`).

Calls block, may come from several threads at once, and return a result for each object. The names
in a batch are distinct. A deadline is an absolute `time.monotonic`. A store starts nothing after it
and ends what it has started as soon as it can; if its native client hangs, the caller's whole
process must be replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from flexcache.errors import ConfigError, FlexCacheError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.storage.pieces import Parts

logger = logging.getLogger(__name__)


class StoreUnavailableError(FlexCacheError):
    """The store cannot be reached, so the result of the request is unknown."""


class Status(Enum):
    """How the transfer of one object ended."""

    OK = "ok"
    MISSING = "missing"
    TOO_LARGE = "too large"
    """The object has more bytes than there was room for, so it is not the expected one."""
    FAILED = "failed"
    """The outcome is unknown: the store did not answer, or not in time, or has no room."""


@dataclass(frozen=True, slots=True)
class ObjectOutcome:
    """Result for one object. If ``status`` is OK, ``num_bytes`` is the size read or written.

    ``digest`` is the `checksum` of what was read into all parts but the first, the header, from a
    store that computed it while the bytes were in the processor's cache.
    """

    status: Status
    num_bytes: int = 0
    reason: str | None = None
    digest: int | None = None


MISSING = ObjectOutcome(Status.MISSING, reason="not in the store")
TOO_LATE = ObjectOutcome(Status.FAILED, reason="not done by its deadline (remote_timeout_s)")


def failed(reason: str) -> ObjectOutcome:
    return ObjectOutcome(Status.FAILED, reason=reason)


def too_large(num_bytes: int, room: int) -> ObjectOutcome:
    return ObjectOutcome(
        Status.TOO_LARGE, reason=f"{num_bytes} bytes where at most {room} are expected"
    )


@dataclass(frozen=True, slots=True)
class Presence:
    """The first ``num_present`` names exist; with an ``error``, the rest is unknown."""

    num_present: int
    error: str | None = None


class RemoteStore(ABC):
    """Named objects, moved in batches. Thread-safe; see the module for parts and deadlines."""

    name: str
    """Name and location of the store, for logs."""

    @abstractmethod
    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        """Count the leading names that exist without a gap."""

    @abstractmethod
    def first_present(self, names: Sequence[str], deadline: float) -> int:
        """Return the place of the first name that exists; ``len(names)`` if none is known to."""

    @abstractmethod
    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        """Read each object into its parts, in order. A smaller object leaves the last ones alone.

        Nothing is written to the parts after this has returned. Parts of objects that were not
        read successfully may have been written to.
        """

    @abstractmethod
    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        """Store each object; a reader sees all of it or none.

        If the name already exists this succeeds, and the store keeps either the old object or the
        new one. The parts must not change during the call. They may be made as they are iterated
        over: a store that copies them finds what was checked last in the processor's cache.
        """

    @abstractmethod
    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        """Remove objects: those that failed may still be there."""

    @abstractmethod
    def close(self) -> None:
        """Release the store. No call may be running. Idempotent."""


def seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


_FIRST_LOOK = 8
"""Number of names in the first step; each further one doubles it, until a name is missing."""


class StepwiseStore(RemoteStore):
    """Looks names up in growing steps: most prompts are missing, or present over a long prefix."""

    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        for start, found in self._steps(names, deadline):
            gapless = sum(1 for _ in takewhile(lambda o: o.status is Status.OK, found))
            if gapless < len(found):
                end = found[gapless]
                error = end.reason if end.status is Status.FAILED else None
                return Presence(start + gapless, error)
        return Presence(len(names))

    def first_present(self, names: Sequence[str], deadline: float) -> int:
        for start, found in self._steps(names, deadline):
            for number, outcome in enumerate(found, start):
                if outcome.status is Status.OK:
                    return number
        return len(names)

    @abstractmethod
    def look(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        """Return for each name whether it exists."""

    def _steps(
        self, names: Sequence[str], deadline: float
    ) -> Iterator[tuple[int, list[ObjectOutcome]]]:
        start, step = 0, _FIRST_LOOK
        while start < len(names):
            found = self.look(names[start : start + step], deadline)
            yield start, found
            start += step
            step *= 2


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
