"""The cost of a trace: look-up and cancellation of a cached prompt, with and without a trace.

    python benchmarks/bench_tracer.py

`call` is what the caller waits for, `work` the processor time of it all, what the tracer's thread
does included. The first prompt of a file is written with all its keys, and so is, here, every
prompt that is new: its last block is another one. One that is known is not written again. Each pair
of calls writes three lines; that all of them were written is checked.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from flexcache.cache.block_keys import (
    EngineBlockKeys,
    PackedBlockKeys,
    PromptKeys,
    TokenBlockKeys,
    make_root,
)
from flexcache.cache.plan import PlannerSettings
from flexcache.cache.prompt import Prompt
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.config import CacheConfig
from flexcache.ids import TaskIds, TaskKind, TierName, make_session
from flexcache.replay.traces import RecordedTrace
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tracing.records import TraceHeader
from flexcache.tracing.tracer import Tracer

ROOT = make_root("bench", (), "engine")
SESSION = make_session(0, 1)
TOKENS_PER_BLOCK = 16
KEY_BYTES = 32  # vLLM's
CALLS = {1_024: 1000, 8_192: 500, 131_072: 100}  # tokens: calls
PAUSE_EVERY = 10
PAUSE_S = 0.02  # engines pause too: the queue is not to fill up


class Cost(NamedTuple):
    call_us: float
    work_us: float


def make_prompts(num_tokens: int) -> dict[str, Callable[[int], PromptKeys]]:
    """A prompt in every form in which it comes. Those of other numbers end otherwise."""
    num_blocks = num_tokens // TOKENS_PER_BLOCK
    random = np.random.default_rng(0)
    first = random.bytes((num_blocks - 1) * KEY_BYTES)
    tokens = random.integers(0, 150_000, num_tokens)

    def data(number: int) -> bytes:
        return first + number.to_bytes(KEY_BYTES, "big")

    def keys(number: int) -> list[bytes]:
        whole = data(number)
        return [whole[i : i + KEY_BYTES] for i in range(0, len(whole), KEY_BYTES)]

    def own_tokens(number: int) -> npt.NDArray[np.int64]:
        return np.append(tokens[:-1], number)

    return {
        "engine's keys": lambda n: EngineBlockKeys(ROOT, keys(n), num_blocks),
        "engine's keys, at a server": lambda n: PackedBlockKeys(
            ROOT, memoryview(data(n)), KEY_BYTES
        ),
        "token ids": lambda n: TokenBlockKeys(ROOT, own_tokens(n), TOKENS_PER_BLOCK),
    }


def run(
    make_keys: Callable[[int], PromptKeys], num_calls: int, is_new: bool, trace_dir: Path | None
) -> Cost:
    num_blocks = make_keys(0).num_blocks
    tier = Tier(TierName.CPU, num_blocks)
    settings = PlannerSettings(chunk_blocks=num_blocks, max_store_backlog=num_blocks)
    engine = KVTaskEngine(TieredCache(Tiers([tier]), settings))
    engine.add_session(SESSION, "bench")
    lease = tier.reserve(make_keys(0), 0, num_blocks)
    tier.publish(lease, num_blocks)
    tier.release(lease)
    tracer = None
    if trace_dir is not None:
        config = CacheConfig(num_cpu_blocks=1, trace_dir=str(trace_dir), trace_file_mb=1e6)
        tracer = Tracer(config, TraceHeader(block_bytes=1, tokens_per_block=TOKENS_PER_BLOCK))
        engine.accounts.recorder = tracer
    ids, times = TaskIds(SESSION), []
    prompts = [make_keys(number * is_new) for number in range(num_calls)]
    began_s = time.process_time()
    for number, keys in enumerate(prompts):
        task = ids.next()
        start = time.perf_counter()
        plan = engine.match(task, Prompt(TaskKind.GET, keys, 0, num_blocks, num_blocks), start)
        engine.cancel([task], start)
        times.append(time.perf_counter() - start)
        engine.take_instructions()
        assert plan.num_blocks == num_blocks - (is_new and number > 0)
        if number % PAUSE_EVERY == 0:
            time.sleep(PAUSE_S)
    if tracer is not None:
        tracer.close()
    work_s = time.process_time() - began_s
    if trace_dir is not None:
        num_lines = sum(1 for _ in RecordedTrace([trace_dir]).records())
        assert num_lines == 3 * num_calls, f"{num_lines} lines of {3 * num_calls}"
    return Cost(statistics.median(times) * 1e6, work_s / num_calls * 1e6)


def main() -> None:
    table = Table("tokens", "prompt as", "", "call, off", "call, on", "work, off", "work, on")
    for num_tokens, num_calls in CALLS.items():
        for name, make_keys in make_prompts(num_tokens).items():
            for is_new in (True, False):
                off = run(make_keys, num_calls, is_new, None)
                with tempfile.TemporaryDirectory() as directory:
                    on = run(make_keys, num_calls, is_new, Path(directory))
                times = (off.call_us, on.call_us, off.work_us, on.work_us)
                table.add_row(
                    f"{num_tokens:,}", name, "new" if is_new else "known",
                    *(f"{us:.0f} us" for us in times),
                )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
