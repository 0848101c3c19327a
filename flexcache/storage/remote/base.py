"""The contract of a remote store: named objects that other hosts see too.

A store moves bytes without knowing their content, which `object_format` defines. An object is
passed as *parts*, memoryviews that are contiguous in the object but not in memory, so that a store
that can gather and scatter copies nothing.

Calls block, may come from several threads at once, and return a result for each object. The names
in a batch are distinct. A deadline is an absolute `time.monotonic`. A store starts nothing after it
and ends what it has started as soon as it can; if its native client hangs, the caller's whole
process must be replaced.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from flexcache.errors import FlexCacheError

Parts = Sequence[memoryview]
"""One object's bytes, each part contiguous and of type uint8."""


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
class Outcome:
    """Result for one object. If ``status`` is OK, ``num_bytes`` is the size read or written.

    ``digest`` is the `checksum` of what was read into all parts but the first, the header, from a
    store that computed it while the bytes were in the processor's cache.
    """

    status: Status
    num_bytes: int = 0
    reason: str | None = None
    digest: int | None = None


MISSING = Outcome(Status.MISSING, reason="not in the store")


def failed(reason: str) -> Outcome:
    return Outcome(Status.FAILED, reason=reason)


def too_large(num_bytes: int, room: int) -> Outcome:
    return Outcome(Status.TOO_LARGE, reason=f"{num_bytes} bytes where at most {room} are expected")


@dataclass(frozen=True, slots=True)
class Presence:
    """The first ``num_present`` names exist; with an ``error``, the rest is unknown."""

    num_present: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that may contain parts; a store registers it once if its transport requires that."""

    address: int
    num_bytes: int


class RemoteStore(ABC):
    """Named objects, moved in batches. Thread-safe; see the module for parts and deadlines."""

    name: str
    """Name and location of the store, for logs."""
    joins_below: int = 0
    """Parts smaller than this are moved faster as one part, even though that takes a copy."""

    @abstractmethod
    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        """Count the leading names that exist without a gap."""

    @abstractmethod
    def first_present(self, names: Sequence[str], deadline: float) -> int:
        """Return the place of the first name that exists; ``len(names)`` if none is known to."""

    @abstractmethod
    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[Outcome]:
        """Read each object into its parts, in order. A smaller object leaves the last ones alone.

        Nothing is written to the parts after this has returned. Parts of objects that were not
        read successfully may have been written to.
        """

    @abstractmethod
    def write_from(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[Outcome]:
        """Store each object; a reader sees all of it or none.

        If the name already exists this succeeds, and the store keeps either the old object or the
        new one. The parts must not change during the call.
        """

    @abstractmethod
    def discard(self, names: Sequence[str], deadline: float) -> None:
        """Remove objects, best effort: missing ones and failures are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release the store. No call may be running. Idempotent."""


def seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return where memory that is contiguous begins."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def num_bytes_of(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


def first_bytes(parts: Parts, num_bytes: int) -> list[memoryview]:
    """Return the front of the parts."""
    front = []
    for part in parts:
        if num_bytes:
            front.append(part[:num_bytes])
            num_bytes -= len(front[-1])
    return front


def scatter(data: memoryview, parts: Parts) -> None:
    """Copy the bytes into the parts, in order. There must be room for all of them."""
    for part in parts:
        part[: len(data)] = data[: len(part)]
        data = data[len(part) :]


def gather(parts: Parts, room: memoryview) -> memoryview:
    """Copy the parts into memory of their size, in order; return it."""
    start = 0
    for part in parts:
        room[start : start + len(part)] = part
        start += len(part)
    return room
