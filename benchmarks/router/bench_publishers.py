"""One router before a fleet of publishers of KV events, over loopback.

    python benchmarks/router/bench_publishers.py --publishers 1000 --rate 2 --json out.json

A few processes publish for all hosts: a PUB and a ROUTER socket each, with snapshots. A batch
stores blocks of a new prompt and removes as many of an old one, so that the index keeps its size.
The router's feed and index run as in a decider, on an event loop that does nothing else. *Lag* is
the time from a batch's publication until the index has it. The start is from the first connection
until the index has what every publisher holds.

*Takeover* is the start of a second router while events are published: from what publishers list,
and from the first router. Publishers may be slow to list (`--slow-ms` for each page), or, as
engines do, list nothing.

*By runs* is what SSD events cost with `kv_events_runs`, beside the same told block by block.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import router_path  # noqa: F401
import typer
import zmq
from ports import free_ports
from reporting import Say, run_and_show

from flexcache.bench.suite import Case, Result
from flexcache.cache.journal import Medium, Removed, Stored
from flexcache.events.held_blocks import HeldBlocks
from flexcache.events.wire import (
    END_OF_REPLAY,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Page,
    cursor_of,
    decode_batch,
    describe,
    encode_batch,
)
from flexcache.ids import BlockKey, RootId
from flexcache.router.feed import Feed, slices
from flexcache.router.fleet import EventSource, WorkerSpec
from flexcache.router.peers import LifePublisher
from flexcache.router.router import KVRouter
from flexcache.router.service import THREAD_SWITCH_S
from flexcache.router.takeover import IndexPages, take_over

ANY_PORT = "tcp://127.0.0.1:*"
TOKENS = 16
PAGE_BLOCKS = 1024
NUM_KEPT = 100
SPREAD = 0x9E3779B97F4A7C15  # names are hashes, and an index relies on it
WARM_UP_S = 2.0
PATIENCE_S = 120.0
SAMPLE_S = 0.005


class SimulatedHost:
    """The publisher of one host, without a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int, held: int) -> None:
        self.pub, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.pub.bind(ANY_PORT)
        self.replay.bind(ANY_PORT)
        self._rng = np.random.default_rng(number)
        self._id = number.to_bytes(8, "big")
        self._first = number << 32
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._pages = [
            self._stored(min(PAGE_BLOCKS, held - first)) for first in range(0, held, PAGE_BLOCKS)
        ]
        self._held: deque[list[int | bytes]] = deque()

    @property
    def endpoints(self) -> tuple[str, str]:
        of = zmq.LAST_ENDPOINT
        return self.pub.getsockopt_string(of), self.replay.getsockopt_string(of)

    def _stored(self, count: int) -> BlockStored:
        numbers = range(self._first, self._first + count)
        names: list[int | bytes] = [number * SPREAD & (1 << 64) - 1 for number in numbers]
        self._first += count
        tokens = self._rng.integers(0, 1 << 17, count * TOKENS).tolist()
        return BlockStored(names, None, tokens, TOKENS, None, "CPU", None)

    def publish(self, num_blocks: int) -> None:
        stored = self._stored(num_blocks)
        self._held.append(stored.block_hashes)
        events: list[BlockStored | BlockRemoved] = [stored]
        if len(self._held) > 16:
            events.append(BlockRemoved(self._held.popleft(), "CPU"))
        payload = encode_batch(time.time(), events)
        number = self._number.to_bytes(8, "big")
        self._kept.append((self._number, payload))
        self._number += 1
        self.pub.send_multipart([b"kv@host@model", number, payload])

    def answer(self, slow_s: float) -> None:
        peer, _, request = self.replay.recv_multipart()
        first = int.from_bytes(request, "big")
        cursor = cursor_of(first)
        if cursor is not None:
            time.sleep(slow_s)
            events = self._pages[cursor : cursor + 1]
            following = cursor + 1 if cursor + 1 < len(self._pages) else None
            page = Page(self._id, self._number, following, encode_batch(time.time(), events))
            packed = msgspec.msgpack.encode(page)
            self.replay.send_multipart([peer, b"", b"kv@host@model", request, packed])
            return
        for number, payload in self._kept:
            if number >= first:
                frames = [b"kv@host@model", number.to_bytes(8, "big"), payload]
                self.replay.send_multipart([peer, b"", *frames])
        self.replay.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])


def publish(
    pipe: Connection, numbers: range, rate: float, num_blocks: int, held: int, slow_s: float
) -> None:
    """Publish for some hosts, at even intervals, from the first message of the pipe to the next."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65_535)
    hosts = [SimulatedHost(context, number, held) for number in numbers]
    pipe.send([host.endpoints for host in hosts])
    poller = zmq.Poller()
    of = {host.replay: host for host in hosts}
    for socket in of:
        poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    due, interval_s, turn = float("inf"), 1.0 / (rate * len(hosts)), 0
    while True:
        # Rarely while events are published: a look at all sockets takes a millisecond.
        is_publishing = due < float("inf")
        for socket, _ in poller.poll(0 if is_publishing else 50):
            if socket in of:
                of[socket].answer(slow_s)
            elif pipe.recv():
                due = time.monotonic()
            else:
                return
        looked_s = time.monotonic()
        while is_publishing and time.monotonic() < looked_s + 0.2:
            time.sleep(max(0.0, due - time.monotonic()))
            hosts[turn % len(hosts)].publish(num_blocks)
            turn, due = turn + 1, due + interval_s


@contextmanager
def fleet(
    count: int, processes: int, rate: float, num_blocks: int, held: int, slow_s: float = 0.0
) -> Iterator[tuple[list[EventSource], list[Connection]]]:
    spawning = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for part in range(processes):
        ours, theirs = spawning.Pipe()
        numbers = range(part, count, processes)
        parameters = (theirs, numbers, rate, num_blocks, held, slow_s)
        child = spawning.Process(target=publish, args=parameters)
        child.start()
        pipes.append(ours)
        children.append(child)
    try:
        yield [EventSource(*pair) for pipe in pipes for pair in pipe.recv()], pipes
    finally:
        for pipe, child in zip(pipes, children, strict=True):
            pipe.send(False)
            child.join()


class Lagging:
    """The router's index, with the lag of each part of a batch."""

    def __init__(self, routing: KVRouter) -> None:
        self._routing = routing
        self.lags_ms: list[float] = []
        self.num_blocks = 0

    def apply(self, source: str, batch: EventBatch) -> None:
        self._routing.apply(source, batch)
        self.lags_ms.append((time.time() - batch.ts) * 1e3)
        for event in batch.events:
            if isinstance(event, BlockStored | BlockRemoved):
                self.num_blocks += len(event.block_hashes)

    def forget(self, source: str) -> None:
        self._routing.forget(source)


def memory() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def before(sources: list[EventSource]) -> KVRouter:
    routing = KVRouter()
    routing.set_workers(
        [
            WorkerSpec(name=f"w{number}", url=f"http://w{number}", sources=(source,))
            for number, source in enumerate(sources)
        ]
    )
    return routing


async def follow(
    sources: list[EventSource], pipes: list[Connection], held: int, seconds: float, say: Say
) -> list[Result]:
    routing = before(sources)
    sink = Lagging(routing)
    feed = Feed(sink, asyncio.get_running_loop())
    before_mib, before_threads = memory(), threading.active_count()
    before_files = len(os.listdir("/proc/self/fd"))
    say("connecting")
    started, cpu = time.monotonic(), time.process_time()
    feed.set_sources(sources)
    called_s = time.monotonic() - started
    while not all(stats.is_connected for stats in feed.stats().values()) or (
        routing.holdings.index.num_blocks < held * len(sources)
    ):
        assert time.monotonic() - started < PATIENCE_S, "the publishers were not all heard"
        await asyncio.sleep(0.05)
    start_s, start_cpu = time.monotonic() - started, time.process_time() - cpu
    for pipe in pipes:
        pipe.send(True)
    say("warming up")
    await asyncio.sleep(WARM_UP_S)
    sink.lags_ms.clear()
    sink.num_blocks = 0
    say("measuring")
    began, cpu, lateness = time.monotonic(), time.process_time(), Lateness()
    await asyncio.sleep(seconds)
    stalls_ms = lateness.stop()
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    lags, num_blocks, stats = list(sink.lags_ms), sink.num_blocks, feed.stats().values()
    extra = memory() - before_mib - routing.holdings.applier.num_bytes / 2**20
    files = len(os.listdir("/proc/self/fd")) - before_files
    threads = threading.active_count() - before_threads
    feed.close()
    assert not any(each.gaps or each.losses or each.restarts for each in stats), "events were lost"

    def ratio(part: float) -> str:
        return f"{part:.3f}"

    p50, p99 = np.percentile(lags, [50, 99])
    stall50, stall99 = np.percentile(stalls_ms, [50, 99])
    return [
        Result("lag of a batch", "ms", lags, note=f"p50 {p50:.2f}, p99 {p99:.2f}"),
        Result(
            "how late the event loop is", "ms", stalls_ms,
            note=f"p50 {stall50:.2f}, p99 {stall99:.2f}",
        ),
        Result(
            "processor time of a batch", "us", [cpu_s / len(lags) * 1e6],
            note=f"{len(lags) / wall_s:,.0f} batches/s, {num_blocks / wall_s:,.0f} blocks/s, "
            f"{ratio(cpu_s / wall_s)} of a core",
        ),
        Result(
            "memory of a publisher, without index", "KiB", [extra * 1024 / len(sources)],
            note=f"{files / len(sources):.1f} descriptors; {threads} threads in all",
        ),
        Result(
            "start", "s", [start_s],
            note=f"{held * len(sources):,} blocks, processor time {start_cpu:.1f} s; "
            f"the call took {called_s * 1e3:.0f} ms",
        ),
    ]  # fmt: skip


def measure(
    publishers: int, processes: int, rate: float, blocks: int, held: int, seconds: float, say: Say
) -> list[Result]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sys.setswitchinterval(THREAD_SWITCH_S)
    say("starting publishers")
    with fleet(publishers, processes, rate, blocks, held) as (sources, pipes):
        return asyncio.run(follow(sources, pipes, held, seconds, say))


class Lateness:
    """How late the event loop is, in ms, while it runs."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._task = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            self.ms.append((time.monotonic() - asleep - SAMPLE_S) * 1e3)

    def stop(self) -> list[float]:
        self._task.cancel()
        return self.ms


def be_neighbour(pipe: Connection, sources: list[EventSource], num_blocks: int, sync: str) -> None:
    """Follow the sources, and give the index to those that ask, until the pipe says so. For each
    message before, tell processor time and lateness since the last one, and what it knows."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sys.setswitchinterval(THREAD_SWITCH_S)

    async def follow_and_give() -> None:
        routing = before(sources)
        feed = Feed(routing, asyncio.get_running_loop())
        feed.set_sources(sources)
        publisher = LifePublisher(sync, list, IndexPages(feed, routing.holdings).page)
        publisher.start()
        while routing.holdings.index.num_blocks < num_blocks:
            await asyncio.sleep(0.05)
        pipe.send(True)
        goes_on = True
        while goes_on:
            cpu, lateness = time.process_time(), Lateness()
            while not pipe.poll():
                await asyncio.sleep(0.02)
            goes_on = pipe.recv()
            its = routing.holdings.index.num_blocks
            pipe.send((time.process_time() - cpu, lateness.stop(), its))
        await asyncio.to_thread(publisher.close)
        feed.close()

    asyncio.run(follow_and_give())


@contextmanager
def neighbour(sources: list[EventSource], num_blocks: int) -> Iterator[tuple[str, Connection]]:
    spawning = multiprocessing.get_context("spawn")
    sync = ",".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    ours, theirs = spawning.Pipe()
    child = spawning.Process(target=be_neighbour, args=(theirs, sources, num_blocks, sync))
    child.start()
    try:
        assert ours.poll(PATIENCE_S) and ours.recv()
        yield sync, ours
    finally:
        ours.send(False)
        child.join()


async def start(
    sources: list[EventSource], num_blocks: int, peers: list[str], patience_s: float
) -> tuple[float, float, float, list[float]]:
    """Return seconds until 90 % of the blocks are known or patience ends, the part that is known,
    processor time, and lateness of the loop in ms."""
    routing, lateness, cpu = before(sources), Lateness(), time.process_time()
    began = time.monotonic()
    feed = Feed(routing, asyncio.get_running_loop(), is_held=bool(peers))
    feed.set_sources(sources)
    taking = asyncio.create_task(take_over(peers, feed, routing.holdings)) if peers else None
    index = routing.holdings.index
    while index.num_blocks < 0.9 * num_blocks and time.monotonic() < began + patience_s:
        await asyncio.sleep(0.02)
    figures = time.monotonic() - began, index.num_blocks / num_blocks, time.process_time() - cpu
    if taking is not None:
        await taking
    feed.close()
    return *figures, lateness.stop()


def measure_takeover(
    publishers: int, processes: int, rate: float, held: int, slow_s: float, say: Say
) -> Iterator[Result]:
    """Start a second router in several ways."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    say("starting publishers and the first router")
    num_blocks = publishers * held
    with fleet(publishers, processes, rate, 8, held, slow_s) as (sources, pipes):
        silent = [msgspec.structs.replace(source, replay=None) for source in sources]
        with neighbour(sources, num_blocks) as (sync, pipe):
            for each in pipes:
                each.send(True)
            time.sleep(2.0 / rate)  # each has published
            ways: dict[str, tuple[list[EventSource], list[str]]] = {
                "what publishers list": (sources, []),
                "from a neighbour": (sources, [sync]),
                "from a neighbour, publishers list nothing": (silent, [sync]),
                "publishers list nothing": (silent, []),
            }
            found: dict[str, list[tuple[float, float, float, list[float]]]] = {}
            given: dict[str, list[tuple[float, list[float], int]]] = {}
            for way in ways:
                say(way)
                pipe.send(True)
                known = pipe.recv()[2]
                patience_s = 3.0 if way == "publishers list nothing" else PATIENCE_S
                peers = ways[way][1]
                asking = start(ways[way][0], known if peers else num_blocks, peers, patience_s)
                found.setdefault(way, []).append(asyncio.run(asking))
                pipe.send(True)
                given.setdefault(way, []).append(pipe.recv())
    for way, runs in found.items():
        late = np.concatenate([each[3] for each in runs])
        its = np.concatenate([each[1] for each in given[way]])
        yield Result(
            way, "s", [each[0] for each in runs],
            note=f"{runs[0][1]:.0%} known, processor time {np.mean([r[2] for r in runs]):.1f} s, "
            f"of the first router {np.mean([g[0] for g in given[way]]):.1f} s; loop late p99 "
            f"{np.percentile(late, 99):.1f} ms, of the first router {np.percentile(its, 99):.1f}",
        )  # fmt: skip


def measure_runs(num_prompts: int = 400, num_blocks: int = 250) -> Iterator[Result]:
    """Tell and forget prompts on SSD; processor time a block."""
    costs: dict[bool, dict[tuple[str, str], float]] = {}
    for by_runs in (False, True, False, True):  # the first two warm up
        held, routing = HeldBlocks(by_runs=by_runs), KVRouter()
        applier = routing.holdings.applier
        rng = np.random.default_rng(1)
        names = (number.to_bytes(16, "big") for number in itertools.count())
        prompts = [
            Stored(
                Medium.STORAGE, RootId(bytes(16)), None,
                [BlockKey(next(names)) for _ in range(num_blocks)], TOKENS,
                rng.integers(0, 1 << 17, num_blocks * TOKENS).tolist(),
            )
            for _ in range(num_prompts)
        ]  # fmt: skip
        removals = [Removed(each.medium, each.root, each.keys[::-1]) for each in prompts]
        total = num_prompts * num_blocks
        for prompt in prompts:  # what is written to SSD is in DRAM then
            events: list[Event] = [describe(replace(prompt, medium=Medium.CPU), "int")]
            applier.apply("cache", EventBatch(1.0, events))
        cost = costs[by_runs] = {}
        for kind, changes in (("stored", prompts), ("removed", removals)):
            began = time.process_time()
            told = [held.apply([change]) for change in changes]
            payloads = [
                encode_batch(1.0, [describe(each, "int") for each in part]) for part in told
            ]
            cost[f"publisher, {kind}", "us"] = (time.process_time() - began) / total * 1e6
            began = time.process_time()
            for payload in payloads:
                for part in slices(decode_batch(payload)):
                    applier.apply("cache", part)
            cost[f"router, {kind}", "us"] = (time.process_time() - began) / total * 1e6
            cost[f"wire, {kind}", "bytes"] = sum(map(len, payloads)) / total
            if kind == "stored":
                for removal in removals:
                    events = [describe(replace(removal, medium=Medium.CPU), "int")]
                    applier.apply("cache", EventBatch(1.0, events))
                while routing.sweep(10_000):
                    pass
                cost["entries of the index", "blocks"] = routing.holdings.index.num_blocks / total
    for (name, unit), figure in costs[True].items():
        yield Result(
            f"{name}, a block", unit, [figure], bound=costs[False][name, unit],
            bound_name="block by block",
        )  # fmt: skip


def main(
    publishers: Annotated[int, typer.Option(help="Hosts that publish.")] = 1000,
    processes: Annotated[int, typer.Option(help="That publish for them.")] = 2,
    rate: Annotated[float, typer.Option(help="Batches per second, of each.")] = 2.0,
    blocks: Annotated[int, typer.Option(help="Stored, and removed, by a batch.")] = 8,
    held: Annotated[int, typer.Option(help="Blocks that each has at the start.")] = 1024,
    seconds: Annotated[float, typer.Option(help="To measure.")] = 15.0,
    slow_ms: Annotated[float, typer.Option(help="Takeover: time to list a page.")] = 0.0,
    only: Annotated[str, typer.Option(help="One section: runs, publishers, takeover.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(say: Say) -> dict[str, list[Case]]:
        title = f"{publishers:,} publishers, {rate:g} batches/s each"
        run = partial(measure, publishers, processes, rate, blocks, held, seconds, say)
        start_two = partial(measure_takeover, publishers, processes, rate, held, slow_ms / 1e3, say)
        found = {
            "runs": [Case("by runs: an SSD", measure_runs)],
            "publishers": [Case(title, run)],
            "takeover": [Case(f"until 90 % of {publishers * held:,} blocks are known", start_two)],
        }
        return {only: found[only]} if only else found

    raise typer.Exit(run_and_show(sections, Path("."), json_file))


if __name__ == "__main__":
    typer.run(main)
