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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

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


class OwnCalls(ABC):
    """Calls that a user of the store would make without FlexCache.

    Args:
        store: Open.
        segment: Memory of all blocks.
    """

    name: str

    @abstractmethod
    def __init__(self, store: Any, segment: HostSegment) -> None: ...

    @abstractmethod
    def write(self, names: list[str], blocks: list[memoryview]) -> None: ...

    @abstractmethod
    def read(self, names: list[str], blocks: list[memoryview]) -> None: ...


class MemoryCalls(OwnCalls):
    """Calls of FlexCache's own store in memory, which only copies, or of a store of the user's."""

    name = "the store's calls"

    def __init__(self, store: RemoteStore, segment: HostSegment) -> None:
        self._store = store

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        self._check(self._store.write_from(names, [[b] for b in blocks], _deadline()))

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        self._check(self._store.read_into(names, [[b] for b in blocks], _deadline()))

    def _check(self, outcomes: list[Any]) -> None:
        assert all(outcome.status is Status.OK for outcome in outcomes)


class MooncakeCalls(OwnCalls):
    """One call for all blocks, each in one buffer, from and to memory shown to the network."""

    name = "Mooncake's batch call"

    def __init__(self, store: Any, segment: HostSegment) -> None:
        self._client = store._client
        assert self._client.register_buffer(segment.address, segment.size) == 0

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_put_from(names, *self._buffers(blocks))
        assert set(results) == {0}, results

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        results = self._client.batch_get_into(names, *self._buffers(blocks))
        assert min(results) > 0, results

    def _buffers(self, blocks: list[memoryview]) -> tuple[list[int], list[int]]:
        addresses = [address_of(block) for block in blocks]
        return addresses, [len(block) for block in blocks]


class FileCalls(OwnCalls):
    """A file per block, written beside its place and renamed, by a few threads."""

    name = "plain file calls"

    def __init__(self, store: Any, segment: HostSegment) -> None:
        self._directory = Path(store._directory)

    def write(self, names: list[str], blocks: list[memoryview]) -> None:
        def one(name: str, block: memoryview) -> None:
            temporary = self._directory / f"{name}#"
            with temporary.open("xb", buffering=0) as file:
                assert file.write(block) == len(block)
            temporary.rename(self._directory / name)

        (self._directory / names[0]).parent.mkdir(parents=True, exist_ok=True)
        self._each(one, names, blocks)

    def read(self, names: list[str], blocks: list[memoryview]) -> None:
        def one(name: str, block: memoryview) -> None:
            with (self._directory / name).open("rb", buffering=0) as file:
                assert file.readinto(block) == len(block)

        self._each(one, names, blocks)

    def _each(
        self, action: Callable[[str, memoryview], None], names: list[str], blocks: list[memoryview]
    ) -> None:
        def share(first: int) -> None:
            for place in range(first, len(names), _FILE_THREADS):
                action(names[place], blocks[place])

        with ThreadPoolExecutor(_FILE_THREADS) as threads:
            list(threads.map(share, range(_FILE_THREADS)))


class ObstoreCalls(OwnCalls):
    """One request per block, as many at once as FlexCache sends."""

    name = "obstore's requests"

    def __init__(self, store: Any, segment: HostSegment) -> None:
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


def own_calls(url: str) -> Callable[[Any, HostSegment], OwnCalls]:
    """Return the class that calls the store at a URL without FlexCache."""
    calls = {"mooncake": MooncakeCalls, "file": FileCalls}
    calls |= dict.fromkeys(("s3", "gs", "az"), ObstoreCalls)
    return calls.get(check_remote_url(url).scheme, MemoryCalls)


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
        self.own = own_calls(url)(self._store, segment)
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
            select.select([self.service], [], [])
            for done in self.service.answers():
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
        is_store = not isinstance(bench.own, MemoryCalls)
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
