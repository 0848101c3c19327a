"""What `store_shards` costs a rank that stores its heads in several parts: copies between the
engine's memory and the host pool, on a CPU.

    python benchmarks/bench_store_shards.py [--blocks 64] [--rounds 9] [--json FILE]

Processor time of the copying thread, for blocks in random order, the cases of a layout in turns.
One shard is what the rank stores without the setting. `addresses` is what makes the list of copies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import search_path  # noqa: F401
import torch

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import HeadShards, bytes_per_block, describe_kv_caches
from flexcache.transfer.copier import CopyPermit, Runs
from flexcache.transfer.cpu_copier import CopyRuns, load_copy_runs
from flexcache.transfer.device_worker import _PIECE_BYTES
from flexcache.transfer.messages import Execute, pack_ids
from flexcache.transfer.op_copies import OpAddresses

NUM_LAYERS, NUM_HEADS, NUM_TOKENS = 32, 8, 16
HEAD_BYTES = 512  # a head's K and V of a token, of 128 bf16 each: 2 MiB a block
LAYOUTS = {"tensors by layer, heads before tokens": "LBHNC",
           "tensors by layer, tokens before heads": "LBNHC",
           "one tensor, heads before tokens": "BLHNC",
           "one tensor, tokens before heads": "BLNHC"}  # fmt: skip
SHARDS = (1, 2, 8)
_PERMIT = CopyPermit()
Seconds = dict[str, list[float]]


@dataclass
class Case:
    """Copies of all blocks, in one layout and number of shards."""

    layout: str
    shards: int
    copies: int
    seconds: Seconds = field(default_factory=lambda: {"store": [], "load": [], "addresses": []})

    def gb_per_s(self, what: str, num_bytes: int) -> float:
        return num_bytes / median(self.seconds[what]) / 1e9


def tensors_of(order: str, num_blocks: int) -> dict[str, torch.Tensor]:
    sizes = {"L": NUM_LAYERS, "B": num_blocks, "H": NUM_HEADS, "N": NUM_TOKENS, "C": HEAD_BYTES}
    buffer = torch.zeros([sizes[dim] for dim in order], dtype=torch.uint8)
    buffer.random_(0, 256)
    views = buffer.permute([order.index(dim) for dim in "LBHNC"])
    return {f"layer {i}": layer for i, layer in enumerate(views.unbind(0))}


def copies_of(addresses: OpAddresses, order: Execute) -> list[Runs]:
    """Return an op's copies, in the pieces that a rank makes of it."""
    op, pieces = addresses.copies_of(order), []
    while not op.is_over:
        pieces.append(op.take(_PIECE_BYTES).joined())
    return pieces


def copy_all(copy: CopyRuns, pieces: list[Runs]) -> None:
    for piece in pieces:
        copy(*piece, _PERMIT)


def timed(call: Callable[[], object], seconds: list[float]) -> None:
    started = time.thread_time()
    call()
    seconds.append(time.thread_time() - started)


def measure(layout: str, num_blocks: int, rounds: int) -> list[Case]:
    tensors = tensors_of(LAYOUTS[layout], num_blocks)
    size, copy = bytes_per_block(tensors, num_blocks), load_copy_runs()
    random = np.random.default_rng(1)
    gpu, host = (pack_ids(random.permutation(num_blocks)) for _ in range(2))
    orders = {
        "store": Execute(1, OpKind.D2H, gpu, host, 1), "load": Execute(1, OpKind.H2D, host, gpu, 1)
    }  # fmt: skip
    with HostSegment.create(size, num_blocks) as segment:
        segment.map()
        made: list[tuple[Case, OpAddresses, dict[str, list[Runs]]]] = []
        for count in SHARDS:
            shards = HeadShards(count, 1, segment.stride // count)
            addresses = OpAddresses([describe_kv_caches(tensors, size, shards=shards)], segment)
            runs = {name: copies_of(addresses, order) for name, order in orders.items()}
            num_copies = sum(len(each.sizes) for each in runs["load"])
            made.append((Case(layout, count, num_copies), addresses, runs))
        for number in range(rounds + 1):
            for case, addresses, runs in made:
                for name, pieces in runs.items():
                    timed(partial(copy_all, copy, pieces), case.seconds[name])
                timed(partial(copies_of, addresses, orders["load"]), case.seconds["addresses"])
            if not number:  # of pages, caches and compilers
                for case, _, _ in made:
                    case.seconds = {name: [] for name in case.seconds}
    return [case for case, _, _ in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    num_bytes = asked.blocks * NUM_LAYERS * NUM_HEADS * NUM_TOKENS * HEAD_BYTES
    print("| layout | shards of the rank | copies a block | store, load GB/s | of one shard "
          "| addresses us/block |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    cases = [c for name in LAYOUTS for c in measure(name, asked.blocks, asked.rounds)]
    for case in cases:
        one = next(c for c in cases if c.layout == case.layout and c.shards == 1)
        speeds = [case.gb_per_s(way, num_bytes) for way in ("store", "load")]
        ratios = [case.gb_per_s(w, num_bytes) / one.gb_per_s(w, num_bytes) for w in case.seconds]
        us = median(case.seconds["addresses"]) * 1e6 / asked.blocks
        print(f"| {case.layout} | {case.shards} | {case.copies / asked.blocks:,.0f} "
              f"| {speeds[0]:.1f}, {speeds[1]:.1f} | {ratios[0]:.2f}, {ratios[1]:.2f} "
              f"| {us:.1f} |")  # fmt: skip
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(case) for case in cases]) + "\n")


if __name__ == "__main__":
    main()
