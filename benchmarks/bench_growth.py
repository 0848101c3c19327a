"""Memory of a server over a million requests, and per cached block.

    python benchmarks/bench_growth.py [--requests 1000000] [--clients 2] [--json FILE] [--plot FILE]

Client processes ask for short prompts, each on its own: most requests match and let go, some put a
prompt that is new (so that something is evicted for each, once DRAM is full), some load one. Every
load is compared with what was stored. The server's private memory is read all along; after the
first fifth of the requests, a straight line through it says how much it grows.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from reporting import Say, run_and_show

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.bench.suite import Case, Result

BLOCK = 16
MODEL = ModelConfig("growth", 1, 1, 8, torch.uint8)
DRAM_BLOCKS = 4096
MOST_BLOCKS = 16  # of a prompt
PUTS, GETS = 0.05, 0.03  # of all requests; the others match and let go
NAMESPACES = 50
REMEMBERED = 64  # prompts of a client that it asks for again
WARM_UP = 0.2
FLAT_BYTES = 1e6  # per 100,000 requests
BLOCK_LIMIT_BYTES = 300
SAMPLE_S = 1.0
READY_S = 120.0
FILL_BLOCKS, FILL_PROMPT = 262_144, 8192


@dataclass(frozen=True)
class Sample:
    """Private memory of the server and of the client processes together, in MB."""

    requests: int
    server_mb: float
    clients_mb: float


class Client:
    """An engine that asks at random, and knows what the cache must hold."""

    def __init__(self, endpoint: str, number: int, num_slots: int = MOST_BLOCKS * BLOCK) -> None:
        name = f"growth-{number}"
        config = CacheConfig(endpoint=endpoint, server_timeout_s=30.0)
        self.manager = KVManager(MODEL, config, engine_id=name)
        self._client = KVTPClient(endpoint, engine_id=name, server_timeout_s=30.0)
        self._kv = torch.zeros((num_slots // BLOCK, 2, BLOCK, 1, 8), dtype=torch.uint8)
        self._client.register_kv_caches({"layer.0": self._kv})
        self.manager.start()
        self.manager.wait_ready(READY_S)
        self._random = np.random.default_rng(number)
        self._known: deque[tuple[np.ndarray, int, dict[str, Any]]] = deque(maxlen=REMEMBERED)
        self._put()

    def request(self) -> None:
        """One request of an engine, of a kind by chance."""
        chance = self._random.random()
        if chance < PUTS:
            self._put()
        elif chance < PUTS + GETS:
            self._get()
        else:
            self._match()

    def close(self) -> None:
        self._client.close()
        self.manager.shutdown()

    def _put(self) -> None:
        tokens = self._random.integers(0, 100_000, self._random.integers(1, MOST_BLOCKS) * BLOCK)
        value, names = int(self._random.integers(256)), self._names(tokens)
        self._kv[:] = value
        task_id, mask = self.manager.put_async(tokens, np.arange(len(tokens)), **names)
        assert self.manager.wait([task_id], READY_S)[task_id].mask.sum() == mask.sum()
        if mask.all():
            self._known.append((tokens, value, names))

    def _get(self) -> None:
        tokens, value, names = self._known[self._random.integers(len(self._known))]
        self._kv[:] = value + 1 & 255
        task_id, mask = self.manager.get_async(tokens, np.arange(len(tokens)), **names)
        response = self.manager.wait([task_id], READY_S)[task_id]
        loaded = int(response.mask.sum())
        assert loaded == mask.sum() and response.status is not KVStatus.FAILED, response
        assert bool((self._kv[: loaded // BLOCK] == value).all()), "wrong bytes"

    def _match(self) -> None:
        tokens, _, names = self._known[self._random.integers(len(self._known))]
        if self._random.random() < 0.5:
            tokens = tokens + 1
        task_id, _ = self.manager.get_match(tokens, **names)
        self.manager.cancel([task_id])

    def _names(self, tokens: np.ndarray) -> dict[str, Any]:
        """Half of the prompts come with an engine's keys, half by their tokens."""
        namespace = f"tenant {self._random.integers(NAMESPACES)}"
        if self._random.random() < 0.5:
            return {"namespace": namespace}
        keys = [self._random.bytes(32) for _ in range(len(tokens) // BLOCK)]
        return {"namespace": namespace, "block_keys": keys}


def run_client(endpoint: str, number: int, requests: int, done: Any) -> None:
    client = Client(endpoint, number)
    for count in range(1, requests + 1):
        client.request()
        if count % 100 == 0:
            done.value = count
    done.value = requests
    client.close()


def private_mb(pid: int) -> float:
    """Memory that is a process's own: the blocks' shared segment is not in it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0  # it has just ended


def run_requests(requests: int, num_clients: int, say: Say) -> list[Sample]:
    """Samples over all requests. Fails unless the server is sound after them and leases nothing."""
    processes = multiprocessing.get_context("spawn")
    samples = []
    with tempfile.TemporaryDirectory(prefix="fc-") as directory:
        endpoint = f"ipc://{directory}/s.sock"
        config = CacheConfig(endpoint=endpoint, num_cpu_blocks=DRAM_BLOCKS, server_timeout_s=30.0)
        with KVManager(MODEL, config, engine_id="watcher") as watcher:
            counts = [processes.Value("q", 0) for _ in range(num_clients)]
            share = requests // num_clients
            clients = [
                processes.Process(target=run_client, args=(endpoint, n, share, count), daemon=True)
                for n, count in enumerate(counts)
            ]
            members = list(zip(counts, clients, strict=True))
            for client in clients:
                client.start()
            while any(client.is_alive() for client in clients):
                time.sleep(SAMPLE_S)
                total = sum(count.value for count in counts)
                say(f"{total:,} requests")
                if all(count.value and client.is_alive() for count, client in members):
                    server = private_mb(int(watcher.stats()["server_pid"]))
                    theirs = sum(private_mb(client.pid or 0) for client in clients)
                    samples.append(Sample(total, server, theirs))
            if any(client.exitcode for client in clients):
                raise RuntimeError("a client failed; its error is above")
            stats = watcher.stats()
            watcher.check()
            assert stats["tiers"]["CPU"]["leased"] == 0
            assert stats["tiers"]["CPU"]["evicted_blocks"] > DRAM_BLOCKS, "the tier was never full"
    return samples


def slope(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Growth per 100,000 requests, by least squares over what comes after the warm-up."""
    start = samples[-1].requests * WARM_UP
    late = [
        (s.requests / 1e5, v) for s, v in zip(samples, values, strict=True) if s.requests > start
    ]
    requests, grown = np.array(late).T
    return float(np.polyfit(requests, grown, 1)[0])


def block_bytes(by_keys: bool) -> float:
    """Private memory of a server per block that it holds, index and pool and checksums together."""
    with tempfile.TemporaryDirectory(prefix="fc-") as directory:
        endpoint = f"ipc://{directory}/s.sock"
        config = CacheConfig(endpoint=endpoint, num_cpu_blocks=FILL_BLOCKS, server_timeout_s=30.0)
        with KVManager(MODEL, config, engine_id="watcher") as watcher:
            client = Client(endpoint, 0, FILL_PROMPT * BLOCK)
            before = private_mb(int(watcher.stats()["server_pid"]))
            random = np.random.default_rng(0)
            slots = np.arange(FILL_PROMPT * BLOCK)
            for _ in range(FILL_BLOCKS // FILL_PROMPT):
                keys = [random.bytes(32) for _ in range(FILL_PROMPT)] if by_keys else None
                tokens = random.integers(0, 100_000, len(slots))
                task_id, _ = client.manager.put_async(tokens, slots, block_keys=keys)
                client.manager.wait([task_id], READY_S)
            stats = watcher.stats()
            assert stats["tiers"]["CPU"]["indexed"] == FILL_BLOCKS, stats["tiers"]
            grown = private_mb(stats["server_pid"]) - before
            client.close()
    return grown * 1e6 / FILL_BLOCKS


def plot(samples: Sequence[Sample], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot([s.requests for s in samples], [s.server_mb for s in samples], label="server")
    axes.plot([s.requests for s in samples], [s.clients_mb for s in samples], label="clients")
    axes.set(xlabel="requests", ylabel="private memory, MB", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=120)


def growth(requests: int, clients: int, plot_file: Path | None, say: Say) -> Iterator[Result]:
    samples = run_requests(requests, clients, say)
    if plot_file is not None:
        plot(samples, plot_file)
    for name, values in (
        ("server", [sample.server_mb * 1e6 for sample in samples]),
        ("client processes", [sample.clients_mb * 1e6 for sample in samples]),
    ):
        yield Result(
            f"growth of the {name} per 100,000 requests", "bytes", [slope(samples, values)],
            limit=FLAT_BYTES, note="a straight line through what comes after the first fifth",
        )  # fmt: skip
        yield Result(f"memory of the {name}", "bytes", values)


def per_block() -> Iterator[Result]:
    for name, by_keys in (("tokens", False), ("block_keys", True)):
        yield Result(
            f"server's memory per cached block, by {name}", "bytes", [block_bytes(by_keys)],
            limit=BLOCK_LIMIT_BYTES,
        )  # fmt: skip


def main(
    requests: Annotated[int, typer.Option(help="Of all clients together.")] = 1_000_000,
    clients: Annotated[int, typer.Option(help="Client processes.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the samples here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Needs matplotlib.")] = None,
) -> None:
    def sections(say: Say) -> dict[str, list[Case]]:
        return {
            "growth": [
                Case("memory per cached block", per_block),
                Case(f"{requests:,} requests", partial(growth, requests, clients, plot_file, say)),
            ]
        }

    raise typer.Exit(run_and_show(sections, Path(), json_file))


if __name__ == "__main__":
    typer.run(main)
