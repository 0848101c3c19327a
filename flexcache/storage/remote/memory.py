"""In-memory remote store: the contract in its simplest form, and a test double."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexcache.config.remote_url import StoreKind, register
from flexcache.storage.pieces import Parts, num_bytes_of, scatter
from flexcache.storage.remote.base import (
    MISSING,
    TOO_LATE,
    ObjectOutcome,
    Status,
    StepwiseStore,
    seconds_until,
    too_large,
)


class MemoryStore(StepwiseStore):
    """A store that is never full and ends with the process."""

    name = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def look(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        if seconds_until(deadline) <= 0:
            return [TOO_LATE for _ in names]
        return [ObjectOutcome(Status.OK) if name in self.objects else MISSING for name in names]

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        if seconds_until(deadline) <= 0:
            return [TOO_LATE for _ in names]
        return [self._read(name, room) for name, room in zip(names, parts, strict=True)]

    def _read(self, name: str, parts: Parts) -> ObjectOutcome:
        data = self.objects.get(name)
        if data is None:
            return MISSING
        if len(data) > num_bytes_of(parts):
            return too_large(len(data), num_bytes_of(parts))
        scatter(memoryview(data), parts)
        return ObjectOutcome(Status.OK, len(data))

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        if seconds_until(deadline) <= 0:
            return [TOO_LATE for _ in names]
        new = {name: b"".join(content) for name, content in zip(names, parts, strict=True)}
        self.objects |= new
        return [ObjectOutcome(Status.OK, len(content)) for content in new.values()]

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        if seconds_until(deadline) <= 0:
            return [TOO_LATE for _ in names]
        gone = [self.objects.pop(name, None) for name in names]
        return [MISSING if data is None else ObjectOutcome(Status.OK) for data in gone]

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


register(
    "memory",
    StoreKind(
        open=lambda url, limits: MemoryStore(),
        form="memory://",
        fits=lambda split: not (split.netloc or split.path),
    ),
)
