"""What another host has: how soon it is found, and how fast it is read.

    python benchmarks/bench_hosts.py [--rounds 3] [--store mooncake --store s3 --store file]
        [--store peers] [--json FILE]

Two caches share a store on loopback, and nothing else. One puts a prompt, the other asks for it
once before that and then from its end in the store on, every 5 ms; or all the time.

`peers`: two caches read each other's DRAM on loopback, beside two bare TCP connections that move
the same bytes between two processes in the same rounds. A first match is one of a prompt that only
the other cache has, beside the same match once that is known.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from bench_remote import STORES
from ports import free_range
from reporting import Say, run_and_show

from flexcache.bench.dram import TOKENS_PER_BLOCK, CpuEngine, Tokens
from flexcache.bench.suite import Case, Result, rates

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
BARE_SHARE = 0.85  # of two bare sockets
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

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._process.kill()
        self._process.wait()


def peer_cache(
    addresses: Sequence[str], number: int, num_layers: int, run_bytes: int, num_blocks: int
) -> CpuEngine:
    """Start the cache of one of these addresses."""
    return CpuEngine(
        num_layers, run_bytes, num_blocks, number, num_cpu_blocks=9 * num_blocks,
        peer_endpoint=addresses[number], peers=list(addresses), skip_slow_loads=False,
    )  # fmt: skip


class Owner:
    """A cache in a process of its own, which stores prompts."""

    def __init__(self, addresses: Sequence[str], *sizes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, line = context.Pipe()
        self._process = context.Process(target=own, args=(line, addresses, *sizes))
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


def own(line: Connection, addresses: Sequence[str], *sizes: int) -> None:
    with peer_cache(addresses, 0, *sizes) as cache:
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


def two_hosts(stack: ExitStack, *sizes: int) -> tuple[Owner, CpuEngine]:
    addresses = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(2)]
    owner = Owner(addresses, *sizes)
    stack.callback(owner.close)
    reader = stack.enter_context(peer_cache(addresses, 1, *sizes))
    until_in_touch(reader, 1)
    return owner, reader


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_reads(rounds: int) -> Iterator[Result]:
    with ExitStack() as stack:
        owner, reader = two_hosts(stack, 32, 64 << 10, NUM_BLOCKS)
        bare = BareSockets(reader.num_bytes)
        stack.callback(bare.close)
        ours, beside, cpu = [], [], []
        workers = [owner.worker, reader.manager.stats()["workers"]["peer"]]
        for number in range(rounds + 1):  # the first is to warm up
            prompt = owner.store()
            while match_s(reader, prompt) is None:  # a late answer is a miss
                time.sleep(ASK_EVERY_S)
            before = sum(map(cpu_s, workers))
            began_s = time.perf_counter()
            reader.load([prompt], reader.order())
            read_s = time.perf_counter() - began_s
            used_s = sum(map(cpu_s, workers)) - before
            began_s = time.perf_counter()
            bare.read()
            if number:
                ours.append(read_s)
                cpu.append(used_s / (reader.num_bytes / 1e9))
                beside.append(time.perf_counter() - began_s)
        found = reader.manager.stats()["hit_blocks"]
        if set(found) != {"PEER"}:
            raise AssertionError(f"hits are {found}")
    yield rates(
        "peers: a get of 128 MiB", reader.num_bytes, (ours, statistics.median(beside)),
        "two bare TCP connections", reach=BARE_SHARE,
    )  # fmt: skip
    yield Result("peers: processor time of both workers per GB", "s", cpu)


def measure_matches(rounds: int) -> Iterator[Result]:
    for num_blocks, limit_s in FIRST_MATCH_S.items():
        with ExitStack() as stack:
            owner, reader = two_hosts(stack, 1, 8 << 10, num_blocks)
            more_s, late = [], 0
            for _ in range(10 * rounds):
                prompt = owner.store()
                first_s = match_s(reader, prompt)
                again = [took_s for _ in range(5) if (took_s := match_s(reader, prompt))]
                if first_s is None or not again:
                    late += 1
                else:
                    more_s.append(max(0.0, first_s - statistics.median(again)))
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
            found.append(Case("reads from a peer", partial(measure_reads, 3 * rounds)))
            found.append(Case("questions to a peer", partial(measure_matches, rounds)))
        return {"hosts": found}

    raise typer.Exit(run_and_show(sections, Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
