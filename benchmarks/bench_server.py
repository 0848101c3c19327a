"""The control plane through a server that engines share, beside a server that only echoes.

A client is an engine: a scheduler with a prompt of 131,072 tokens of its own in the server's DRAM
tier (beyond four clients they share four prompts, to save memory), and a rank. A cycle is what it
does for a request that needs no copy: match, which pins what was found, and release. All clients
run at the same time, each as fast as it can; together with the server they share the processors.

The echo has the prompt's bytes sent through the socket, to a server that looks for the next
message as ours does and answers with 64 bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_control import BLOCK, KEY_BYTES, MODEL, Prompt
from echo import echo

from flexcache.bench.suite import Case, Result
from flexcache.cache.prompt import Mask
from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig
from flexcache.manager import KVManager

TOKENS = 131_072
PARTLY = 100_000
BLOCKS = TOKENS // BLOCK
MOST_PROMPTS = 4
MOST_PROCESSES = 4
READY_S = 120.0
ECHO = Path(__file__).with_name("echo.py")
TIMEOUT_S = 30.0
CYCLES_PER_S = 3000.0

BYTES_SENT = {
    "match of 64 tokens, none cached": 8 * 64,
    "match with block_keys, all cached": KEY_BYTES * BLOCKS,
    "match with block_keys, none cached": KEY_BYTES * BLOCKS,
    "match from tokens, all cached": 8 * TOKENS,
    "match from tokens, first 100,000 cached": 8 * TOKENS,
    "match from tokens, none cached": 8 * TOKENS,
}
"""What is asked, and how many bytes make up the prompt."""
MAIN = ("match with block_keys, all cached", "match from tokens, all cached")

Samples = tuple[list[float], float]
"""Seconds that each call took, and calls per second."""


@dataclass(frozen=True)
class Measured:
    """One kind of request with so many clients at once, all their samples together.

    Attributes:
        cycles_per_s: Matches and releases, of all clients.
        echo_s: Round trips of an echo of the same bytes with as many clients.
    """

    name: str
    num_clients: int
    latencies_s: list[float]
    cycles_per_s: float
    echo_s: list[float]
    echoes_per_s: float


class Client:
    """One engine at the server, with its prompt stored by tokens and by keys."""

    def __init__(self, endpoint: str, number: int) -> None:
        name = f"bench-{number}"
        config = CacheConfig(endpoint=endpoint, server_timeout_s=TIMEOUT_S)
        self.manager = KVManager(MODEL, config, engine_id=name)
        self.rank = KVTPClient(endpoint, engine_id=name, server_timeout_s=TIMEOUT_S)
        self.rank.register_kv_caches(
            {"layer.0": torch.zeros((BLOCKS, 2, BLOCK, 1, 8), dtype=torch.uint8)}
        )
        self.manager.start()
        self.manager.wait_ready(READY_S)
        seed = number % MOST_PROMPTS
        self._by_tokens = Prompt.random(seed, TOKENS, has_keys=False)
        self._by_keys = Prompt.random(seed, TOKENS, has_keys=True)
        if number < MOST_PROMPTS:
            for prompt in (self._by_tokens, self._by_keys):
                self._store(prompt)

    def _store(self, prompt: Prompt) -> None:
        task_id, mask = self.manager.put_async(
            prompt.tokens, np.arange(TOKENS), block_keys=prompt.keys
        )
        response = self.manager.wait([task_id], READY_S)[task_id]
        if not (mask.all() and response.mask.all()):
            raise AssertionError(f"not all of the prompt was stored: {response.error}")

    def _request(self, name: str) -> tuple[Callable[[], tuple[int, Mask]], int]:
        """The call, and how many tokens it must find."""
        tokens, keys = self._by_tokens.tokens, self._by_keys.keys
        assert keys is not None
        match, unknown = self.manager.get_match, tokens + 1
        partly = np.concatenate((tokens[:PARTLY], unknown[PARTLY:]))
        other_keys = [bytes(4) + key[4:] for key in keys]
        return {
            "match of 64 tokens, none cached": (partial(match, unknown[:64]), 0),
            "match with block_keys, all cached": (partial(match, tokens, block_keys=keys), TOKENS),
            "match with block_keys, none cached": (
                partial(match, tokens, block_keys=other_keys), 0),
            "match from tokens, all cached": (partial(match, tokens), TOKENS),
            "match from tokens, first 100,000 cached": (partial(match, partly), PARTLY),
            "match from tokens, none cached": (partial(match, unknown), 0),
        }[name]  # fmt: skip

    def measure(self, name: str, seconds: float) -> Samples:
        """Latencies of the match, and full cycles per second."""
        call, expected = self._request(name)
        latencies, started = list[float](), time.perf_counter()
        while (begun := time.perf_counter()) < started + seconds:
            task_id, mask = call()
            latencies.append(time.perf_counter() - begun)
            self.manager.cancel([task_id])
            if np.count_nonzero(mask) != expected:
                raise AssertionError(f"{name}: {np.count_nonzero(mask)} of {expected} tokens found")
        return latencies, len(latencies) / (time.perf_counter() - started)

    def echo(self, endpoint: str, num_bytes: int, seconds: float) -> Samples:
        """The same of an echo server."""
        times = echo(endpoint, bytes(num_bytes), seconds)
        return times, len(times) / sum(times)

    def close(self) -> None:
        self.rank.close()
        self.manager.shutdown()


def _be_clients(connection: Connection, endpoint: str, numbers: Sequence[int]) -> None:
    """A process of clients, a thread each. Answers each request with results or with an error.

    It ends when its parent says so or is gone, not by Ctrl-C.
    """
    with ExitStack() as opened:
        try:
            clients = [Client(endpoint, number) for number in numbers]
            for client in clients:
                opened.callback(client.close)
            threads = opened.enter_context(ThreadPoolExecutor(len(clients)))
            connection.send(None)
            while (request := connection.recv()) is not None:
                action, arguments, num_clients = request
                measuring = [
                    threads.submit(getattr(client, action), *arguments)
                    for number, client in zip(numbers, clients, strict=True)
                    if number < num_clients
                ]
                connection.send([each.result() for each in measuring])
        except (EOFError, BrokenPipeError):
            pass  # the parent has gone
        except Exception as error:
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


class ClientProcesses:
    """Clients spread over a few processes, since each of them takes 350 MB."""

    def __init__(self, endpoint: str, num_clients: int) -> None:
        self._all: list[tuple[Connection, Any]] = []
        spawn = multiprocessing.get_context("spawn")
        num_processes = min(num_clients, MOST_PROCESSES)
        for first in range(num_processes):
            ours, theirs = spawn.Pipe()
            numbers = range(first, num_clients, num_processes)
            process = spawn.Process(
                target=_be_clients, args=(theirs, endpoint, numbers), daemon=True
            )
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited from the start on
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            theirs.close()
            self._all.append((ours, process))

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for connection, _process in self._all:
            connection.close()
        for _connection, process in self._all:
            process.join(10 if kind is None else 0)
            process.kill()
            process.join()

    def wait_ready(self) -> None:
        for connection, _ in self._all:
            self._receive(connection)

    def measure(self, action: str, arguments: tuple[Any, ...], num_clients: int) -> Samples:
        """What the first so many clients find at the same time, taken together."""
        taking_part = self._all[:num_clients]
        for connection, _ in taking_part:
            connection.send((action, arguments, num_clients))
        found = [each for connection, _ in taking_part for each in self._receive(connection)]
        return [t for times, _ in found for t in times], sum(rate for _, rate in found)

    def _receive(self, connection: Connection) -> Any:
        if not connection.poll(READY_S):
            raise TimeoutError(f"a client process has said nothing for {READY_S:g} s")
        answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def _process(*arguments: str) -> Iterator[None]:
    """Run Python with these arguments meanwhile, with a standard input that stays open."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()


def measure_server(
    counts: Sequence[int], names_for: Callable[[int], Sequence[str]], seconds: float
) -> Iterator[Measured]:
    """Start a server and clients, and have them ask for so long per kind of request.

    Args:
        counts: Numbers of clients, one after the other.
        names_for: Of a number of clients: which of `BYTES_SENT` they ask.
    """
    most = max(counts)
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="fc-"))  # short
        endpoint, echo_endpoint = f"ipc://{directory}/s", f"ipc://{directory}/e"
        num_blocks = 2 * BLOCKS * min(most, MOST_PROMPTS) + 64
        config = Path(directory, "server.json")
        settings = {"num_cpu_blocks": num_blocks, "endpoint": endpoint, "log_level": "WARNING"}
        config.write_text(json.dumps({**settings, "idle_exit_s": 15.0}))
        opened.enter_context(_process("-m", "flexcache.cli", "server", "--config", str(config)))
        opened.enter_context(_process(str(ECHO), echo_endpoint))
        clients = opened.enter_context(ClientProcesses(endpoint, most))
        clients.wait_ready()
        for count in counts:
            echoes: dict[int, Samples] = {}
            for name in names_for(count):
                num_bytes = BYTES_SENT[name]
                if num_bytes not in echoes:
                    request = (echo_endpoint, num_bytes, seconds)
                    echoes[num_bytes] = clients.measure("echo", request, count)
                asked = clients.measure("measure", (name, seconds), count)
                yield Measured(name, count, *asked, *echoes[num_bytes])
        _check_server(endpoint)


def _check_server(endpoint: str) -> None:
    config = CacheConfig(endpoint=endpoint, server_timeout_s=TIMEOUT_S)
    with KVManager(MODEL, config, engine_id="watcher") as watcher:
        with suppress(TimeoutError):  # it has no rank
            watcher.wait_ready(1.0)
        watcher.check()
        leased = watcher.stats()["tiers"]["CPU"]["leased"]
    if leased:
        raise AssertionError(f"{leased} blocks are still leased at the end")


def cases(thorough: bool) -> list[Case]:
    counts, seconds = ([1, 4, 16, 64], 3.0) if thorough else ([1, 4], 0.8)
    title = f"{', '.join(map(str, counts))} clients"
    return [Case(title, partial(round_trips, counts, seconds))]


def round_trips(counts: Sequence[int], seconds: float) -> Iterator[Result]:
    def names_for(count: int) -> Sequence[str]:
        return list(BYTES_SENT) if count == 1 else MAIN

    for found in measure_server(counts, names_for, seconds):
        bound = f"ZMQ echo of {BYTES_SENT[found.name]:,} bytes"
        note = ""
        if found.num_clients > MOST_PROCESSES:
            note = f"clients are threads of {MOST_PROCESSES} processes, and wait for one another"
        yield Result(
            found.name, "us", [t * 1e6 for t in found.latencies_s],
            float(np.median(found.echo_s)) * 1e6, bound,
            limit=_limit_us(found), note=note, parameter="clients", at=found.num_clients,
        )  # fmt: skip
        yield Result(
            f"cycles, {found.name}", "1/s", [found.cycles_per_s], found.echoes_per_s, bound,
            limit=CYCLES_PER_S if "64 tokens" not in found.name else None,
            note=note, parameter="clients", at=found.num_clients,
        )  # fmt: skip


def _limit_us(found: Measured) -> float | None:
    """Return the target for one client with a long prompt that is all cached."""
    if found.num_clients > 1 or found.name not in MAIN:
        return None
    return 200.0 if "block_keys" in found.name else 325.0
