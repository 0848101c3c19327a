"""SSD compression: the bytes that it saves, and its cost in speed and CPU time.

    python benchmarks/bench_ssd_compression.py [DIRECTORY] [--model DIRECTORY] [--gb 0.5]

The disk worker writes (durably) and reads blocks with each codec and without one, in turns. Their
content is normally distributed noise, and KV that the named models compute for the text of this
repository's documentation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from disk_workers import DrivenWorker
from rich.console import Console
from rich.table import Table

from flexcache.storage.block_io import Direction, open_block_io
from flexcache.storage.compression import Codec
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import data_file_bytes, index_file_bytes, reserve_space

BLOCK_BYTES = 2 << 20
NUM_HOST_BLOCKS = 32
TOKENS_AT_ONCE = 2048
DOCS = Path(__file__).parents[1] / "docs"


def noise(num_bytes: int) -> bytes:
    """Return bfloat16 numbers of a normal distribution."""
    numbers = np.random.default_rng(0).standard_normal(num_bytes // 2).astype("<f4")
    return (numbers.view("<u4") >> 16).astype("<u2").tobytes()


def kv_of(model_path: Path, num_bytes: int) -> bytes:
    """Return KV of text, laid out in blocks of 16 tokens: layers, K and V, tokens, heads, head."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    tokens = AutoTokenizer.from_pretrained(model_path)(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    made = bytearray()
    for start in range(0, len(tokens) - TOKENS_AT_ONCE, TOKENS_AT_ONCE):
        prompt = torch.tensor([tokens[start : start + TOKENS_AT_ONCE]])
        with torch.no_grad():
            cache: Any = model(prompt, use_cache=True).past_key_values
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        kv = torch.stack(layers).unflatten(3, (-1, 16))  # layer, K and V, head, block, token, size
        made += kv.permute(3, 0, 1, 4, 2, 5).contiguous().view(torch.uint8).numpy().tobytes()
        if len(made) >= num_bytes:
            return bytes(made[:num_bytes])
    raise SystemExit(f"{DOCS} has too little text for {num_bytes:,} bytes of KV")


@contextmanager
def workers(path: Path, content: bytes, num_slots: int) -> Iterator[dict[Codec, DrivenWorker]]:
    """Yield a worker for each codec, over the same blocks in DRAM."""
    with ExitStack() as stack:
        segment = HostSegment.create(BLOCK_BYTES, NUM_HOST_BLOCKS)
        stack.callback(segment.close)
        segment.map()
        for block in range(NUM_HOST_BLOCKS):
            segment.block(block)[:] = content[block * BLOCK_BYTES :][:BLOCK_BYTES]
        made = {}
        for codec in Codec:
            pool = DiskPool([str(path / codec.name)], BLOCK_BYTES, num_slots, direct_io=True)
            reserve_space(pool.index_fds[0], index_file_bytes(num_slots))
            reserve_space(pool.data_fds[0], data_file_bytes(num_slots, BLOCK_BYTES))
            io = open_block_io("auto", 32)
            stack.callback(io.close)
            made[codec] = DrivenWorker(pool, io, segment, "group", codec)
            stack.callback(made[codec].close)
            made[codec].run(Direction.WRITE)  # once, so that no file is new
            made[codec].check()
        yield made


def measure(console: Console, path: Path, content: bytes, size: int, rounds: int) -> None:
    num_slots = size // BLOCK_BYTES
    gigabytes = num_slots * BLOCK_BYTES / 1e9
    table = Table("codec", "way", "GB on the device per GB", "GB/s", "beside none", "CPU s per GB")
    with workers(path, content, num_slots) as made:
        for direction in (Direction.WRITE, Direction.READ):
            speeds: dict[Codec, list[float]] = {codec: [] for codec in made}
            cpu: dict[Codec, list[float]] = {codec: [] for codec in made}
            moved: dict[Codec, float] = {}
            for _ in range(rounds):
                for codec, worker in made.items():
                    worker.device_bytes, began = 0, time.process_time()
                    speeds[codec].append(worker.run(direction))
                    cpu[codec].append((time.process_time() - began) / gigabytes)
                    moved[codec] = worker.device_bytes / 1e9 / gigabytes
            plain = statistics.median(speeds[Codec.NONE])
            for codec in made:
                speed = statistics.median(speeds[codec])
                table.add_row(
                    codec.name.lower(), direction.value, f"{moved[codec]:.2f}", f"{speed:.2f}",
                    f"{speed / plain:.2f}", f"{statistics.median(cpu[codec]):.2f}",
                )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default=None)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=110)
    num_bytes = NUM_HOST_BLOCKS * BLOCK_BYTES
    contents = {"normal noise, bf16": noise(num_bytes)}
    contents |= {f"KV of {path.name}, bf16": kv_of(path, num_bytes) for path in options.model}
    for name, content in contents.items():
        console.print(name)
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            measure(console, Path(directory), content, int(options.gb * 1e9), options.rounds)


if __name__ == "__main__":
    main()
