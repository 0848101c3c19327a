"""What another host has: how soon it is found, and how fast it is read.

    python benchmarks/bench_hosts.py [--rounds 3] [--store mooncake --store s3 --store file]
        [--store peers] [--json FILE]

Two caches share a store on loopback, and nothing else. One puts a prompt, the other asks for it
once before that and then from its end in the store on, every 5 ms; or all the time.

`peers`: two caches read each other's DRAM on loopback, by each data plane. In the same rounds two
bare TCP connections and Mooncake's Transfer Engine move as many bytes between two processes, and a
cache reads them from a Mooncake Store. A first match is one of a prompt that only the other cache
has, beside the same match once that is known.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from bench_remote import STORES
from ports import free_range
from reporting import Say, run_and_show
from stores import missing

from flexcache.bench.dram import TOKENS_PER_BLOCK, CpuEngine, Tokens
from flexcache.bench.suite import Case, Result, rates
from flexcache.storage.pieces import address_of

Read = Callable[[], tuple[float, float]]
"""Reads 128 MiB of new bytes; returns the seconds that took, and the processor time."""
NUM_BLOCKS = 64  # of 2 MiB
ASK_EVERY_S = 0.005
PATIENCE_S = 30.0
FOUND_S = 0.3
PEERS = "peers"
ALL = [*STORES, PEERS]


def cache(url: str, seed: int) -> CpuEngine:
    return CpuEngine(
        32, 64 << 10, NUM_BLOCKS, seed, num_cpu_blocks=8 * NUM_BLOCKS, remote_url=url,
        remote_lookup_timeout_s=1.0, server_timeout_s=10.0, skip_slow_loads=False,
    )  # fmt: skip


def num_found(engine: CpuEngine, prompt: Tokens) -> int:
    task, mask = engine.manager.get_match(prompt)
    engine.manager.cancel([task])
    return int(mask.sum()) // TOKENS_PER_BLOCK


def when_found(engine: CpuEngine, prompt: Tokens) -> float:
    """Ask until the whole prompt is found; return when that was."""
    give_up = time.monotonic() + PATIENCE_S
    while num_found(engine, prompt) < NUM_BLOCKS:
        if time.monotonic() > give_up:
            raise TimeoutError("the other cache's prompt was not found")
        time.sleep(ASK_EVERY_S)
    return time.monotonic()


def measure(store: str, rounds: int) -> Iterator[Result]:
    polled, asked_before = [], []
    with ExitStack() as stack:
        url = stack.enter_context(STORES[store]())
        one, two = (stack.enter_context(cache(url, seed)) for seed in (1, 2))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for engine in (one, two):
            while not engine.manager.stats()["tiers"]["REMOTE"]["available"]:
                time.sleep(ASK_EVERY_S)
        for _ in range(rounds):
            prompt = one.prompt(NUM_BLOCKS)
            found = pool.submit(when_found, two, prompt)
            one.store([prompt], one.order(), completely=True)
            stored_s = time.monotonic()
            polled.append(max(0.0, found.result() - stored_s))
            prompt = one.prompt(NUM_BLOCKS)
            num_found(two, prompt)
            one.store([prompt], one.order(), completely=True)
            stored_s = time.monotonic()
            asked_before.append(when_found(two, prompt) - stored_s)
    yield Result(f"{store}: found after it was stored, asked all the time", "s", polled,
                 limit=FOUND_S)  # fmt: skip
    yield Result(f"{store}: found after it was stored, asked once before", "s", asked_before,
                 limit=FOUND_S)  # fmt: skip


# -- peers ---------------------------------------------------------------------------------------

SENDER = """
import socket, sys, threading
size = int(sys.argv[1])
data = memoryview(bytearray(b"x" * size))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def serve(connection):
    while connection.recv(1):
        connection.sendall(data)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
ENGINE_OWNER = """
import mmap, sys
from mooncake.engine import TransferEngine
import numpy
memory = mmap.mmap(-1, int(sys.argv[1]))
memory[:] = b"x" * len(memory)
address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(address, len(memory)) == 0
print("at", engine.get_rpc_port(), address, flush=True)
sys.stdin.read()
"""
BARE, ENGINE, STORE = "two bare TCP connections", "Transfer Engine's own call", "Mooncake Store"
TARGETS = [
    ("tcp", BARE, 0.85), ("tcp", ENGINE, 1.3),
    ("rdma", ENGINE, 0.85), ("rdma", STORE, 1.0), ("rdma", BARE, None),
]  # fmt: skip
"""Data planes, and how much of others' rates each is to reach."""
MOST_CPU = 1.3  # of two bare sockets
FIRST_MATCH_S = {512: 0.0003, 4096: 0.0006}


class BareSockets:
    """Two connections to another process that sends half of the bytes on each."""

    def __init__(self, num_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(num_bytes // 2)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        self._rooms = [memoryview(bytearray(num_bytes // 2)) for _ in range(2)]

    def read(self) -> None:
        threads = [
            threading.Thread(target=self._receive, args=pair)
            for pair in zip(self._connections, self._rooms, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive(self, connection: socket.socket, room: memoryview) -> None:
        connection.sendall(b"g")
        while room:
            room = room[connection.recv_into(room) :]

    @property
    def pids(self) -> list[int]:
        return [self._process.pid, os.getpid()]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._process.kill()
        self._process.wait()


class EngineCalls:
    """Transfer Engine reads from another process, in one call for all blocks."""

    def __init__(self, num_bytes: int) -> None:
        from mooncake.engine import TransferEngine

        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE_OWNER, str(num_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._memory = mmap.mmap(-1, num_bytes)
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(address_of(self._memory), num_bytes) == 0
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline().split())[:1] != [b"at"]:
            assert line, "it has ended"
        self._there, self._source = f"127.0.0.1:{int(line[1])}", int(line[2])
        self.pids = [self._process.pid, os.getpid()]

    def read(self) -> None:
        size = len(self._memory) // NUM_BLOCKS
        places = range(0, len(self._memory), size)
        targets = [address_of(self._memory) + place for place in places]
        sources = [self._source + place for place in places]
        read = self._engine.batch_transfer_sync_read
        assert read(self._there, targets, sources, [size] * NUM_BLOCKS) == 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def peer_cache(addresses: Sequence[str], number: int, plane: str, *sizes: int) -> CpuEngine:
    """Start the cache of one of these addresses, with so many layers, bytes of a run, blocks."""
    num_layers, run_bytes, num_blocks = sizes
    return CpuEngine(
        num_layers, run_bytes, num_blocks, number, num_cpu_blocks=4 * num_blocks,
        peer_endpoint=addresses[number], peers=list(addresses), peer_transport=plane,
        skip_slow_loads=False,
    )  # fmt: skip


class Owner:
    """A cache in a process of its own, which stores prompts."""

    def __init__(self, addresses: Sequence[str], plane: str, *sizes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, line = context.Pipe()
        self._process = context.Process(target=own, args=(line, addresses, plane, *sizes))
        self._process.start()
        self.worker: int = self._line.recv()

    def store(self) -> Tokens:
        """Store a new prompt, and return it."""
        self._line.send("store")
        prompt: Tokens = self._line.recv()
        return prompt

    def close(self) -> None:
        self._line.send("end")
        self._process.join()


def own(line: Connection, addresses: Sequence[str], plane: str, *sizes: int) -> None:
    with peer_cache(addresses, 0, plane, *sizes) as cache:
        until_in_touch(cache, 0)
        line.send(cache.manager.stats()["workers"]["peer"])
        while line.recv() == "store":
            prompt = cache.prompt(sizes[-1])
            cache.store([prompt], cache.order())
            line.send(prompt)


def until_in_touch(cache: CpuEngine, num_peers: int) -> None:
    while True:
        stats = cache.manager.stats()
        if stats["peers"]["up"] >= num_peers and stats["worker_up"].get("peer"):
            return
        time.sleep(ASK_EVERY_S)


def two_hosts(stack: ExitStack, plane: str, *sizes: int) -> tuple[Owner, CpuEngine]:
    addresses = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(2)]
    owner = Owner(addresses, plane, *sizes)
    stack.callback(owner.close)
    reader = stack.enter_context(peer_cache(addresses, 1, plane, *sizes))
    until_in_touch(reader, 1)
    return owner, reader


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peer_reads(stack: ExitStack, plane: str) -> Read:
    owner, reader = two_hosts(stack, plane, 32, 64 << 10, NUM_BLOCKS)
    pids = [owner.worker, reader.manager.stats()["workers"]["peer"]]

    def read() -> tuple[float, float]:
        prompt = owner.store()
        while match_s(reader, prompt) is None:  # a late answer is a miss
            time.sleep(ASK_EVERY_S)
        took = timed(pids, lambda: reader.load([prompt], reader.order()))
        found = reader.manager.stats()["hit_blocks"]
        if set(found) != {"PEER"}:
            raise AssertionError(f"hits are {found}")
        return took

    return read


def store_reads(stack: ExitStack) -> Read:
    url = stack.enter_context(STORES["mooncake"]())
    one, two = (stack.enter_context(cache(url, seed)) for seed in (1, 2))
    pids = [two.manager.stats()["workers"]["remote"]]
    while not all(each.manager.stats()["tiers"]["REMOTE"]["available"] for each in (one, two)):
        time.sleep(ASK_EVERY_S)

    def read() -> tuple[float, float]:
        prompt = one.prompt(NUM_BLOCKS)
        one.store([prompt], one.order(), completely=True)
        when_found(two, prompt)
        return timed(pids, lambda: two.load([prompt], two.order()))

    return read


def timed(pids: Sequence[int], call: Callable[[], object]) -> tuple[float, float]:
    """Return how long a call took, and the processor time of processes meanwhile."""
    before, began_s = sum(map(cpu_s, pids)), time.perf_counter()
    call()
    return time.perf_counter() - began_s, sum(map(cpu_s, pids)) - before


def measure_reads(rounds: int) -> Iterator[Result]:
    num_bytes = NUM_BLOCKS * (2 << 20)
    with ExitStack() as stack:
        bare = stack.enter_context(closing(BareSockets(num_bytes)))
        reads: dict[str, Read] = {"tcp": peer_reads(stack, "tcp")}
        reads[BARE] = lambda: timed(bare.pids, bare.read)
        if not missing("mooncake", "mooncake_master"):
            engine = stack.enter_context(closing(EngineCalls(num_bytes)))
            reads[ENGINE] = lambda: timed(engine.pids, engine.read)
            reads[STORE] = store_reads(stack)
            reads["rdma"] = peer_reads(stack, "rdma")
        took: dict[str, list[float]] = {name: [] for name in reads}
        cpu: dict[str, list[float]] = {name: [] for name in reads}
        names = list(reads)
        for number in range(rounds + 1):  # the first is to warm up
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds, used_s = reads[name]()
                if number:
                    took[name].append(seconds)
                    cpu[name].append(used_s / (num_bytes / 1e9))
    for plane, other, reach in TARGETS:
        if plane in took and other in took:
            yield rates(
                f"peers, {plane}: a get of 128 MiB, beside {other}", num_bytes,
                (took[plane], statistics.median(took[other])), other, reach=reach,
            )  # fmt: skip
    bound = statistics.mean(cpu[BARE])
    for name, used in cpu.items():
        # Of a few ticks of the clock each: only their mean says something.
        yield Result(
            f"{name}: processor time of what moves a GB", "s", [statistics.mean(used)], bound, BARE,
            reach=MOST_CPU if name == "tcp" else None,
        )  # fmt: skip


def measure_matches(rounds: int) -> Iterator[Result]:
    for num_blocks, limit_s in FIRST_MATCH_S.items():
        with ExitStack() as stack:
            owner, reader = two_hosts(stack, "tcp", 1, 8 << 10, num_blocks)
            more_s, late = [], 0
            for _ in range(10 * rounds):
                prompt = owner.store()
                first_s = match_s(reader, prompt)
                again = [took_s for _ in range(5) if (took_s := match_s(reader, prompt))]
                if first_s is None or not again:
                    late += 1
                else:
                    more_s.append(max(0.0, first_s - statistics.median(again)))
        if not more_s:
            raise TimeoutError("all matches were answered too late: the machine is busy")
        yield Result(
            f"peers: a first match of {num_blocks} blocks takes longer by", "s", more_s,
            limit=limit_s, note=f"{late} of {10 * rounds} were answered too late" if late else "",
        )  # fmt: skip


def match_s(engine: CpuEngine, prompt: Tokens) -> float | None:
    """Match a prompt; return how long that took, None if the other cache was too late for it."""
    began_s = time.perf_counter()
    task, mask = engine.manager.get_match(prompt)
    took_s = time.perf_counter() - began_s
    engine.manager.cancel([task])
    return took_s if mask.all() else None


def main(
    rounds: Annotated[int, typer.Option()] = 3,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file, peers.")] = ALL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(_: Say) -> dict[str, list[Case]]:
        found = [Case(name, partial(measure, name, rounds)) for name in store if name != PEERS]
        if PEERS in store:
            found.append(Case("questions to a peer", partial(measure_matches, rounds)))
            found.append(Case("reads from a peer", partial(measure_reads, 3 * rounds)))
        return {"hosts": found}

    raise typer.Exit(run_and_show(sections, Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
