"""The cost of the SSD tier's durability.

    python benchmarks/bench_ssd.py [DIRECTORY] [--gb 2] [--rounds 5] [--engine auto]

Beside fio in the same directory and run, as in `flexcache bench ssd`, but with both sync policies
and with enough bytes that syncs weigh.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from disk_workers import driven_workers
from rich.console import Console
from rich.table import Table

from flexcache.bench.ssd import BLOCK_BYTES, Fio, beside_raw, raw_disks
from flexcache.config.cache import SSD_SYNCS
from flexcache.storage.block_io import QUEUE_DEPTH, open_block_io

BLOCKS_PER_SYNC = 96
"""About as many as a group of the disk worker has."""
SYNCED_PEER = f"fio, fdatasync every {BLOCKS_PER_SYNC}"


def measure_durability(console: Console, path: Path, size: int, rounds: int, engine: str) -> None:
    """Both sync policies beside fio, and fio with syncs of its own."""
    io = open_block_io(engine, QUEUE_DEPTH)
    raw = raw_disks(path, size, BLOCK_BYTES, io)
    if isinstance(raw[0], Fio):
        raw.append(Fio(path, size, BLOCK_BYTES, "io_uring", f"--fdatasync={BLOCKS_PER_SYNC}"))
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


if __name__ == "__main__":
    main()
