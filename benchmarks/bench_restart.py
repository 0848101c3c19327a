"""Time of a restart on a full SSD tier: from `start()` to the first hit.

    python benchmarks/bench_restart.py [--slots 10000,100000,1000000] [--dir DIR] [--json FILE]

An engine stores a prompt; then the rest of the index is filled with records of other prompts of
fifty blocks on average, half of which share a beginning. Each round is a process of its own, whose
rank registers while `start()` runs, and which loads the prompt and compares its bytes: the one
used last, which is found first. Blocks have 8 KiB, since records are what a restart reads; space
for them is reserved: 8 GiB for a million.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from reporting import Say, run_and_show

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.bench.suite import Case, Result
from flexcache.storage.pool_directory import INDEX_FILE
from flexcache.storage.slot_index import (
    HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    Records,
    SlotIndex,
    make_records,
)
from flexcache.transfer.cpu_copier import load_copy_runs

BLOCK, KEY_BYTES = 16, 32
HEADS = 2
STORED_BLOCKS = 64
BLOCKS_PER_PROMPT = 50
TARGET_S, TARGET_SLOTS = 1.0, 1_000_000
READY_S = 300.0
_POOL_ID = slice(16, 32)  # in a header


class Engine:
    """One rank with KV tensors in memory, and its cache, which is not started yet."""

    def __init__(self, directory: Path, num_slots: int) -> None:
        model = ModelConfig("restart", 1, HEADS, 128, torch.uint8)
        config = CacheConfig(
            num_cpu_blocks=2 * STORED_BLOCKS, num_ssd_blocks=num_slots, tokens_per_block=BLOCK,
            ssd_cache_dirs=[str(directory)],
        )  # fmt: skip
        self.kv = torch.zeros((STORED_BLOCKS, 2, BLOCK, HEADS, 128), dtype=torch.uint8)
        self.manager = KVManager(model, config)
        self._rank: KVTPClient | None = None
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, 1 << 15, STORED_BLOCKS * BLOCK)
        self.keys = [rng.bytes(KEY_BYTES) for _ in range(STORED_BLOCKS)]
        self.content = torch.from_numpy(rng.integers(0, 256, self.kv.shape, dtype=np.uint8))

    def start(self) -> float:
        """Start the cache while the rank registers; returns how long `start` took, in seconds."""
        registering = threading.Thread(target=self._register)
        started = time.monotonic()
        registering.start()
        self.manager.start()
        took = time.monotonic() - started
        registering.join()
        self.manager.wait_ready(READY_S)
        return took

    def _register(self) -> None:
        self._rank = KVTPClient(self.manager.endpoint)
        self._rank.register_kv_caches({"layer": self.kv})

    def store(self) -> None:
        self.kv.copy_(self.content)
        self._finish(*self.manager.put_async(self.tokens, self.slots, block_keys=self.keys))

    def load(self) -> None:
        self._finish(*self.manager.get_async(self.tokens, self.slots, block_keys=self.keys))
        assert torch.equal(self.kv, self.content), "the bytes differ from those stored"

    @property
    def slots(self) -> np.ndarray:
        return np.arange(STORED_BLOCKS * BLOCK)

    def _finish(self, task: int, mask: np.ndarray) -> None:
        assert mask.all(), f"{mask.sum()} of {len(mask)} tokens move"
        answer = self.manager.wait([task], READY_S, completely=True)[task]
        assert answer.status is KVStatus.SUCCESS and answer.mask.all(), answer.error

    def close(self) -> None:
        if self._rank is not None:
            self._rank.close()
        self.manager.shutdown()


def fill(directory: Path, num_slots: int) -> None:
    """Make a tier's files, with the engine's prompt in them and other prompts' records."""
    engine = Engine(directory, num_slots)
    engine.start()
    engine.store()
    engine.close()
    index = os.open(directory / INDEX_FILE, os.O_RDWR)
    pool_id = os.pread(index, HEADER_BYTES, 0)[_POOL_ID]
    data = os.pread(index, num_slots * RECORD_BYTES, HEADER_BYTES)
    free = np.flatnonzero(np.frombuffer(data, RECORD)["generation"] == 0)
    stored = np.frombuffer(data, RECORD)[np.frombuffer(data, RECORD)["generation"] > 0]
    rng = np.random.default_rng(1)
    records = some_prompts(len(free), stored["root"][0].tobytes(), rng)
    newest = int(stored["generation"].max())
    records["generation"] = newest - len(free) + np.arange(len(free)) - STORED_BLOCKS
    slots = rng.permutation(free)
    in_order = np.argsort(slots)
    SlotIndex([index], pool_id).write(slots[in_order], records[in_order])
    os.close(index)


def some_prompts(count: int, root: bytes, rng: np.random.Generator) -> Records:
    """Records of prompts of fifty blocks on average; half of them go on from an earlier block."""
    records, known = [np.empty(0, RECORD)], [(-1, b"")]
    made = 0
    while made < count:
        length = min(count - made, int(rng.integers(1, 2 * BLOCKS_PER_PROMPT)))
        last, parent = known[int(rng.integers(len(known)))] if rng.random() < 0.5 else (-1, b"")
        data = rng.bytes(KEY_BYTES * length)
        keys = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
        records.append(make_records(root, last + 1, parent, keys, np.zeros(length, np.uint64)))
        branch = int(rng.integers(length))
        known.append((last + 1 + branch, keys[branch]))
        made += length
    return np.concatenate(records)


def restart(directory: Path, num_slots: int) -> dict[str, float]:
    """Restart in this process; returns seconds, by what took them, and how much was restored."""
    engine = Engine(directory, num_slots)
    load_copy_runs()  # as an engine's rank has, by the time it registers
    began, cpu_before = time.monotonic(), time.process_time()
    start_s = engine.start()
    ready_s = time.monotonic() - began
    engine.load()
    hit_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_before
    while (ssd := engine.manager.stats()["tiers"]["SSD"]).get("restoring"):
        time.sleep(0.01)
    all_s = time.monotonic() - began
    engine.close()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "start": start_s, "ready": ready_s, "hit": hit_s, "all": all_s, "cpu": cpu_s,
        "indexed": ssd["indexed"], "peak_mb": peak_mb,
    }  # fmt: skip


def time_restarts(where: Path | None, num_slots: int, rounds: int, say: Say) -> Iterator[Result]:
    """Yield what a restart with this many slots takes."""
    found: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory(dir=where) as directory:
        say(f"filling {num_slots:,} slots")
        fill(Path(directory), num_slots)
        for number in range(rounds):
            say(f"restart {number + 1} of {rounds}")
            command = [sys.executable, __file__, "--child", directory, "--slots", str(num_slots)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            assert found[-1]["indexed"] == num_slots, found[-1]
    limit = TARGET_S if num_slots == TARGET_SLOTS else None
    note = f"peak memory {max(each['peak_mb'] for each in found):,.0f} MB"
    for key, name, text in (
        ("start", "`start()`", ""), ("ready", "until ready", ""),
        ("hit", "until the first hit", note), ("all", "until all is found", ""),
        ("cpu", "processor time of the engine's process, until the hit", ""),
    ):  # fmt: skip
        yield Result(
            name, "s", [each[key] for each in found], parameter="slots", at=num_slots, note=text,
            limit=limit if key == "hit" else None,
        )  # fmt: skip


def main(
    slots: Annotated[str, typer.Option(help="Slots to restart with.")] = "10000,100000,1000000",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the files are made and removed.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the samples here.")] = None,
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    sizes: Sequence[int] = [int(size) for size in slots.split(",")]
    if child is not None:
        print(json.dumps(restart(child, sizes[0])))
        return

    def sections(say: Say) -> dict[str, Any]:
        cases = [
            Case(f"{size:,} slots", partial(time_restarts, directory, size, rounds, say))
            for size in sizes
        ]
        return {"restart": cases}

    raise typer.Exit(run_and_show(sections, directory or Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
