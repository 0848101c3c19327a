"""The SSD tier's index beside SQLite and LMDB: durable commits, and loading at startup.

    python benchmarks/bench_slot_index.py [DIRECTORY]

The same 128-byte records by slot number in all three. SQLite in WAL mode with synchronous=FULL, so
that each of them has a commit on the device before the next. Rounds take turns, since devices have
moods; the loaded records are compared.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flexcache.storage.pool_directory import index_file_bytes, reserve_space
from flexcache.storage.slot_index import RECORD, RECORD_BYTES, Records, SlotIndex, make_records

GROUPS = (
    (1, "scattered"),
    (8, "neighbours"),
    (8, "scattered"),
    (64, "neighbours"),
    (64, "scattered"),
)
SIZES = (10_000, 100_000, 1_000_000)
NUM_ROUNDS, COMMITS_PER_ROUND = 20, 10


class Store(ABC):
    """Records by slot number."""

    name: str

    @abstractmethod
    def __init__(self, path: Path, num_slots: int) -> None: ...

    @abstractmethod
    def commit(self, slots: np.ndarray, records: Records) -> None:
        """Store them durably."""

    @abstractmethod
    def load(self) -> Records:
        """All of them, as one array."""

    @abstractmethod
    def close(self) -> None: ...


class InPlace(Store):
    name = "records in place (ours)"

    def __init__(self, path: Path, num_slots: int) -> None:
        self._num_slots = num_slots
        self._fd = os.open(path / "index", os.O_RDWR | os.O_CREAT)
        reserve_space(self._fd, index_file_bytes(num_slots))
        self._index = SlotIndex([self._fd], b"benchmark's pool")

    def commit(self, slots: np.ndarray, records: Records) -> None:
        self._index.write(slots, records)
        os.fdatasync(self._fd)

    def load(self) -> Records:
        return self._index.load(self._num_slots).records

    def close(self) -> None:
        os.close(self._fd)


class Sqlite(Store):
    name = "SQLite, WAL, FULL"

    def __init__(self, path: Path, num_slots: int) -> None:
        self._db = sqlite3.connect(path / "index.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE slots (slot INTEGER PRIMARY KEY, record BLOB)")

    def commit(self, slots: np.ndarray, records: Records) -> None:
        rows = zip(slots.tolist(), records.view(f"V{RECORD_BYTES}").tolist(), strict=True)
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def load(self) -> Records:
        rows = self._db.execute("SELECT record FROM slots ORDER BY slot").fetchall()
        return np.frombuffer(b"".join(row[0] for row in rows), RECORD)

    def close(self) -> None:
        self._db.close()


class Lmdb(Store):
    name = "LMDB"

    def __init__(self, path: Path, num_slots: int) -> None:
        import lmdb

        self._env = lmdb.open(str(path), map_size=1 << 32)

    def commit(self, slots: np.ndarray, records: Records) -> None:
        keys = slots.astype(">u8").view("V8").tolist()
        items = zip(keys, records.view(f"V{RECORD_BYTES}").tolist(), strict=True)
        with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(items)

    def load(self) -> Records:
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            return np.frombuffer(b"".join(value for _, value in cursor), RECORD)

    def close(self) -> None:
        self._env.close()


def some_records(count: int, rng: np.random.Generator) -> Records:
    data = rng.bytes(32 * count)
    keys = [data[i : i + 32] for i in range(0, len(data), 32)]
    records = make_records(b"root of a model!", 0, b"", keys, np.arange(count, dtype=np.uint64))
    records["generation"] = np.arange(count)
    return records


def some_slots(count: int, where: str, num_slots: int, rng: np.random.Generator) -> np.ndarray:
    if where == "neighbours":
        return int(rng.integers(num_slots - count)) + np.arange(count)
    return np.sort(rng.choice(num_slots, count, replace=False))


def kinds() -> list[type[Store]]:
    try:
        import lmdb  # noqa: F401
    except ImportError:
        print("lmdb is not installed: left out")
        return [InPlace, Sqlite]
    return [InPlace, Sqlite, Lmdb]


def open_stores(path: Path, num_slots: int) -> list[Store]:
    opened = []
    for kind in kinds():
        directory = path / f"{kind.__name__}-{num_slots}"
        directory.mkdir()
        opened.append(kind(directory, num_slots))
    return opened


def time_commits(path: Path) -> Table:
    """Time of a durable commit, with 100,000 records in the store.

    The fastest tenth says what a commit costs; the median, what a busy machine makes of it.
    """
    num_slots = SIZES[1]
    rng = np.random.default_rng(0)
    stores = open_stores(path, num_slots)
    records = some_records(num_slots, rng)
    for store in stores:
        store.commit(np.arange(num_slots), records)
    times: dict[tuple[str, tuple[int, str]], list[float]] = {}
    for _ in track(range(NUM_ROUNDS), "commits"):
        for group in GROUPS:
            for store in stores:
                for _ in range(COMMITS_PER_ROUND):
                    slots = some_slots(*group, num_slots, rng)
                    started = time.perf_counter()
                    store.commit(slots, records[slots])
                    took = time.perf_counter() - started
                    times.setdefault((store.name, group), []).append(took)
    table = Table("durable commit, p10 / median", *(f"{n} {where}" for n, where in GROUPS))
    for store in stores:
        cells = []
        for group in GROUPS:
            taken = times[store.name, group]
            tenth, median = statistics.quantiles(taken, n=10)[0], statistics.median(taken)
            cells.append(f"{tenth * 1e3:.2f} / {median * 1e3:.2f} ms")
        table.add_row(store.name, *cells)
        store.close()
    return table


def time_loads(path: Path) -> Table:
    """Time to have all records as one array; the files are in the page cache."""
    table = Table("load", *(f"{size:,} records" for size in SIZES))
    rows: dict[str, list[str]] = {}
    rng = np.random.default_rng(1)
    for size in track(SIZES, "loads"):
        records = some_records(size, rng)
        for store in open_stores(path, size):
            store.commit(np.arange(size), records)
            best = min(_timed_load(store, records) for _ in range(3))
            rows.setdefault(store.name, []).append(f"{best * 1e3:,.0f} ms")
            store.close()
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _timed_load(store: Store, records: Records) -> float:
    started = time.perf_counter()
    found = store.load()
    took = time.perf_counter() - started
    assert (found["key"] == records["key"]).all()
    return took


def main() -> None:
    console = Console(width=140)
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as directory:
        for name, measure in (("commits", time_commits), ("loads", time_loads)):
            path = Path(directory) / name
            path.mkdir()
            console.print(measure(path))


if __name__ == "__main__":
    main()
