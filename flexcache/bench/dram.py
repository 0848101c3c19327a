"""DRAM tier on the CPU device: store and retrieve, compared with one memcpy of the same bytes.

Times are from the call to the end of the wait: tokens are hashed, blocks are found or evicted and
leased, ops are sent and answered, and every layer's part of every block is copied from or to
scattered places. Prompts are new each round and the tier is full, so that every store evicts.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from flexcache.bench.cpu_engine import CpuEngine, copy_at_once
from flexcache.bench.results import Case, Result, sample_beside

KIB = 1 << 10
ROUND_BYTES = 512 << 20
SHAPES = {"64 KiB": (4, 16 * KIB), "400 KiB": (25, 16 * KIB), "2 MiB": (32, 64 * KIB),
          "4 MiB": (32, 128 * KIB)}  # fmt: skip
"""Number of layers and bytes per block in each, by the size of a block of 16 tokens."""
TO_REACH = {"2 MiB": 0.9}
_ROUNDS_TO_FILL = 2


def cases(thorough: bool, seed: int) -> list[Case]:
    rounds = 40 if thorough else 6
    # How many requests share the bytes of a round; rounding down to whole requests may drop some.
    requests = {"2 MiB": (1, 64), "64 KiB": (1, 64)} if thorough else {"2 MiB": (1, 64)}
    return [
        Case(
            f"{size} blocks, {'one request' if count == 1 else f'{count} requests'}",
            partial(transfers, size, count, rounds, seed),
        )
        for size in SHAPES
        for count in requests.get(size, (1,))
    ]


def transfers(size: str, num_requests: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure store and retrieve of blocks of one size, alternating with memcpy."""
    layers, run_bytes = SHAPES[size]
    num_blocks = ROUND_BYTES // (layers * run_bytes) // num_requests * num_requests
    with CpuEngine(layers, run_bytes, num_blocks, seed, num_cpu_blocks=2 * num_blocks) as engine:
        copy = torch.ones_like(engine.memory)
        order, other_order = engine.order(), engine.order()
        prompts = _check(engine, copy, num_requests, order, other_order)

        def renew(_: object = None) -> None:
            prompts[:] = [engine.prompt(num_blocks // num_requests) for _ in prompts]

        def store() -> None:
            engine.store(prompts, order)

        def retrieve() -> None:
            engine.load(prompts, other_order)

        bound = partial(copy_at_once, copy, engine.memory)
        renew()
        yield _beside_memcpy("store", size, store, bound, renew, rounds, engine.num_bytes)
        store()
        yield _beside_memcpy(
            "retrieve", size, retrieve, bound, lambda _: None, rounds, engine.num_bytes
        )


def _check(
    engine: CpuEngine, copy: torch.Tensor, num_requests: int, order: np.ndarray,
    other_order: np.ndarray,
) -> list[np.ndarray]:  # fmt: skip
    """Check that the bytes come back, each block to a different place; return the prompts."""
    prompts = [engine.prompt(engine.num_blocks // num_requests) for _ in range(num_requests)]
    copy_at_once(copy, engine.memory)
    engine.store(prompts, order)
    engine.memory.zero_()
    engine.load(prompts, other_order)
    engine.check_blocks(other_order, copy, order)
    return prompts


def _beside_memcpy(
    verb: str, size: str, call: Callable[[], None], bound: Callable[[], None],
    undo: Callable[[None], object], rounds: int, num_bytes: int,
) -> Result:  # fmt: skip
    faults: list[int] = []

    def counted() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        call()
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults.append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)

    seconds, bound_s = sample_beside(
        counted, bound, undo, rounds=rounds, warm_up=_ROUNDS_TO_FILL, scale=1.0
    )
    gigabytes = num_bytes / 1e9
    return Result(
        verb,
        "GB/s",
        [gigabytes / s for s in seconds],
        gigabytes / bound_s,
        "one memcpy",
        reach=TO_REACH.get(size),
        note=f"{int(np.median(faults[_ROUNDS_TO_FILL:]))} page faults per round",
    )
