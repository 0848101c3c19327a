"""Remote stores: reads and writes by the remote worker, compared with the store's own calls.

Every round moves the same blocks from and to the same memory: once as ops of one chunk each, with
headers, checksums and answers for each block; and once with the store's own API. Ratios compare
the two within a round, which a busy machine disturbs least.
"""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from flexcache.bench.suite import Case, Result
from flexcache.config.remote_url import check_remote_url
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import address_of
from flexcache.storage.remote import check_packages, open_remote_store
from flexcache.storage.remote.base import RemoteStore, Status
from flexcache.storage.remote.objects import object_name
from flexcache.transfer.messages import BlockNames, Done, Execute, pack_ids
from flexcache.transfer.remote_worker import RemoteService, RemoteWorkerConfig

ROUND_BYTES = 128 << 20
CHUNK_BYTES = 16_000_000  # the default of `transfer_chunk_mb`
CONCURRENCY = 16
_FILE_THREADS = 4  # the fastest number for files in memory
DEADLINE_S = 60.0
REACH = 0.9
DIRECTIONS = ("write", "read")
_STORES_OWN = "the store's calls"


Move = Callable[[list[str], list[memoryview]], None]
"""Writes, or reads, objects of these names from or to these blocks of memory."""


class OwnCalls(NamedTuple):
    """Calls that a user of the store would make without FlexCache."""

    name: str
    write: Move
    read: Move


def own_calls(url: str, store: Any, segment: HostSegment) -> OwnCalls:
    """Return the calls of an open store at a URL.

    Args:
        segment: Memory of all blocks.
    """
    scheme = check_remote_url(url).scheme
    if scheme == "mooncake":
        return _mooncake_calls(store._client, segment)
    if scheme == "file":
        return _file_calls(Path(store._directory))
    return _obstore_calls(store) if scheme in ("s3", "gs", "az") else _store_calls(store)


def _store_calls(store: RemoteStore) -> OwnCalls:
    """Calls of FlexCache's own store in memory, which only copies, or of a store of the user's."""

    def move(call: Callable[..., list[Any]], names: list[str], blocks: list[memoryview]) -> None:
        outcomes = call(names, [[block] for block in blocks], _deadline())
        assert all(outcome.status is Status.OK for outcome in outcomes)

    write, read = partial(move, store.write_from), partial(move, store.read_into)
    return OwnCalls(_STORES_OWN, write, read)


def _mooncake_calls(client: Any, segment: HostSegment) -> OwnCalls:
    """One call for all blocks, each in one buffer, from and to memory shown to the network."""
    assert client.register_buffer(segment.address, segment.size) == 0

    def buffers(blocks: list[memoryview]) -> tuple[list[int], list[int]]:
        return [address_of(block) for block in blocks], [len(block) for block in blocks]

    def write(names: list[str], blocks: list[memoryview]) -> None:
        results = client.batch_put_from(names, *buffers(blocks))
        assert set(results) == {0}, results

    def read(names: list[str], blocks: list[memoryview]) -> None:
        results = client.batch_get_into(names, *buffers(blocks))
        assert min(results) > 0, results

    return OwnCalls("Mooncake's batch call", write, read)


def _file_calls(directory: Path) -> OwnCalls:
    """A file per block, written beside its place and renamed, by a few threads."""

    def write_one(name: str, block: memoryview) -> None:
        temporary = directory / f"{name}#"
        with temporary.open("xb", buffering=0) as file:
            assert file.write(block) == len(block)
        temporary.rename(directory / name)

    def read_one(name: str, block: memoryview) -> None:
        with (directory / name).open("rb", buffering=0) as file:
            assert file.readinto(block) == len(block)

    def each(
        one: Callable[[str, memoryview], None], names: list[str], blocks: list[memoryview]
    ) -> None:
        def share(first: int) -> None:
            for place in range(first, len(names), _FILE_THREADS):
                one(names[place], blocks[place])

        (directory / names[0]).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_FILE_THREADS) as threads:
            list(threads.map(share, range(_FILE_THREADS)))

    return OwnCalls("plain file calls", partial(each, write_one), partial(each, read_one))


def _obstore_calls(store: Any) -> OwnCalls:
    """One request per block, as many at once as FlexCache sends."""
    import obstore

    async def write_one(name: str, block: memoryview) -> None:
        await obstore.put_async(store._client, name, block, use_multipart=False)

    async def read_one(name: str, block: memoryview) -> None:
        block[:] = memoryview(await (await obstore.get_async(store._client, name)).bytes_async())

    async def all_of_them(one: Any, names: list[str], blocks: list[memoryview]) -> None:
        free = asyncio.Semaphore(CONCURRENCY)

        async def limited(name: str, block: memoryview) -> None:
            async with free:
                await one(name, block)

        await asyncio.gather(*map(limited, names, blocks))

    def each(one: Any, names: list[str], blocks: list[memoryview]) -> None:
        asyncio.run(all_of_them(one, names, blocks))

    return OwnCalls("obstore's requests", partial(each, write_one), partial(each, read_one))


class StoreBench:
    """Writes and reads blocks of one size at one store, with FlexCache and with its own calls."""

    def __init__(self, url: str, segment: HostSegment, block_bytes: int) -> None:
        config = RemoteWorkerConfig(
            endpoint="",
            identity="",
            segment_fds=[],
            segment_strides=[segment.stride],
            num_host_blocks=segment.num_blocks,
            shard_bytes=[block_bytes],
            url=url,
            compression="none",
            timeout_s=DEADLINE_S,
            concurrency=CONCURRENCY,
            log_level="INFO",
            log_format="text",
        )
        opened: SimpleQueue[RemoteStore | Exception] = SimpleQueue()

        def open_store(*arguments: Any, **settings: Any) -> RemoteStore:
            try:
                store = open_remote_store(*arguments, **settings)
            except Exception as error:
                opened.put(error)
                raise
            opened.put(store)
            return store

        self.service = RemoteService(config, [segment], open_store)
        store = opened.get(timeout=DEADLINE_S)
        if isinstance(store, Exception):
            self.service.close()
            raise store
        self._store = store
        self.own = own_calls(url, self._store, segment)
        self._count = segment.num_blocks // 2
        self._size = block_bytes
        self._source = [segment.block(i)[:block_bytes] for i in range(self._count)]
        self._target = [segment.block(self._count + i)[:block_bytes] for i in range(self._count)]

    def round(self, ours_first: bool) -> dict[str, float]:
        """Compare all bytes; return GB/s of "write ours", "write own", "read ours", "read own"."""
        # Of one root, like those of a model: what a store does for the first of them is not timed.
        root, seed = bytes(16), os.urandom(14)
        keys = [i.to_bytes(2, "little") + seed for i in range(self._count)]
        names = [f"own/{key.hex()}" for key in keys]
        actions: dict[str, Callable[[], None]] = {
            "write ours": lambda: self._run(OpKind.H2REMOTE, root, keys, 0),
            "write own": lambda: self.own.write(names, self._source),
            "read ours": lambda: self._run(OpKind.REMOTE2H, root, keys, self._count),
            "read own": lambda: self.own.read(names, self._target),
        }
        speed = {}
        for index in (0, 1, 2, 3) if ours_first else (1, 0, 3, 2):
            name = list(actions)[index]
            if name.startswith("read"):
                for block in self._target:
                    block[:8] = bytes(8)
            started = time.perf_counter()
            actions[name]()
            took_s = time.perf_counter() - started
            speed[name] = self._count * self._size / took_s / 1e9
            if name.startswith("read") and self._source != self._target:
                raise AssertionError("the bytes read differ from those written")
        self._store.discard([*names, *(object_name(root, key) for key in keys)], _deadline())
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
            select.select(self.service.filenos(), [], [])
            for done in self.service.advance():
                assert isinstance(done, Done)
                if done.num_ok != waiting.pop(done.op_id):
                    raise AssertionError(f"not all blocks were moved: {done.error}")


def _deadline() -> float:
    return time.monotonic() + DEADLINE_S


def measure_store(url: str, block_bytes: int, rounds: int, seed: int = 0) -> Iterator[Result]:
    """Measure writes and reads of blocks of one size, after one warm-up round."""
    check_packages(url, "none")
    count = ROUND_BYTES // block_bytes
    with HostSegment.create(block_bytes, 2 * count) as segment:
        segment.map()
        random = np.random.default_rng(seed)
        for block in range(count):
            segment.block(block)[:block_bytes] = random.bytes(block_bytes)
        bench = StoreBench(url, segment, block_bytes)
        with closing(bench.service):
            found = [bench.round(ours_first=i % 2 == 0) for i in range(rounds + 1)][1:]
    for direction in DIRECTIONS:
        ours = [speed[f"{direction} ours"] for speed in found]
        own = [speed[f"{direction} own"] for speed in found]
        ratio = statistics.median(a / b for a, b in zip(ours, own, strict=True))
        is_store = bench.own.name != _STORES_OWN
        yield Result(
            f"{direction}, {url.partition(':')[0]}, blocks of {block_bytes >> 10:,} KiB", "GB/s",
            ours, statistics.median(ours) / ratio, bench.own.name,
            reach=REACH if is_store else None,
            note="" if is_store else "no store is as fast as this: it shows the cost of checksums, "
            "threads and messages",
        )  # fmt: skip


def cases(
    thorough: bool, directory: Path, seed: int = 0, remote_url: str | None = None
) -> list[Case]:
    stores = {"memory": "memory://", "a shared directory": f"file://{directory}"}
    if remote_url is not None:
        stores[check_remote_url(remote_url).name] = remote_url
    sizes, rounds = ([2 << 20, 400 << 10], 15) if thorough else ([2 << 20], 5)
    return [
        Case(f"{name}, {size >> 10:,} KiB", partial(measure_store, url, size, rounds, seed))
        for name, url in stores.items()
        for size in sizes
    ]
