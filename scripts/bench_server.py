"""The control plane through a server, beside LMCache's server in the same run.

    python scripts/bench_server.py                              # FlexCache alone
    python scripts/bench_server.py --lmcache VENV/bin/python    # and LMCache 0.5.6
    python scripts/bench_server.py --clients 1 --clients 16 --clients 64 --json FILE

VENV is made by ``python -m venv VENV`` and
``VENV/bin/pip install --no-deps -r scripts/peers/requirements-lmcache.txt``.

Each client is a process: an engine with a sequence of 131,072 tokens of its own in the server's
DRAM tier, in 16-token blocks. A cycle is what an engine does for a request that needs no copy:
match (which pins what was found) and release. Correctness is checked along the way: every match
must find exactly what was stored, and at the end nothing may be leased.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig

TOKENS, BLOCK = 131_072, 16
BLOCKS = TOKENS // BLOCK
MODEL = ModelConfig("bench", 1, 1, 8, torch.uint8)
SECONDS = 3.0
PEER = Path(__file__).parent / "peers" / "lmcache_server.py"
TARGETS_US = {"match, block_keys, all cached": 250, "match, tokens, all cached": 500}
CASES = [
    "match, 64 tokens, none cached",
    "match, block_keys, all cached",
    "match, block_keys, none cached",
    "match, tokens, all cached",
    "match, tokens, first 100,000 cached",
    "match, tokens, none cached",
]
CYCLES_TARGET = 1000.0
READY_S = 120

Row = dict[str, Any]


def sequence(number: int, length: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 100_000, length)


def keys_of(number: int) -> list[bytes]:
    return [(number * BLOCKS + i).to_bytes(32, "big") for i in range(BLOCKS)]


class Client:
    """One engine at the server, with its sequence stored by tokens and by keys."""

    def __init__(self, endpoint: str, number: int) -> None:
        name = f"bench-{number}"
        config = CacheConfig(endpoint=endpoint, server_timeout_s=30.0)
        self.manager = KVManager(MODEL, config, engine_id=name)
        self.client = KVTPClient(endpoint, engine_id=name, server_timeout_s=30.0)
        kv = torch.zeros((BLOCKS, 2, BLOCK, 1, 8), dtype=torch.uint8)
        self.client.register_kv_caches({"layer.0": kv})
        self.manager.start()
        self.manager.wait_ready(READY_S)
        self.tokens, self.keys = sequence(number), keys_of(number)
        self.partly = self.tokens.copy()
        self.partly[100_000:] += 1
        self.unknown = self.tokens + 1
        for keys in (None, self.keys):
            task_id, mask = self.manager.put_async(self.tokens, np.arange(TOKENS), block_keys=keys)
            assert mask.all()
            assert self.manager.wait([task_id], 60)[task_id].mask.all()

    def cases(self) -> dict[str, tuple[Callable[[], tuple[int, np.ndarray]], int]]:
        """What is asked, and how many tokens must be found."""
        match = self.manager.get_match
        other = [b"x" + key[1:] for key in self.keys]
        partly = 100_000 // BLOCK * BLOCK
        return {
            "match, 64 tokens, none cached": (lambda: match(self.unknown[:64]), 0),
            "match, block_keys, all cached": (
                lambda: match(self.tokens, block_keys=self.keys), TOKENS),
            "match, block_keys, none cached": (lambda: match(self.tokens, block_keys=other), 0),
            "match, tokens, all cached": (lambda: match(self.tokens), TOKENS),
            "match, tokens, first 100,000 cached": (lambda: match(self.partly), partly),
            "match, tokens, none cached": (lambda: match(self.unknown), 0),
        }  # fmt: skip

    def measure(self, name: str) -> tuple[list[float], float]:
        """Latencies of the match, and full cycles per second."""
        call, expected = self.cases()[name]
        latencies, started = [], time.perf_counter()
        while time.perf_counter() - started < SECONDS:
            begun = time.perf_counter()
            task_id, mask = call()
            latencies.append(time.perf_counter() - begun)
            self.manager.cancel([task_id])
            if np.count_nonzero(mask) != expected:
                raise AssertionError(f"{name}: {np.count_nonzero(mask)} of {expected} tokens found")
        return latencies, len(latencies) / (time.perf_counter() - started)

    def close(self) -> None:
        self.client.close()
        self.manager.shutdown()


def run_client(
    endpoint: str, number: int, names: list[str], together: Barrier, results: Any
) -> None:
    """A client process: measures each case at the same time as the others do."""
    client = Client(endpoint, number)
    for name in names:
        together.wait(READY_S)
        results.put((name, number, *client.measure(name)))
    together.wait(READY_S)
    client.close()


def measure_ours(num_clients: int, names: list[str]) -> list[Row]:
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fc-") as directory:
        endpoint = f"ipc://{directory}/s.sock"
        config = CacheConfig(
            endpoint=endpoint, num_cpu_blocks=2 * BLOCKS * num_clients + 64, server_timeout_s=30.0
        )
        watcher = KVManager(MODEL, config, engine_id="watcher")
        watcher.start()
        together, results = processes.Barrier(num_clients), processes.Queue()
        clients = [
            processes.Process(
                target=run_client, args=(endpoint, n, names, together, results), daemon=True
            )
            for n in range(num_clients)
        ]
        for client in clients:
            client.start()
        seen: list[Any] = []
        while len(seen) < num_clients * len(names):
            try:
                seen.append(results.get(timeout=1))
            except queue.Empty:
                if any(client.exitcode for client in clients):
                    raise RuntimeError("a client failed; its error is above") from None
        for client in clients:
            client.join(60)
        stats = watcher.stats()
        watcher.check()
        assert stats["tiers"]["CPU"]["leased"] == 0
        watcher.shutdown()
    rows = []
    for name in names:
        mine = [(latencies, rate) for case, _, latencies, rate in seen if case == name]
        times = np.sort(np.concatenate([latencies for latencies, _ in mine])) * 1e6
        rows.append({
            "system": "FlexCache", "what": name, "clients": num_clients,
            "median_us": float(np.median(times)), "p99_us": float(np.quantile(times, 0.99)),
            "per_s": sum(rate for _, rate in mine),
        })  # fmt: skip
    return rows


def measure_lmcache(python: Path) -> tuple[list[Row], str]:
    run = subprocess.run([str(python), str(PEER)], stdout=subprocess.PIPE, text=True)
    report = json.loads(run.stdout.splitlines()[-1])
    return [{"system": report["peer"], **row} for row in report["rows"]], report["notes"]


def show(rows: list[Row], console: Console) -> None:
    table = Table("system", "what", "clients", "median", "p99", "per second", "median / target")
    for row in rows:
        target = TARGETS_US.get(row["what"]) if row["system"] == "FlexCache" else None
        ratio = "" if target is None or row["clients"] != 1 else f"{row['median_us'] / target:.2f}"
        per_s = "" if row["per_s"] is None else f"{row['per_s']:,.0f}"
        table.add_row(
            row["system"], row["what"], str(row["clients"]), f"{row['median_us']:,.0f} us",
            f"{row['p99_us']:,.0f} us", per_s, ratio,
        )  # fmt: skip
    console.print(table)


def compare(rows: list[Row], console: Console) -> None:
    """Cycles per second of one against the other, with as many clients."""
    for clients in sorted({row["clients"] for row in rows}):
        ours = _cycles(rows, "FlexCache", "match, tokens, all cached", clients)
        theirs = _cycles(rows, "lmcache", "request", clients)
        if ours is not None:
            against = "" if theirs is None else f", {ours / theirs:.0f}x of LMCache's {theirs:.1f}"
            console.print(
                f"{clients} clients: {ours:,.0f} cycles/s from raw tokens, "
                f"{ours / CYCLES_TARGET:.2f}x of the target{against}"
            )


def _cycles(rows: list[Row], system: str, what: str, clients: int) -> float | None:
    rates = [
        row["per_s"]
        for row in rows
        if row["system"].startswith(system) and row["what"].startswith(what)
        and row["clients"] == clients and row["per_s"]
    ]  # fmt: skip
    return max(rates, default=None)


def main(
    clients: Annotated[list[int] | None, typer.Option(help="Client processes.")] = None,
    lmcache: Annotated[Path | None, typer.Option(help="Python of a venv with LMCache.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the rows here.")] = None,
) -> None:
    """Measure, print a table, and say what did not run."""
    console, rows = Console(width=140), list[Row]()
    counts = clients or [1, 2, 4]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(counts) + (lmcache is not None))
        for count in counts:
            names = list(TARGETS_US) if count > 4 else CASES
            rows += measure_ours(count, names)
            progress.advance(task)
        notes = "LMCache was not measured: name a venv's Python by --lmcache"
        if lmcache is not None:
            theirs, notes = measure_lmcache(lmcache)
            rows += theirs
            progress.advance(task)
    show(rows, console)
    compare(rows, console)
    console.print(notes)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
