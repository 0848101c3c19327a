"""The cost of the SSD tier's durability, and the duration of restarts.

    python benchmarks/bench_ssd.py [DIRECTORY] [--gb 2] [--rounds 5] [--engine auto]

Beside fio in the same directory and run, as in `flexcache bench ssd`, but with both sync policies
and with enough bytes that syncs weigh.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flexcache.bench.raw_disk import QUEUE_DEPTH, Fio, raw_disks
from flexcache.bench.ssd import BLOCK_BYTES, ROOT, beside_raw, driven_workers
from flexcache.cache.restore import restore_tier
from flexcache.cache.tier import Tier
from flexcache.config.tiers import SSD_SYNCS
from flexcache.ids import TierName
from flexcache.storage.block_io import open_block_io
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.slot_index import RECORD, SlotIndex, make_records

RESTART_SIZES = (10_000, 100_000, 1_000_000)
BLOCKS_PER_PROMPT = 50
SYNCED_PEER = f"fio, fdatasync every {QUEUE_DEPTH}"


def measure_durability(console: Console, path: Path, size: int, rounds: int, engine: str) -> None:
    """Both sync policies beside fio, and fio with syncs of its own."""
    io = open_block_io(engine, QUEUE_DEPTH)
    raw = raw_disks(path, size, BLOCK_BYTES, io)
    if isinstance(raw[0], Fio):
        raw.append(Fio(path, size, BLOCK_BYTES, "io_uring", f"--fdatasync={QUEUE_DEPTH}"))
        raw[-1].name = SYNCED_PEER
    table = Table("2 MiB blocks", "median", "lowest", "highest", "bound", "of")
    try:
        with driven_workers(path, size, io, 0, SSD_SYNCS) as made:
            ways = {f"ssd_sync = {sync}": worker.run for sync, worker in made.items()}
            for result in beside_raw(ways, raw, rounds):
                table.add_row(
                    result.name, f"{result.median:.2f} GB/s", f"{min(result.samples):.2f}",
                    f"{max(result.samples):.2f}", f"{result.bound:.2f}",
                    f"{result.ratio:.2f} of {result.bound_name} ({result.note})",
                )  # fmt: skip
    finally:
        io.close()
    console.print(table)


def measure_restart(console: Console, path: Path) -> None:
    """From an index full of prompts, some of which share a beginning, to a tier with all of it."""
    table = Table("restart", "load the index", "restore the tier", "together", "CPU time")
    for size in track(RESTART_SIZES, "restarts", console=console):
        pool = DiskPool([str(path / str(size))], BLOCK_BYTES, size, direct_io=False)
        rng = np.random.default_rng(0)
        records, slots = some_prompts(size, rng), rng.permutation(size)
        in_order = np.argsort(slots)
        SlotIndex(pool.index_fds, pool.pool_id).write(slots[in_order], records[in_order])
        started, cpu_before = time.perf_counter(), time.process_time()
        loaded = pool.load()
        restoring = time.perf_counter()
        tier = Tier(TierName.SSD, size)
        report = restore_tier(tier, loaded)
        ended, cpu_after = time.perf_counter(), time.process_time()
        assert report.num_restored == size
        pool.close()
        table.add_row(
            f"{size:,} slots", f"{restoring - started:.2f} s", f"{ended - restoring:.2f} s",
            f"{ended - started:.2f} s", f"{cpu_after - cpu_before:.2f} s",
        )  # fmt: skip
    console.print(table)


def some_prompts(count: int, rng: np.random.Generator) -> np.ndarray:
    """Records of prompts of fifty blocks on average; half of them go on from an earlier block."""
    records, known = [np.empty(0, RECORD)], [(-1, b"")]
    made = 0
    while made < count:
        length = min(count - made, int(rng.integers(1, 2 * BLOCKS_PER_PROMPT)))
        last, parent = known[int(rng.integers(len(known)))] if rng.random() < 0.5 else (-1, b"")
        data = rng.bytes(32 * length)
        keys = [data[i : i + 32] for i in range(0, len(data), 32)]
        records.append(make_records(ROOT, last + 1, parent, keys, np.zeros(length, np.uint64)))
        branch = int(rng.integers(length))
        known.append((last + 1 + branch, keys[branch]))
        made += length
    together = np.concatenate(records)
    together["generation"] = np.arange(1, count + 1)
    return together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default=None)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="io_uring, threads, or auto")
    options = parser.parse_args()
    console = Console(width=110)
    size = int(options.gb * 1e9) // BLOCK_BYTES * BLOCK_BYTES
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure_durability(console, Path(directory), size, options.rounds, options.engine)
        measure_restart(console, Path(directory))


if __name__ == "__main__":
    main()
