"""Measures FlexCache's index: ``index_ours.py WORKLOAD ROUNDS`` or ``index_ours.py memory BLOCKS``;
prints one line of JSON."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from index_workload import (
    BLOCK_SIZE,
    MEMORY_EVENT_BLOCKS,
    MEMORY_WORKERS,
    Measured,
    Memory,
    expect,
    load,
    resident_bytes,
    times,
)

from flexcache.events.wire import BlockRemoved, BlockStored, EventBatch, decode_batch
from flexcache.router.events import EventApplier
from flexcache.router.fleet import EventSource, WorkerSpec
from flexcache.router.holdings import WorkerTable
from flexcache.router.index import KVIndexer, Space, chain_of


def source(worker: int) -> str:
    return f"tcp://10.0.{worker // 250}.{worker % 250}:5557"


def measure(path: Path, rounds: int) -> Measured:
    workload = load(path)
    applier, index, table = _table(workload.num_workers)
    spent = {"decoding": 0.0, "applying": 0.0}
    for worker, payload in workload.events:
        started = time.thread_time()
        batch = decode_batch(payload)
        decoded = time.thread_time()
        applier.apply(source(worker), batch)
        spent["decoding"] += decoded - started
        spent["applying"] += time.thread_time() - decoded
    millions = workload.num_blocks / 1e6
    lookups = {}
    chain = chain_of(Space(BLOCK_SIZE))
    for title, tokens in workload.prompts.items():
        keys = chain.block_keys(tokens)

        def decide(keys: list[int] = keys) -> int:
            depths = index.depths(index.match(keys))
            return int(np.argmax(table.matched(depths * BLOCK_SIZE)[0]))

        found = table.matched(index.depths(index.match(keys)))[0]
        expect(int(found.max()) == workload.depths[title], f"{title}: {found.max()}")
        lookups[title] = {
            "match": times(lambda keys=keys: index.match(keys), rounds),  # type: ignore[misc]
            "decide": times(decide, rounds),
        }
    longest = max(workload.prompts.values(), key=len)
    hashing = times(lambda: chain.block_keys(longest), rounds)
    removals = [
        (worker, _removal(decode_batch(payload))) for worker, payload in reversed(workload.events)
    ]
    started = time.thread_time()
    for worker, batch in removals:
        applier.apply(source(worker), batch)
    removing = time.thread_time() - started
    expect(index.num_blocks == 0, "blocks are left")
    rates = {
        "stored": millions / spent["applying"],
        "stored, from bytes": millions / (spent["applying"] + spent["decoding"]),
        "removed": millions / removing,
    }
    return Measured(lookups, rates, hashing)


def _removal(batch: EventBatch) -> EventBatch:
    """Return the removal of a batch's blocks: one event for each, last block first, as in vLLM."""
    names = [name for event in batch.events if isinstance(event, BlockStored)
             for name in event.block_hashes]  # fmt: skip
    return EventBatch(1.0, [BlockRemoved([name], "GPU", 0) for name in reversed(names)], 0)


def _table(num_workers: int) -> tuple[EventApplier, KVIndexer, WorkerTable]:
    index = KVIndexer(max_blocks=20_000_000)
    table = WorkerTable(index.holders)
    table.set_workers(
        [WorkerSpec(name=str(at), url="", sources=(EventSource(source(at)),))
         for at in range(num_workers)]
    )  # fmt: skip
    return EventApplier(index), index, table


def measure_memory(num_blocks: int) -> Memory:
    rng = np.random.default_rng(0)
    applier, index, _ = _table(MEMORY_WORKERS)
    before = resident_bytes()
    spent = slowest = 0.0
    for at in range(num_blocks // MEMORY_EVENT_BLOCKS):
        event = BlockStored(
            rng.integers(0, 2**63, MEMORY_EVENT_BLOCKS).tolist(), None,
            rng.integers(0, 128_000, MEMORY_EVENT_BLOCKS * BLOCK_SIZE).tolist(),
            BLOCK_SIZE, None, "GPU", None,
        )  # fmt: skip
        batch = EventBatch(1.0, [event])
        started = time.thread_time()
        applier.apply(source(at % MEMORY_WORKERS), batch)
        took = time.thread_time() - started
        spent += took
        slowest = max(slowest, took)
    del event, batch
    gc.collect()
    size = resident_bytes() - before
    return Memory(index.num_blocks, size, spent, applier.num_bytes, slowest * 1e3)


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        measured: Memory | Measured = measure_memory(int(sys.argv[2]))
    else:
        measured = measure(Path(sys.argv[1]), int(sys.argv[2]))
    print(msgspec.json.encode(measured).decode())
