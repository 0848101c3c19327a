"""A remote store as a user of FlexCache may write one: objects in the rows of an SQLite file.

    outside.sqlite_store:///PATH[?journal=wal]

Nothing in FlexCache names this module: the scheme of its URLs does.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flexcache.config.remote_url import (
    RemoteUrl,
    StoreKind,
    StoreLimits,
    choice_option,
    register,
)  # fmt: skip
from flexcache.storage.pieces import Parts, num_bytes_of, scatter
from flexcache.storage.remote.base import (
    MISSING,
    TOO_LATE,
    ObjectOutcome,
    Status,
    StepwiseStore,
    StoreUnavailableError,
    failed,
    seconds_until,
    too_large,
)


class SqliteStore(StepwiseStore):
    def __init__(self, url: RemoteUrl, limits: StoreLimits) -> None:
        self.name = url.name
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                url.location, limits.timeout_s, isolation_level=None, check_same_thread=False
            )
            self._db.execute(f"PRAGMA journal_mode = {url.options.get('journal', 'delete')}")
            self._db.execute("CREATE TABLE IF NOT EXISTS objects (name PRIMARY KEY, content)")
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"{self.name}: {error}") from None

    def look(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        return self._each(deadline, lambda name, _: self._outcome(self._content(name)), names)

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        def read(name: str, target: Parts) -> ObjectOutcome:
            content, room = self._content(name), num_bytes_of(target)
            if content is not None and len(content) > room:
                return too_large(len(content), room)
            scatter(memoryview(content or b""), target)
            return self._outcome(content)

        return self._each(deadline, read, names, parts)

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        def write(name: str, source: Parts) -> ObjectOutcome:
            content = b"".join(source)
            self._db.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (name, content))
            return self._outcome(content)

        return self._each(deadline, write, names, parts)

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        def remove(name: str, _: object) -> ObjectOutcome:
            self._db.execute("DELETE FROM objects WHERE name = ?", (name,))
            return MISSING

        return self._each(deadline, remove, names)

    def close(self) -> None:
        self._db.close()

    def _content(self, name: str) -> bytes | None:
        row = self._db.execute("SELECT content FROM objects WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def _outcome(self, content: bytes | None) -> ObjectOutcome:
        return MISSING if content is None else ObjectOutcome(Status.OK, len(content))

    def _each(
        self,
        deadline: float,
        action: Callable[[str, Any], ObjectOutcome],
        names: Sequence[str],
        parts: Iterable[Any] | None = None,
    ) -> list[ObjectOutcome]:
        outcomes = []
        for name, each in zip(names, names if parts is None else parts, strict=True):
            if seconds_until(deadline) <= 0:
                outcomes.append(TOO_LATE)
                continue
            try:
                with self._lock:
                    outcomes.append(action(name, each))
            except sqlite3.Error as error:
                outcomes.append(failed(str(error)))
        return outcomes


register(
    __name__,
    StoreKind(
        open=SqliteStore,
        form=f"{__name__}:///FILE",
        fits=lambda split: not split.netloc and split.path.startswith("/"),
        options={"journal": choice_option("delete", "wal")},
        caution="; it is meant for tests",
    ),
)
