"""Cost of a request that hits nothing, for an engine that keeps its cache in its own process.

    python benchmarks/bench_request_cost.py [--requests 250] [--json FILE]

A look-up that finds nothing, and a put of 43 blocks from launch to end, through the calls of vLLM's
connector, with a rank in the same process that the engine's thread drives. Processor time, which a
busy machine changes least: of the engine's thread, and of all threads together; and how often each
thread was woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import search_path  # noqa: F401
import typer
from cluster import Cluster, running_cluster
from reporting import Say, run_and_show

from flexcache.bench.suite import Case, Result
from flexcache.integration.vllm.calls import CacheCalls, Get

BLOCK = 16
NUM_BLOCKS = 43
POLL_S = 0.0005
WARM_UP = 100
ROUND = 25
"""Requests whose mean is one sample."""


def make_requests(count: int) -> list[Any]:
    """Requests of which no two share a block."""
    source = np.random.default_rng(5)
    return [
        SimpleNamespace(
            request_id=str(number),
            num_tokens=NUM_BLOCKS * BLOCK + 12,
            all_token_ids=source.integers(0, 500, NUM_BLOCKS * BLOCK + 12).tolist(),
            block_hashes=[source.bytes(32) for _ in range(NUM_BLOCKS)],
            kv_transfer_params=None,
            sampling_params=None,
            priority=0,
        )
        for number in range(count)
    ]


def serve(cluster: Cluster, cache: CacheCalls, request: Any) -> None:
    """Look a request up, and store it."""
    [client] = cluster.clients
    found = cache.match(request, 0, request.num_tokens, look_up=True)
    assert isinstance(found, Get)
    assert not found.num_tokens
    cache.cancel(found.task_id)
    matched = cache.match_put(request, 0, NUM_BLOCKS)
    assert matched is not None
    task_id, wanted = matched
    assert cache.launch(task_id, [list(wanted)])
    client.open_gates([task_id])
    while not client.take_ended([task_id]):
        time.sleep(POLL_S)
    assert cache.ended([task_id])


def wakes() -> dict[str, int]:
    """How often each thread of FlexCache has begun to run after a wait."""
    counts = {}
    for thread in threading.enumerate():
        if thread.name.startswith("flexcache"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            counts[thread.name] = int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return counts


def measure(num_requests: int) -> Iterator[Result]:
    engine_us, all_us = list[float](), list[float]()
    with running_cluster(
        engine_polls=True, num_cpu_blocks=2000, transfer_chunk_mb=64.0
    ) as cluster:  # as vLLM's worker
        cluster.await_copy_thread()
        cache = CacheCalls(cluster.manager, BLOCK, ("bench",))
        made = make_requests(num_requests + WARM_UP)
        for request in made[:WARM_UP]:
            serve(cluster, cache, request)
        before = wakes()
        for start in range(WARM_UP, len(made), ROUND):
            batch = made[start : start + ROUND]
            thread_s, process_s = time.thread_time(), time.process_time()
            for request in batch:
                serve(cluster, cache, request)
            engine_us.append((time.thread_time() - thread_s) / len(batch) * 1e6)
            all_us.append((time.process_time() - process_s) / len(batch) * 1e6)
        after = wakes()
    yield Result("engine's thread, a request", "us", engine_us)
    yield Result("all threads, a request", "us", all_us)
    for name, count in after.items():
        woken = (count - before.get(name, 0)) / num_requests
        yield Result(f"wakes of {name}, a request", "", [woken])


def main(
    requests: Annotated[int, typer.Option(help="To measure with.")] = 250,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(_: Say) -> dict[str, list[Case]]:
        return {"request cost": [Case("nothing hit", partial(measure, requests))]}

    raise typer.Exit(run_and_show(sections, Path(), json_file))


if __name__ == "__main__":
    typer.run(main)
