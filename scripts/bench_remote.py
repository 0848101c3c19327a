"""Remote stores: FlexCache's reads and writes beside the store's own calls, in one run.

    python scripts/bench_remote.py [--rounds 9] [--store mooncake --store s3 --store file]

Every round moves the same blocks from and to the same memory, once as the remote worker does it
(ops of one chunk each, headers, checksums, per-block answers) and once through what the store
itself offers: one batch call of Mooncake's with the same buffers, obstore's requests with as many
at once. The table has the medians over the rounds, in GB/s, and the median of the rounds' ratios,
which a busy machine disturbs least.
"""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "system"))

from stores import mooncake_master, mooncake_segment, s3_server

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.remote import open_remote_store
from flexcache.storage.remote.base import RemoteStore
from flexcache.storage.remote.object_format import HEADER_BYTES, object_name
from flexcache.transfer.messages import BlockNames, Done, Execute, pack_ids
from flexcache.transfer.workers.remote import RemoteService, RemoteWorkerConfig

BLOCK_SIZES = (2 << 20, 400 << 10)
ROUND_BYTES = 128 << 20
CHUNK_BYTES = 16_000_000  # as `transfer_chunk_mb` has it
CONCURRENCY = 16
DEADLINE_S = 60.0


class OwnCalls(ABC):
    """What a user of the store would write without FlexCache."""

    @abstractmethod
    def write(self, names: list[str], blocks: list[memoryview]) -> None: ...

    @abstractmethod
    def read(self, names: list[str], blocks: list[memoryview]) -> None: ...


class MooncakeCalls(OwnCalls):
    """One call for all blocks; each object is of two buffers, as FlexCache's are."""

    def __init__(self, store: Any) -> None:
        self._client = store._client
        self._headers = np.zeros(HEADER_BYTES * ROUND_BYTES // min(BLOCK_SIZES), np.uint8)

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_put_from_multi_buffers(names, *self._buffers(blocks))
        assert set(results) == {0}, results

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_get_into_multi_buffers(names, *self._buffers(blocks))
        assert min(results) > 0, results

    def _buffers(self, blocks: list[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
        header = self._headers.ctypes.data
        addresses = [np.frombuffer(block, np.uint8).ctypes.data for block in blocks]
        return (
            [[header + i * HEADER_BYTES, address] for i, address in enumerate(addresses)],
            [[HEADER_BYTES, len(block)] for block in blocks],
        )


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

    def __init__(
        self, url: str, calls: Callable[[RemoteStore], OwnCalls], segment: HostSegment, size: int
    ) -> None:
        config = RemoteWorkerConfig(
            endpoint="",
            identity="",
            segment_fds=[],
            segment_stride=segment.stride,
            num_host_blocks=segment.num_blocks,
            block_bytes=size,
            url=url,
            compression="none",
            timeout_s=DEADLINE_S,
            concurrency=CONCURRENCY,
            log_level="INFO",
        )
        opened: SimpleQueue[RemoteStore] = SimpleQueue()

        def open_store(*arguments: Any, **settings: Any) -> RemoteStore:
            store = open_remote_store(*arguments, **settings)
            opened.put(store)
            return store

        self.service = RemoteService(config, [segment], open_store)
        self._store = opened.get(timeout=DEADLINE_S)
        self._own = calls(self._store)
        self._count = segment.num_blocks // 2
        self._size = size
        self._source = [segment.block(i)[:size] for i in range(self._count)]
        self._target = [segment.block(self._count + i)[:size] for i in range(self._count)]

    def round(self, ours_first: bool) -> dict[str, float]:
        root = os.urandom(16)
        keys = [i.to_bytes(16, "little") for i in range(self._count)]
        names = [f"own/{root.hex()}/{i}" for i in range(self._count)]
        actions: dict[str, Callable[[], None]] = {
            "write ours": lambda: self._run(OpKind.H2REMOTE, root, keys, 0),
            "write own": lambda: self._own.write(names, self._source),
            "read ours": lambda: self._run(OpKind.REMOTE2H, root, keys, self._count),
            "read own": lambda: self._own.read(names, self._target),
        }
        order = list(actions) if ours_first else [list(actions)[i] for i in (1, 0, 3, 2)]
        speed = {name: self._time(actions[name]) for name in order}
        assert self._source == self._target
        deadline = time.monotonic() + DEADLINE_S
        self._store.discard([*names, *(object_name(root, key) for key in keys)], deadline)
        return speed

    def _run(self, kind: OpKind, root: bytes, keys: list[bytes], first_block: int) -> None:
        chunk = max(1, CHUNK_BYTES // self._size)
        waiting = {}
        for start in range(0, len(keys), chunk):
            names = BlockNames(root, start, b"", keys[start : start + chunk])
            blocks = pack_ids(first_block + start + np.arange(len(names.keys)))
            waiting[start] = len(names.keys)
            self.service.take(Execute(start, kind, blocks, blocks, 1, names=names))
        while waiting:
            select.select([self.service], [], [])
            for done in self.service.answers():
                assert isinstance(done, Done)
                assert done.num_ok == waiting.pop(done.op_id), done

    def _time(self, action: Callable[[], None]) -> float:
        start = time.perf_counter()
        action()
        return self._count * self._size / (time.perf_counter() - start) / 1e9


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
        bench = Bench(url, calls, segment, size)
        results = [bench.round(ours_first=i % 2 == 0) for i in range(rounds + 1)][1:]
        bench.service.close()
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
