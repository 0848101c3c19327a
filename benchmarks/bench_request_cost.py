"""What a request that hits nothing costs an engine that keeps its cache in its own process.

    python benchmarks/bench_request_cost.py [--requests 250]

A look-up that finds nothing, and a put of 43 blocks from launch to end, through the calls of vLLM's
connector, with a rank in the same process. Processor time, which a busy machine changes least: of
the engine's thread, and of all threads together; and how often each thread was woken.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import search_path  # noqa: F401
import typer
from cluster import Cluster, running_cluster

from flexcache.integration.vllm.calls import CacheCalls

BLOCK = 16
NUM_BLOCKS = 43
POLL_S = 0.0005
WARM_UP = 100


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
    assert isinstance(found, tuple)
    assert not found.num_tokens
    cache.cancel(found.task_id)
    matched = cache.match_put(request, 0, NUM_BLOCKS)
    assert matched is not None
    task_id, wanted = matched
    assert cache.launch(task_id, [list(wanted)])
    client.open_gates([task_id])
    while not cache.ended([task_id]):
        time.sleep(POLL_S)
    client.take_ended([task_id])


def wakes() -> dict[str, int]:
    """How often each thread of FlexCache has begun to run after a wait."""
    counts = {}
    for thread in threading.enumerate():
        if thread.name.startswith("flexcache"):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            counts[thread.name] = int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return counts


def main(requests: Annotated[int, typer.Option(help="To measure with.")] = 250) -> None:
    with running_cluster(num_cpu_blocks=2000, transfer_chunk_mb=64.0) as cluster:
        cache = CacheCalls(cluster.manager, BLOCK, ("bench",))
        made = make_requests(requests + WARM_UP)
        for request in made[:WARM_UP]:
            serve(cluster, cache, request)
        before, thread_s, process_s = wakes(), time.thread_time(), time.process_time()
        for request in made[WARM_UP:]:
            serve(cluster, cache, request)
        thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
        after = wakes()
    print(f"engine's thread {thread_s / requests * 1e6:.0f} us of processor time a request")
    print(f"all threads {process_s / requests * 1e6:.0f} us")
    for name, count in after.items():
        print(f"{name} was woken {(count - before.get(name, 0)) / requests:.1f} times a request")


if __name__ == "__main__":
    typer.run(main)
