"""Remote stores: FlexCache's reads and writes beside the store's own calls, in one run.

    python scripts/bench_remote.py [--rounds 9] [--store mooncake --store s3 --store file]

Every round moves the same blocks from and to the same memory, once through `BlockMover` (headers,
checksums, per-block answers) and once through what the store itself offers: Mooncake's batch calls,
obstore's own requests with as many at once. The table has the medians over the rounds, in GB/s,
and the median of the rounds' ratios, which a busy machine disturbs least.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "system"))

from stores import mooncake_master, mooncake_segment, s3_server

from flexcache.storage.host_pool import HostSegment
from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import Region, RemoteStore
from flexcache.storage.remote.block_mover import BlockMover, batch_size
from flexcache.storage.remote.object_format import BlockCodec, object_name

BLOCK_SIZES = (2 << 20, 400 << 10)
ROUND_BYTES = 128 << 20
CONCURRENCY = 16
DEADLINE_S = 60.0


class OwnCalls(ABC):
    """What a user of the store would write without FlexCache."""

    @abstractmethod
    def write(self, names: list[str], blocks: list[memoryview]) -> None: ...

    @abstractmethod
    def read(self, names: list[str], blocks: list[memoryview]) -> None: ...


class MooncakeCalls(OwnCalls):
    def __init__(self, store: Any) -> None:
        self._client = store._client

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_put_from(names, *_pointers(blocks))
        assert set(results) == {0}, results

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_get_into(names, *_pointers(blocks))
        assert min(results) > 0, results


def _pointers(blocks: list[memoryview]) -> tuple[list[int], list[int]]:
    return [np.frombuffer(b, np.uint8).ctypes.data for b in blocks], [len(b) for b in blocks]


class ObstoreCalls(OwnCalls):
    def __init__(self, store: Any) -> None:
        import obstore

        self._api, self._client = obstore, store._client

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        async def one(name: str, block: memoryview) -> None:
            await self._api.put_async(self._client, name, block, use_multipart=False)

        _each(one, names, blocks)

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        async def one(name: str, block: memoryview) -> None:
            block[:] = memoryview(
                await (await self._api.get_async(self._client, name)).bytes_async()
            )

        _each(one, names, blocks)


def _each(action: Callable[..., Any], names: list[str], blocks: list[memoryview]) -> None:
    async def all_of_them() -> None:
        free = asyncio.Semaphore(CONCURRENCY)

        async def limited(*arguments: Any) -> None:
            async with free:
                await action(*arguments)

        await asyncio.gather(*map(limited, names, blocks))

    asyncio.run(all_of_them())


class Bench:
    """One store, one block size: both ways of writing and reading, round after round."""

    def __init__(self, store: RemoteStore, own: OwnCalls, segment: HostSegment, size: int) -> None:
        self._store, self._own = store, own
        count = segment.num_blocks // 2
        self._source = [segment.block(i)[:size] for i in range(count)]
        self._target = [segment.block(count + i)[:size] for i in range(count)]
        codec = BlockCodec()
        room = memoryview(bytearray(batch_size(size) * codec.room_bytes(size)))
        self._mover = BlockMover(codec, room, size)
        self._num_bytes = count * size

    def round(self, ours_first: bool) -> dict[str, float]:
        root = os.urandom(16)
        keys = [i.to_bytes(16, "little") for i in range(len(self._source))]
        names = [f"own/{root.hex()}/{i}" for i in range(len(keys))]
        deadline = time.monotonic() + DEADLINE_S

        def ours(move: Callable[..., Any], blocks: list[memoryview]) -> None:
            moved = move(self._store, root, keys, [[block] for block in blocks], deadline)
            assert moved.num_ok == len(keys), moved

        actions = {
            "write ours": lambda: ours(self._mover.save, self._source),
            "write own": lambda: self._own.write(names, self._source),
            "read ours": lambda: ours(self._mover.load, self._target),
            "read own": lambda: self._own.read(names, self._target),
        }
        order = list(actions) if ours_first else [list(actions)[i] for i in (1, 0, 3, 2)]
        speed = {name: self._time(actions[name]) for name in order}
        assert self._source == self._target
        self._store.discard([*names, *(object_name(root, key) for key in keys)], deadline)
        return speed

    def _time(self, action: Callable[[], None]) -> float:
        start = time.perf_counter()
        action()
        return self._num_bytes / (time.perf_counter() - start) / 1e9


@contextmanager
def mooncake() -> Iterator[tuple[str, type[OwnCalls]]]:
    """The blocks lie in another process, so they go through TCP on loopback."""
    with mooncake_master(segment_gb=1.0) as master, mooncake_segment(master.url):
        yield master.url.partition("?")[0], MooncakeCalls


@contextmanager
def s3() -> Iterator[tuple[str, type[OwnCalls]]]:
    with s3_server() as server:
        yield server.url, ObstoreCalls


@contextmanager
def file() -> Iterator[tuple[str, type[OwnCalls]]]:
    with tempfile.TemporaryDirectory() as directory:
        yield f"file://{directory}", ObstoreCalls


STORES = {"mooncake": mooncake, "s3": s3, "file": file}


def main(
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = 9,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file.")] = list(STORES),  # noqa: B006
) -> None:
    table = Table(title=f"GB/s, medians of {rounds} rounds of {ROUND_BYTES >> 20} MiB")
    for heading in ("store", "block", "", "FlexCache", "own calls", "ratio"):
        table.add_column(heading, justify="left" if heading in ("store", "") else "right")
    for name in store:
        with STORES[name]() as (url, calls):
            for size in BLOCK_SIZES:
                for direction, row in measure(url, calls, size, rounds).items():
                    table.add_row(name, f"{size >> 10} KiB", direction, *row)
    Console().print(table)


def measure(
    url: str, calls: Callable[[Any], OwnCalls], size: int, rounds: int
) -> dict[str, list[str]]:
    count = ROUND_BYTES // size
    with HostSegment.create(size, 2 * count) as segment:
        segment.map()
        random = np.random.default_rng(0)
        for block in range(count):
            segment.block(block)[:size] = random.bytes(size)
        region = Region(segment.address, segment.size)
        store = open_remote_store(url, regions=[region], timeout_s=20, concurrency=CONCURRENCY)
        bench = Bench(store, calls(store), segment, size)
        results = [bench.round(ours_first=i % 2 == 0) for i in range(rounds + 1)][1:]
        store.close()
        del bench
    rows = {}
    for direction in ("write", "read"):
        ours = [result[f"{direction} ours"] for result in results]
        own = [result[f"{direction} own"] for result in results]
        ratios = [a / b for a, b in zip(ours, own, strict=True)]
        figures = statistics.median(ours), statistics.median(own), statistics.median(ratios)
        rows[direction] = [f"{figure:.2f}" for figure in figures]
    return rows


if __name__ == "__main__":
    typer.run(main)
