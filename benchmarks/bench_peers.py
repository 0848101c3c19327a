"""FlexCache beside its peers, each in its own environment, in one run and one table.

    python benchmarks/bench_peers.py --venvs DIRECTORY [--only SECTION]... [--json FILE] [--dir DIR]

The sections: server (LMCache's server), dram and disk (LMCache's tiers, memcpy, raw reads), fio
(the SSD tier), mooncake (Mooncake Store alone), ttft (vLLM's own offloading, and LMCache's
connector), overhead. Environments missing in DIRECTORY are created from ``requirements-*.txt`` in
``benchmarks/peers``. A peer that does not install or start is in the table with the reason.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import bench_overhead
import bench_ttft
import numpy as np
import search_path  # noqa: F401
import torch
import typer
from bench_server import measure_server
from lmcache_data import BLOCK, BLOCKS, HEAD, HEADS, LAYERS, ROUND_BYTES, ROUNDS, TOKENS, Bound
from reporting import Say, run_and_show
from stores import missing, mooncake_master, mooncake_segment
from venvs import peer_python

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig
from flexcache.bench.remote import measure_store
from flexcache.bench.suite import SECTIONS as USER_SECTIONS
from flexcache.bench.suite import Case, Result, Settings, Unsupported, load_section

PEERS = Path(__file__).parent / "peers"
LOOKUP = "match from tokens, all cached"
SECONDS = 3.0
CLIENTS = (1, 2, 4)
TIERS_MODEL = ModelConfig("peers", LAYERS, HEADS, HEAD, torch.bfloat16)
READY_S = 60.0


def peer_report(venvs: Path, script: str, *arguments: str) -> dict[str, Any]:
    """The last line that a script prints when LMCache's environment runs it."""
    python = peer_python(venvs, "lmcache")
    done = subprocess.run([python, str(PEERS / script), *arguments], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if not lines:
        raise Unsupported(f"{script} ended without a word: {done.stderr[-300:]}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def beside_lmcache_server(venvs: Path) -> Iterator[Result]:
    """Latency of a lookup of 131,072 tokens, and whole cycles of all clients."""
    report = peer_report(venvs, "lmcache_server.py")
    if not report["rows"]:
        raise Unsupported(f"LMCache did not run: {report['notes'][-300:]}")
    theirs = {(row["clients"], row["what"].split(" of ")[0]): row for row in report["rows"]
              if "none cached" not in row["what"] and "retrieve" not in row["what"]}  # fmt: skip
    for found in measure_server(list(CLIENTS), lambda _: [LOOKUP], SECONDS):
        at = f"{found.num_clients} clients"
        yield Result(
            f"lookup of 131,072 tokens, {at}", "us", [s * 1e6 for s in found.latencies_s],
            bound=theirs[found.num_clients, "lookup"]["median_us"], bound_name=report["peer"],
        )  # fmt: skip
        yield Result(
            f"cycles of 131,072 tokens, {at}", "1/s", [found.cycles_per_s],
            bound=theirs[found.num_clients, "request"]["per_s"], bound_name=report["peer"],
            note=report["notes"],
        )  # fmt: skip


def gb_per_s(seconds: float) -> float:
    return ROUND_BYTES / seconds / 1e9


class Tiers:
    """FlexCache with LMCache's KV cache: the same shape, block order and bytes."""

    def __init__(self, directory: Path | None) -> None:
        ssd: dict[str, Any] = {} if directory is None else {
            "num_ssd_blocks": 2 * BLOCKS, "ssd_cache_dirs": [str(directory)]}  # fmt: skip
        config = CacheConfig(num_cpu_blocks=2 * BLOCKS, tokens_per_block=BLOCK, **ssd)
        self._manager = KVManager(TIERS_MODEL, config)
        self._manager.start()
        self._client = KVTPClient(self._manager.endpoint)
        shape = (2, 2 * BLOCKS, BLOCK, HEADS, HEAD)
        self._kv = {
            f"layer.{i}": torch.randint(-9, 9, shape).to(torch.bfloat16) for i in range(LAYERS)
        }
        self._client.register_kv_caches(self._kv, block_dim=1)
        self._manager.wait_ready(READY_S)
        order = np.random.default_rng(0).permutation(BLOCKS)
        self._source, self._target = order, BLOCKS + order

    def store(self, tokens: np.ndarray, completely: bool) -> float:
        """Seconds to store the source blocks in DRAM, or ``completely``."""
        started = time.perf_counter()
        task_id, mask = self._manager.put_async(tokens, self._slots(self._source))
        self._manager.wait([task_id], READY_S, completely=completely)
        took = time.perf_counter() - started
        assert mask.all()
        return took

    def retrieve(self, tokens: np.ndarray) -> float:
        """Seconds to bring what is cached to the target blocks."""
        for layer in self._kv.values():
            layer[:, BLOCKS:] = 0
        started = time.perf_counter()
        task_id, _ = self._manager.get_async(tokens, self._slots(self._target))
        response = self._manager.wait([task_id], READY_S)[task_id]
        took = time.perf_counter() - started
        assert response.mask.all(), response
        assert all(kv[:, self._target].equal(kv[:, self._source]) for kv in self._kv.values())
        return took

    def prefetch(self, tokens: np.ndarray) -> float:
        """Seconds to bring what only SSD has to DRAM."""
        self._manager.clear("CPU")
        started = time.perf_counter()
        task_id = self._manager.prefetch_async(tokens)
        response = self._manager.wait([task_id], READY_S, completely=True)[task_id]
        took = time.perf_counter() - started
        assert response.mask.all(), response
        return took

    def reset(self) -> None:
        self._manager.reset()

    def close(self) -> None:
        self._client.close()
        self._manager.shutdown()

    @staticmethod
    def _slots(blocks: np.ndarray) -> np.ndarray:
        slots: np.ndarray = blocks[:, None] * BLOCK + np.arange(BLOCK)
        return slots.ravel()


def prompts() -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    while True:
        yield random.integers(0, 100_000, TOKENS)


def our_dram() -> dict[str, list[float]]:
    """GB/s of store and retrieve, and of memcpy in turn with them."""
    tiers, bound, source = Tiers(None), Bound(), prompts()
    seen: dict[str, list[float]] = {"memcpy": [], "store": [], "retrieve": []}
    for number in range(-2, ROUNDS):
        tokens = next(source)
        took = bound.memcpy(), tiers.store(tokens, completely=False), tiers.retrieve(tokens)
        if number >= 0:
            for rates, seconds in zip(seen.values(), took, strict=True):
                rates.append(gb_per_s(seconds))
    tiers.close()
    return seen


def our_disk(directory: Path) -> dict[str, list[float]]:
    """GB/s from SSD to DRAM, and of raw reads of the same files in turn with it."""
    tiers, bound, source = Tiers(directory), Bound(), prompts()
    seen: dict[str, list[float]] = {"raw read": [], "disk to DRAM": []}
    for number in range(-2, ROUNDS):
        tokens = next(source)
        tiers.store(tokens, completely=True)
        tiers.retrieve(tokens)
        data = [max(directory.rglob("*"), key=lambda path: path.stat().st_size)]
        if number % 2:  # as in LMCache's rounds
            took = bound.read(data), tiers.prefetch(tokens)
        else:
            took = (tiers.prefetch(tokens), bound.read(data))[::-1]
        tiers.retrieve(tokens)
        tiers.reset()
        if number >= 0:
            for rates, seconds in zip(seen.values(), took, strict=True):
                rates.append(gb_per_s(seconds))
    tiers.close()
    return seen


def side_by_side(
    seen: dict[str, dict[str, list[float]]], ways: list[str], bound: str
) -> Iterator[Result]:
    for way in ways:
        for system, rates in seen.items():
            at = sorted(rates[bound])[len(rates[bound]) // 2]
            yield Result(f"{way}, {system}", "GB/s", rates[way], bound=at, bound_name=bound)


def beside_lmcache_dram(venvs: Path) -> Iterator[Result]:
    ours = our_dram()
    yield from side_by_side(
        {"FlexCache": ours, **lmcache_tiers(venvs)}, ["store", "retrieve"], "memcpy"
    )


def beside_lmcache_disk(venvs: Path, directory: Path) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=directory) as our_dir:
        ours = our_disk(Path(our_dir))
    with tempfile.TemporaryDirectory(dir=directory) as their_dir:
        theirs = lmcache_tiers(venvs, their_dir)
    yield from side_by_side({"FlexCache": ours, **theirs}, ["disk to DRAM"], "raw read")


def lmcache_tiers(venvs: Path, *directory: str) -> dict[str, dict[str, list[float]]]:
    """GB/s of each way of LMCache's, by its name."""
    report = peer_report(venvs, "lmcache_data.py", *directory)
    if report["error"]:
        raise Unsupported(f"{report['peer']} did not run: {report['error'].splitlines()[-1]}")
    return {report["peer"]: report["gb_per_s"]}


def beside_mooncake() -> Iterator[Result]:
    """The remote tier beside Mooncake's own batch calls with the same buffers."""
    why = missing("mooncake", "mooncake_master")
    if why is not None:
        raise Unsupported(why)
    with mooncake_master(segment_gb=1.0) as master, mooncake_segment(master.url):
        yield from measure_store(master.url.partition("?")[0], 2 << 20, rounds=7)


SECTIONS = ("server", "dram", "disk", "fio", "mooncake", "ttft", "overhead")


def cases(section: str, venvs: Path, directory: Path, scratch: Path, say: Say) -> list[Case]:
    match section:
        case "server":
            return [Case("beside LMCache's server", partial(beside_lmcache_server, venvs))]
        case "dram":
            return [Case("beside LMCache and memcpy", partial(beside_lmcache_dram, venvs))]
        case "disk":
            return [
                Case("beside LMCache and raw reads", partial(beside_lmcache_disk, venvs, directory))
            ]
        case "fio":
            return load_section("ssd", USER_SECTIONS["ssd"], Settings(directory=directory), scratch)
        case "mooncake":
            return [Case("Mooncake Store alone", beside_mooncake)]
        case "ttft":
            return bench_ttft.cases(directory, say, venvs=venvs)
        case "overhead":
            return bench_overhead.cases(directory, say)
    raise typer.BadParameter(f"{section}: must be one of {', '.join(SECTIONS)}")


def main(
    venvs: Annotated[Path, typer.Option(help="Where the peers' environments are, or will be.")],
    only: Annotated[list[str], typer.Option(help=", ".join(SECTIONS))] = list(SECTIONS),  # noqa: B006
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tiers.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    with tempfile.TemporaryDirectory(dir=directory, prefix="flexcache-bench-") as scratch:

        def sections(say: Say) -> dict[str, list[Case]]:
            return {
                name: cases(name, venvs.absolute(), directory, Path(scratch), say) for name in only
            }

        raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
