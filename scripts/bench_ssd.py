"""The SSD tier beside fio in the same directory and run, what durability costs, and restart times.

    python scripts/bench_ssd.py [DIRECTORY] [--gb 2] [--rounds 5] [--engine auto]

Blocks of 2 MiB go through the real disk worker, eight blocks to an op and eight ops at a time, as a
server gives them; fio writes and reads as much with O_DIRECT and as many requests in flight. Rounds
take turns and their medians are compared. Without fio, pwritev/preadv from one thread stand in.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flexcache.cache.restore import restore_tier
from flexcache.cache.tier import Tier
from flexcache.ids import OpKind, TierName
from flexcache.storage.block_io import BlockIO, open_block_io
from flexcache.storage.disk_pool import DiskPool, locate_slot
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import data_file_bytes, index_file_bytes, reserve_space
from flexcache.storage.slot_index import RECORD, SlotIndex, make_records
from flexcache.transfer.messages import BlockNames, Execute, pack_ids, unpack_checksums
from flexcache.transfer.workers.commit import GroupCommit
from flexcache.transfer.workers.disk import DiskWorker

BLOCK_BYTES = 2 << 20
QUEUE_DEPTH, OP_BLOCKS, OPS_AT_ONCE = 32, 8, 8
RESTART_SIZES = (10_000, 100_000, 1_000_000)
BLOCKS_PER_PROMPT = 50
SYNCED_PEER = f"fio, fdatasync every {QUEUE_DEPTH}"
ROOT = b"root of a model!"


class Tester:
    """A disk worker over a pool of its own, driven as a server drives it."""

    def __init__(self, pool: DiskPool, io: BlockIO, segment: HostSegment, sync: str) -> None:
        self._io = io
        self._num_slots = pool.num_slots
        self._num_host_blocks = segment.num_blocks
        self._sums = np.zeros(pool.num_slots, np.uint64)
        self._next_key = 0
        index = SlotIndex(pool.index_fds, pool.pool_id)
        self._commit = GroupCommit(pool.data_fds, pool.index_fds, index, sync)
        self._worker = DiskWorker(
            io, [segment], lambda s: locate_slot(s, pool.data_fds, BLOCK_BYTES), index, self._commit
        )

    def write(self) -> float:
        """Fill every slot once; GB/s until all is done."""
        return self._run(OpKind.H2DISK)

    def read(self) -> float:
        """Read every slot once, checksums included; GB/s."""
        return self._run(OpKind.DISK2H)

    def close(self) -> None:
        self._commit.close()

    def _run(self, kind: OpKind) -> float:
        starts = deque(range(0, self._num_slots, OP_BLOCKS))
        open_ops: dict[int, np.ndarray] = {}
        started = time.perf_counter()
        while starts or open_ops:
            while starts and len(open_ops) < OPS_AT_ONCE:
                start = starts.popleft()
                slots = np.arange(start, min(start + OP_BLOCKS, self._num_slots))
                open_ops[start] = slots
                self._worker.execute(self._order(kind, start, slots))
            for done in self._worker.advance():
                slots = open_ops.pop(done.op_id)
                assert done.num_ok == len(slots), done.error
                if kind is OpKind.H2DISK:
                    self._sums[slots] = unpack_checksums(done.checksums)
            if len(open_ops) == OPS_AT_ONCE or not starts:
                select.select([self._io.fileno(), self._commit.fileno()], [], [], 0.1)
        took = time.perf_counter() - started
        return self._num_slots * BLOCK_BYTES / took / 1e9

    def _order(self, kind: OpKind, op_id: int, slots: np.ndarray) -> Execute:
        host = pack_ids(slots % self._num_host_blocks)
        if kind is OpKind.DISK2H:
            sums = self._sums[slots].tobytes()
            return Execute(op_id, kind, pack_ids(slots), host, 1, checksums=sums)
        keys = [(self._next_key + i).to_bytes(32, "big") for i in range(len(slots))]
        self._next_key += len(slots)
        names = BlockNames(ROOT, 0, b"", keys)
        return Execute(op_id, kind, host, pack_ids(slots), 1, names=names)


@contextmanager
def testers(path: Path, size: int, engine: str) -> Iterator[dict[str, Tester]]:
    """A worker per sync policy, over pools whose slots have all been written once."""
    segment = HostSegment.create(BLOCK_BYTES, OPS_AT_ONCE * OP_BLOCKS)
    segment.map()
    for block in range(segment.num_blocks):
        segment.block(block)[:] = np.random.default_rng(block).bytes(BLOCK_BYTES)
    io = open_block_io(engine, QUEUE_DEPTH)
    num_slots = size // BLOCK_BYTES
    made, pools = {}, []
    for sync in ("group", "none"):
        pool = DiskPool([str(path / sync)], BLOCK_BYTES, num_slots, direct_io=True)
        reserve_space(pool.index_fds[0], index_file_bytes(num_slots))
        reserve_space(pool.data_fds[0], data_file_bytes(num_slots, BLOCK_BYTES))
        made[sync] = Tester(pool, io, segment, sync)
        pools.append(pool)
        made[sync].write()
    try:
        yield made
    finally:
        io.close()
        for tester, pool in zip(made.values(), pools, strict=True):
            tester.close()
            pool.close()
        segment.close()


def fio(path: Path, size: int, engine: str, *options: str) -> Callable[[str], float]:
    """GB/s of fio, reading or writing a file that is there already."""

    def run(direction: str) -> float:
        command = [
            "fio", "--name=peer", f"--filename={path / 'fio'}", f"--rw={direction}", "--bs=2m",
            f"--size={size}", "--direct=1", f"--ioengine={engine}", f"--iodepth={QUEUE_DEPTH}",
            "--overwrite=1", "--output-format=json", *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0][direction]
        return float(job["io_bytes"] / job["runtime"] / 1e6)

    run("write")  # lays the file out
    return run


def raw_calls(path: Path, size: int) -> Callable[[str], float]:
    """GB/s of one thread that calls preadv or pwritev."""
    fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    buffer = mmap.mmap(-1, BLOCK_BYTES)

    def run(direction: str) -> float:
        call = os.preadv if direction == "read" else os.pwritev
        started = time.perf_counter()
        for offset in range(0, size, BLOCK_BYTES):
            call(fd, [buffer], offset)
        return size / (time.perf_counter() - started) / 1e9

    run("write")
    return run


def measure_throughput(
    console: Console, path: Path, size: int, num_rounds: int, engine: str
) -> None:
    if shutil.which("fio"):
        with testers(path, size, engine) as made:
            peers = {name: fio(path, size, name) for name in ("libaio", "io_uring")}
            synced = fio(path, size, "io_uring", f"--fdatasync={QUEUE_DEPTH}")
            _take_turns(console, made, peers, synced, num_rounds)
    else:
        console.print("fio is not installed: raw preadv/pwritev from one thread instead")
        with testers(path, size, engine) as made:
            _take_turns(console, made, {"raw calls": raw_calls(path, size)}, None, num_rounds)


def _take_turns(
    console: Console, made: dict[str, Tester], peers: dict[str, Callable[[str], float]],
    synced: Callable[[str], float] | None, num_rounds: int,
) -> None:  # fmt: skip
    measures: dict[str, Callable[[], float]] = {}
    for sync, tester in made.items():
        measures[f"write, ssd_sync = {sync}"] = tester.write
        measures[f"read, after {sync}"] = tester.read
    for name, run in peers.items():
        for direction in ("write", "read"):
            measures[f"{direction}, peer {name}"] = partial(run, direction)
    if synced is not None:
        measures[f"write, {SYNCED_PEER}"] = partial(synced, "write")
    results: dict[str, list[float]] = {name: [] for name in measures}
    for _ in track(range(num_rounds), "rounds", console=console):
        for name, measure in measures.items():
            results[name].append(measure())
    medians = {name: statistics.median(values) for name, values in results.items()}
    table = Table("2 MiB blocks", "median", "lowest", "highest", "of the better peer")
    for name, values in results.items():
        direction = name.split(",")[0]
        best = max(m for other, m in medians.items() if other.startswith(f"{direction}, peer"))
        table.add_row(
            name, f"{medians[name]:.2f} GB/s", f"{min(values):.2f}", f"{max(values):.2f}",
            f"{medians[name] / best:.2f}",
        )  # fmt: skip
    console.print(table)
    cost = medians["write, ssd_sync = group"] / medians["write, ssd_sync = none"]
    console.print(f"durable writes run at {cost:.2f} of the speed without syncs")


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
        measure_throughput(console, Path(directory), size, options.rounds, options.engine)
        measure_restart(console, Path(directory))


if __name__ == "__main__":
    main()
