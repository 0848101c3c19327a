"""The server of LMCache 0.5.6, measured over its own protocol for comparison with FlexCache's.

    pip install --no-deps -r benchmarks/peers/requirements-lmcache.txt   # in its own environment
    python benchmarks/peers/lmcache_server.py

LMCache's multi-process server runs as it is, nothing of it is replaced: ZMQ over loopback TCP, host
memory only. Its transfers are engine-driven, over shared memory: the engine copies, the server only
plans, so that no GPU is needed. Clients are processes of their own with LMCache's own client.

The last line of stdout is one JSON object. In its rows ``per_s`` is the rate of all clients
together, and null where a round also had parts that its latency leaves out. Before any number
counts, each lookup must have found exactly what was stored, and in the end no lock may be left.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from ports import free_port

TOKENS, CHUNK = 131_072, 256  # 256 tokens per chunk is LMCache's default
CHUNKS = TOKENS // CHUNK
CLIENTS = (1, 2, 4)
# How long each kind of round is repeated.
SECONDS = {"no_op": 1.0, "miss": 2.5, "pin": 5.0, "retrieve": 5.0}
LIMIT = 80  # seconds for everything
REPLY = 20.0  # seconds any one reply may take
START = 240.0  # seconds until the server listens, on a busy machine

NOTES = (
    f"Server as released, options at their defaults (chunks of {CHUNK} tokens, one worker thread "
    "per pool) but for: engine-driven transfer over shared memory, no metrics, no usage reports, "
    "log level WARNING. Nothing stubbed. KV of 1 layer, 1 head of size 8, so no bytes to speak of; "
    "no client copies any. Each client has its own sequence and waits for each reply; an engine "
    "waits for neither release nor end of session. Token tuples are made beforehand. per_s counts "
    "whole rounds of all clients. Noisy where cores are few: clients and server share them."
)


class Client:
    """One engine with one sequence of its own in the cache, and one that is in no cache."""

    def __init__(self, url: str, index: int) -> None:
        from lmcache.v1.multiprocess.custom_types import (
            IPCCacheServerKey,
            RegisterEngineDrivenContextPayload,
        )
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._make_key = IPCCacheServerKey
        self._index = index
        self._requests = 0
        rng = random.Random(index)
        self._stored, self._absent = (
            tuple(rng.choices(range(100_000), k=TOKENS)) for _ in range(2)
        )
        self._client: Any = RequestClientFactory.create(url)
        context = RegisterEngineDrivenContextPayload(
            index, "bench", 1, 16, 1, 8, "float16", False, CHUNK
        )
        self._call("register_kv_cache_engine_driven_context", context)
        self._store()
        for round_ in (self.no_op, self.miss, self.pin, self.retrieve):
            round_()  # not measured: each path is warm afterwards
        gc.collect()
        gc.freeze()  # as engines do, or a collection now and then takes 100 ms here

    def no_op(self) -> tuple[float, float]:
        """The smallest call there is."""
        started = time.perf_counter()
        self._call("noop")
        seconds = time.perf_counter() - started
        return seconds, seconds

    def miss(self) -> tuple[float, float]:
        """Look up what is not there. Seconds of the lookup and of the whole round, as below."""
        request, started = self._begin(), time.perf_counter()
        self._lookup(request, self._absent, 0)
        looked = time.perf_counter()
        self._call("end_session", request)
        return looked - started, time.perf_counter() - started

    def pin(self) -> tuple[float, float]:
        """Look up and pin what is there, then let go of it: a request that loads nothing."""
        request, started = self._begin(), time.perf_counter()
        self._lookup(request, self._stored, CHUNKS)
        looked = time.perf_counter()
        self._call("free_lookup_locks", self._key(request, self._stored), 1)
        self._call("end_session", request)
        return looked - started, time.perf_counter() - started

    def retrieve(self) -> tuple[float, float]:
        """What a request that loads asks of the server; the copy itself is left out."""
        request, started = self._begin(), time.perf_counter()
        self._lookup(request, self._stored, CHUNKS)
        looked = time.perf_counter()
        key = self._key(request, self._stored, 0)
        response = self._call("prepare_retrieve", key, self._index)
        done = self._call("commit_retrieve", key, self._index)
        self._call("end_session", request)
        seconds = time.perf_counter() - started
        if not (done and response.success and len(response.context["slots"]) == CHUNKS):
            raise RuntimeError("LMCache did not hand out what its lookup had found")
        return looked - started, seconds

    def repeat(self, name: str, seconds: float) -> tuple[list[tuple[float, float]], float]:
        """All the times of one kind of round, repeated for ``seconds``, and how long it took."""
        round_: Callable[[], tuple[float, float]] = getattr(self, name)
        times, started = [], time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            times.append(round_())
        return times, taken

    def empty(self) -> None:
        """Drop all that is not locked from the server."""
        self._call("clear", False)

    def gone(self) -> None:
        """Fails if the stored sequence is still there: then it was locked when it was dropped."""
        request = self._begin()
        self._lookup(request, self._stored, 0)
        self._call("end_session", request)

    def close(self) -> None:
        self._client.close()

    def _store(self) -> None:
        request = self._begin()
        key = self._key(request, self._stored, 0)
        slots = self._call("prepare_store", key, self._index).context.get("slots")
        if slots is None or len(slots) != CHUNKS:
            raise RuntimeError("LMCache gave no shared memory: is /dev/shm too small?")
        if not self._call("commit_store", key, self._index, b""):
            raise RuntimeError("LMCache did not store the sequence")
        self._call("end_session", request)

    def _lookup(self, request: str, tokens: tuple[int, ...], expected: int) -> None:
        """Submit a lookup and wait for its answer; what is found is locked."""
        self._call("lookup", self._key(request, tokens), 1)
        found = self._call("wait_prefetch_status", request, REPLY)
        if found != expected:
            raise RuntimeError(f"LMCache found {found} chunks, not {expected}")

    def _begin(self) -> str:
        self._requests += 1
        return f"{self._index}-{self._requests}"

    def _key(self, request: str, tokens: tuple[int, ...], worker: int | None = None) -> Any:
        return self._make_key(
            "bench", 1, worker, tokens, 0, TOKENS, request, num_kv_readers=1
        )  # fmt: skip

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._client, name)(*args).result(timeout=REPLY)


def run_client(url: str, index: int, pipe: Connection) -> None:
    """Run a client process: execute commands until the pipe closes."""
    die_with_parent()
    try:
        client = Client(url, index)
        pipe.send((True, None))
        while True:
            name, args = pipe.recv()
            pipe.send((True, getattr(client, name)(*args)))
    except EOFError:
        pass
    except Exception:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # not held up by sockets or threads that are still open


def die_with_parent() -> None:
    """Linux ends the process that calls this when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def running_server(
    log: IO[bytes], dram_gb: float = 0.05, options: Sequence[str] = (), python: str = sys.executable
) -> Iterator[str]:
    """LMCache's server in a process of its own; gives its address. Stopped in all cases."""
    port, pool = free_port(), f"lmcache_l1_pool_bench_{os.getpid()}"
    command = [python, "-m", "lmcache.v1.multiprocess.server", *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(CHUNK)]
    command += ["--l1-size-gb", str(dram_gb), "--eviction-policy", "LRU", "--shm-name", pool]
    command += ["--supported-transfer-mode", "engine_driven"]
    command += ["--disable-observability", "--disable-metrics", "--disable-logging"]
    server = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
    )
    give_up = time.monotonic() + START
    try:
        while True:
            if time.monotonic() > give_up:
                raise RuntimeError(f"LMCache's server does not listen after {START:g} s")
            if server.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"LMCache's server ended: {log.read().decode()[-2000:]}")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"tcp://127.0.0.1:{port}"
    finally:
        signal.alarm(0)  # the limit must not interrupt this
        server.terminate()
        try:
            server.wait(8)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        Path("/dev/shm", pool).unlink(missing_ok=True)


@contextmanager
def running_clients(url: str, count: int) -> Iterator[list[Connection]]:
    """Client processes, each with its sequence stored; gives their pipes. Ended in all cases."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for index in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=run_client, args=(url, index + 1, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers(pipes)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def answers(pipes: list[Connection]) -> list[Any]:
    """One answer from each client."""
    results = []
    for pipe in pipes:
        if not pipe.poll(LIMIT):
            raise TimeoutError("a client did not answer")
        fine, result = pipe.recv()
        if not fine:
            raise RuntimeError(f"a client failed: {result}")
        results.append(result)
    return results


def tell(pipes: list[Connection], name: str, *args: Any) -> list[Any]:
    """Have each client do the same thing at the same time."""
    for pipe in pipes:
        pipe.send((name, args))
    return answers(pipes)


def row(what: str, clients: int, times: list[float], per_s: float | None) -> dict[str, Any]:
    times = sorted(times)
    median, tail = times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6
    rate = "" if per_s is None else f"{per_s:9.1f} per s"
    print(f"{clients} client(s)  {what:72}{median:10.0f} us{tail:10.0f} us{rate}", file=sys.stderr)
    return {
        "what": what,
        "clients": clients,
        "median_us": round(median, 1),
        "p99_us": round(tail, 1),
        "per_s": None if per_s is None else round(per_s, 1),
    }


def measure(pipes: list[Connection], rows: list[dict[str, Any]]) -> None:
    """Add the rows of as many clients as there are pipes."""
    clients, size = len(pipes), f"{TOKENS:,} tokens"
    for name, seconds in SECONDS.items():
        results = tell(pipes, "repeat", name, seconds)
        lookups, rounds = zip(*(pair for times, _ in results for pair in times), strict=True)
        rate = sum(len(times) / taken for times, taken in results)
        if name == "no_op":
            rows.append(row("no-op", clients, list(rounds), rate))
        elif name == "miss":
            rows.append(row(f"lookup of {size}, none cached", clients, list(lookups), None))
        elif name == "pin":
            rows.append(row(f"lookup of {size}, all cached", clients, list(lookups), None))
            what = f"request of {size}: lookup, release, end"
            rows.append(row(what, clients, list(rounds), rate))
        else:
            what = f"request of {size}: lookup, retrieve without its copy, end"
            rows.append(row(what, clients, list(rounds), rate))


def prepare(limit_s: int) -> None:
    """Have LMCache work quietly, and what follows end by `TimeoutError` after ``limit_s``."""

    def out_of_time(*_: object) -> None:
        raise TimeoutError(f"not done after {limit_s} s")

    os.environ.update(
        LMCACHE_TRACK_USAGE="false",
        DO_NOT_TRACK="1",
        LMCACHE_LOG_LEVEL="WARNING",
        PYTHONWARNINGS="ignore",
    )
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(limit_s)


def main() -> int:
    rows: list[dict[str, Any]] = []
    notes = NOTES
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare(LIMIT)
    try:
        print("starting the server and the clients", file=sys.stderr)
        with (
            tempfile.TemporaryFile() as log,
            running_server(log) as url,
            running_clients(url, max(CLIENTS)) as pipes,
        ):
            for count in CLIENTS:
                measure(pipes[:count], rows)
            tell(pipes[:1], "empty")
            tell(pipes, "gone")
    except (Exception, KeyboardInterrupt):
        print(traceback.format_exc(), file=sys.stderr)
        rows, notes = [], f"Failed: {traceback.format_exc()}"
    try:
        peer = f"lmcache {version('lmcache')}"
    except ModuleNotFoundError:
        peer = "lmcache, not installed"
    print(json.dumps({"peer": peer, "rows": rows, "notes": notes}))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
