"""The contract of a remote store: named objects that other hosts see too.

A store moves bytes and knows nothing of what is in them; `object_format` does. An object is handed
over as *parts*, memoryviews that lie one after the other in the object but not in memory, so that
a store that can gather and scatter copies nothing.

Calls block, may come from several threads at once, and answer for each object. The names of one
batch differ. A deadline is an
absolute `time.monotonic`. A store starts nothing after it and ends what it has started as soon as
it can; where its native client hangs, the caller's whole process has to go.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flexcache.errors import FlexCacheError

Parts = Sequence[memoryview]
"""One object's bytes, each part contiguous and of type uint8."""


class StoreUnavailableError(FlexCacheError):
    """The store cannot be reached. What was asked of it is not known."""


class Status(Enum):
    """How the transfer of one object ended."""

    OK = "ok"
    MISSING = "missing"
    TOO_LARGE = "too large"
    """It has more bytes than there was room for, so it is not what it was taken for."""
    FAILED = "failed"
    """Nothing is known of it: the store did not answer, or not in time, or has no room."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``num_bytes`` is the size of the object that was read or written, if ``status`` is OK."""

    status: Status
    num_bytes: int = 0
    reason: str | None = None


MISSING = Outcome(Status.MISSING, reason="not in the store")


def failed(reason: str) -> Outcome:
    return Outcome(Status.FAILED, reason=reason)


def too_large(num_bytes: int, room: int) -> Outcome:
    return Outcome(Status.TOO_LARGE, reason=f"{num_bytes} bytes where at most {room} are expected")


@dataclass(frozen=True, slots=True)
class Presence:
    """The first ``num_present`` names are there; with an ``error``, the rest is unknown."""

    num_present: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that parts may lie in; a store registers it once where its transport needs that."""

    address: int
    num_bytes: int


class RemoteStore(ABC):
    """Named objects in batches. Thread-safe; see the module for parts and deadlines."""

    name: str
    """For logs: which store, and where."""

    @abstractmethod
    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        """How many of the names, from the first on, are there without a gap."""

    @abstractmethod
    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[Outcome]:
        """Read each object into its parts, in order. A smaller one leaves the last as they are.

        Once this has returned nothing is written to the parts any more. Parts of objects that did
        not end well may have been written to.
        """

    @abstractmethod
    def write_from(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[Outcome]:
        """Store each object; a reader sees it whole or not at all.

        Where the name is taken already this succeeds, and the store keeps the old object or the
        new one. The parts must not change meanwhile.
        """

    @abstractmethod
    def discard(self, names: Sequence[str], deadline: float) -> None:
        """Remove objects, as well as it goes: missing ones and failures are passed over."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store. No call may be running. Idempotent."""


def seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def num_bytes_of(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


def scatter(data: memoryview, parts: Parts) -> None:
    """Lay the bytes into the parts, one after the other. There must be room for all of them."""
    for part in parts:
        part[: len(data)] = data[: len(part)]
        data = data[len(part) :]
