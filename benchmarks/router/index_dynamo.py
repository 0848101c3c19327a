"""Measures Dynamo's indexes in an environment of Dynamo's: ``index_dynamo.py radix|selection
WORKLOAD ROUNDS``, or ``index_dynamo.py memory BLOCKS`` (RadixTree's); prints one line of JSON.

RadixTree gets JSON events with hashes that were computed beforehand. SelectionService gets the
payloads over ZMQ and hashes the tokens itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from dynamo.llm import RadixTree, SelectionService, compute_block_hash_for_seq
from index_workload import (
    BLOCK_SIZE,
    MEMORY_EVENT_BLOCKS,
    MEMORY_WORKERS,
    Measured,
    Memory,
    Stopwatch,
    Times,
    Workload,
    expect,
    load,
    resident_bytes,
    times,
)

VISIBLE_S = 300.0


def _event(payload: bytes) -> dict[str, Any]:
    event: dict[str, Any] = msgspec.msgpack.decode(payload)[1][0]
    return event


def _hash_times(workload: Workload, rounds: int) -> Times:
    longest = max(workload.prompts.values(), key=len)
    return times(lambda: compute_block_hash_for_seq(longest, BLOCK_SIZE), rounds)


def measure_radix(workload: Workload, rounds: int) -> Measured:
    tree = RadixTree()
    stored, removed = [], []
    for number, (worker, payload) in enumerate(workload.events):
        event = _event(payload)
        names = event["block_hashes"]
        hashes = compute_block_hash_for_seq(event["token_ids"], BLOCK_SIZE)
        blocks = [{"block_hash": name, "tokens_hash": tokens}
                  for name, tokens in zip(names, hashes, strict=True)]  # fmt: skip
        data = {"stored": {"parent_hash": event["parent_block_hash"], "blocks": blocks}}
        stored.append((worker, _encoded(number, data)))
        removed.append((worker, _encoded(number, {"removed": {"block_hashes": names[::-1]}})))

    def apply(events: list[tuple[int, bytes]]) -> float:
        started = time.process_time()
        for worker, event in events:
            tree.apply_event(worker, event)
        tree.find_matches([1])  # waits for the tree's thread
        return workload.num_blocks / 1e6 / (time.process_time() - started)

    rate = apply(stored)
    lookups = {}
    for title, tokens in workload.prompts.items():
        hashes = compute_block_hash_for_seq(tokens, BLOCK_SIZE)

        def decide(hashes: list[int] = hashes) -> Any:
            scores = tree.find_matches(hashes).scores
            return max(scores, key=scores.get)

        depth = max(tree.find_matches(hashes).scores.values())
        expect(depth == workload.depths[title], f"{title}: {depth}")
        lookups[title] = {
            "match": times(lambda hashes=hashes: tree.find_matches(hashes), rounds),  # type: ignore[misc]
            "decide": times(decide, rounds),
        }
    rates = {"stored, from bytes": rate, "removed": apply(removed[::-1])}
    return Measured(lookups, rates, _hash_times(workload, rounds))


def _encoded(number: int, data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def measure_memory(num_blocks: int) -> Memory:
    rng = np.random.default_rng(0)
    tree = RadixTree()
    before = resident_bytes()
    spent = 0.0
    for number in range(num_blocks // MEMORY_EVENT_BLOCKS):
        names, hashes = rng.integers(0, 2**63, (2, MEMORY_EVENT_BLOCKS)).tolist()
        blocks = [{"block_hash": name, "tokens_hash": tokens}
                  for name, tokens in zip(names, hashes, strict=True)]  # fmt: skip
        event = _encoded(number, {"stored": {"parent_hash": None, "blocks": blocks}})
        started = time.process_time()
        tree.apply_event(number % MEMORY_WORKERS, event)
        spent += time.process_time() - started
    tree.find_matches([1])  # waits for the tree's thread
    del names, hashes, blocks, event
    stored = num_blocks // MEMORY_EVENT_BLOCKS * MEMORY_EVENT_BLOCKS
    return Memory(stored, resident_bytes() - before, spent)


async def measure_selection(workload: Workload, rounds: int) -> Measured:
    service = SelectionService(indexer_threads=4)
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        context.max_sockets = 10_000
        sockets = []
        for worker in range(workload.num_workers):
            endpoint = f"ipc://{directory}/{worker}"
            socket = context.socket(zmq.PUB)
            socket.sndhwm = 0
            socket.linger = 0
            socket.bind(endpoint)
            sockets.append(socket)
            await service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "model",
                    "endpoint": f"http://127.0.0.1:{worker + 1}",
                    "block_size": BLOCK_SIZE,
                    "kv_events_endpoints": {0: endpoint},
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 10_000_000,
                }
            )
        await asyncio.sleep(2.0)  # until all have subscribed: a lost event fails the checks below
        started = time.process_time()
        numbers = [0] * workload.num_workers
        for worker, payload in workload.events:
            number = numbers[worker].to_bytes(8, "big")
            sockets[worker].send_multipart([b"", number, payload])
            numbers[worker] += 1
        await _wait_until_idle()
        rate = workload.num_blocks / 1e6 / (time.process_time() - started)
        lookups = {}
        for title, tokens in workload.prompts.items():
            request = {"model_name": "model", "token_ids": tokens}
            workers = (await service.overlap_scores(request))["workers"]
            depth = max(worker["device_blocks"] for worker in workers)
            expect(depth == workload.depths[title], f"{title}: {depth}")
            lookups[title] = {
                "match": await _times(lambda r=request: service.overlap_scores(r), rounds),
                "decide": await _times(lambda r=request: service.select(r), rounds),
            }
        for socket in sockets:
            socket.close()
    rates = {"stored, from bytes": rate}
    return Measured(lookups, rates, _hash_times(workload, rounds))


async def _wait_until_idle() -> None:
    """Wait until the process takes no more CPU time: all events are in the index."""
    for _ in range(int(VISIBLE_S / 0.25)):
        spent = time.process_time()
        await asyncio.sleep(0.25)
        if time.process_time() - spent < 0.01:
            return
    raise AssertionError("the events are still being applied")


async def _times(call: Any, rounds: int) -> Times:
    for _ in range(5):
        await call()
    stopwatch = Stopwatch()
    for _ in range(rounds):
        with stopwatch:
            await call()
    return stopwatch.times()


if __name__ == "__main__":
    subject, *arguments = sys.argv[1:]
    if subject == "memory":
        measured: Memory | Measured = measure_memory(int(arguments[0]))
    elif subject == "radix":
        measured = measure_radix(load(Path(arguments[0])), int(arguments[1]))
    else:
        measured = asyncio.run(measure_selection(load(Path(arguments[0])), int(arguments[1])))
    print(msgspec.json.encode(measured).decode())
