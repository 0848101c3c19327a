"""Hits that arrive while other requests run: their TTFT, and the wait for a next token meanwhile.

    python benchmarks/bench_hits_beside.py [--rounds 30] [--tokens 1500] [--spare 1] [--json FILE]

One engine with the 136 M model; requests generate all the time, and every 12 of their tokens a hit
arrives, or four at once. In each round the same prompts, with other last tokens, are hit on SSD, in
DRAM and in vLLM's own GPU cache, which is the bound. *DRAM, between steps* is with
``layerwise_load = off``. The benchmark ends if a prompt did not come from where it was to be.

The model computes on all processors, so that a copy within its step displaces it; `--spare 1`
leaves it one fewer, as vLLM's server does by itself (see `bench_overhead`).
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import search_path  # noqa: F401
import typer
from engines import ENGINE_ENV, Engine, Settings, llm_arguments
from reporting import Say, computing_threads, run_and_show

from flexcache.bench.suite import Case, Result

GPU, DRAM, WAITING, SSD = "vLLM's own", "DRAM", "DRAM, between steps", "SSD"
TIERS = {GPU: set(), DRAM: {"CPU"}, WAITING: {"CPU"}, SSD: {"SSD"}}
TTFT_GOALS = {DRAM: 1.10, SSD: 1.20}
GAP_GOAL = 1.03
BLOCK = 32
NUM_RUNNING = 4
WINDOW = 12
"""Steps from one arrival of hits to the next."""
AT_ONCE = (1, 4)


class Bench:
    """An engine with requests that run, and prompts that are hit meanwhile."""

    def __init__(self, directory: str, num_tokens: int) -> None:
        from vllm import LLM

        engine = {"max_num_seqs": 2 * NUM_RUNNING, "kv_cache_memory_bytes": 1 << 30}
        settings = Settings("FlexCache", "mid", directory, dram_gb=1.0, engine=engine)
        self._engine = Engine(LLM(**llm_arguments(settings)), Path(os.devnull))
        self._llm_engine = self._engine.llm.llm_engine
        self._side = self._engine.connector._scheduler
        self._rule = self._side.gets.layerwise
        self._random = random.Random(7)
        self._ids = itertools.count()
        self._num_cached = (num_tokens - 1) // BLOCK * BLOCK
        self._num_new = num_tokens - self._num_cached
        self._found: dict[str, set[str]] = {}
        self.num_in_step = 0
        """Loads that ran within the step that computed with them."""
        self._prompts = [self._tokens(self._num_cached) for _ in range(max(AT_ONCE))]
        self._watch()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, 500) for _ in range(count)]

    def _watch(self) -> None:
        """Note which tiers the loads come from."""
        allocated = self._side.allocated

        def note(request: Any, tables: Any, num_external: int) -> None:
            if num_external:
                sources = self._side.hit_sources(request.request_id)
                self._found[request.request_id.split("-")[0]] = {tier.value for tier in sources}
            record = self._side.gets._requests.get(request.request_id)
            self.num_in_step += bool(num_external and record and record.get.promised)
            allocated(request, tables, num_external)

        self._side.allocated = note

    def store(self) -> None:
        """Store the prompts in all tiers."""
        self._engine.generate_all(self._prompts, max_tokens=1)
        self._engine.settle()

    def run_others(self) -> list[str]:
        """Start the requests that run all the time."""
        names = [self._add(self._tokens(BLOCK), 100_000) for _ in range(NUM_RUNNING)]
        for _ in range(2 * WINDOW):
            self._llm_engine.step()
        return names

    def end(self, names: Sequence[str]) -> None:
        self._llm_engine.abort_request(list(names))
        self._engine.settle()

    def hit(self, where: str, count: int) -> tuple[list[float], list[float]]:
        """Let ``count`` hits arrive; return seconds to their first tokens, and those between the
        tokens of the running requests."""
        self._place(where)
        asked = [prompt + self._tokens(self._num_new) for prompt in self._prompts[:count]]
        last_s = began_s = time.perf_counter()
        names = [self._add(tokens, 1) for tokens in asked]
        first_s, gaps_s = {}, []
        for _ in range(WINDOW):
            outputs = self._llm_engine.step()
            now = time.perf_counter()
            gaps_s.append(now - last_s)
            last_s = now
            for output in outputs:
                if output.request_id in names:
                    first_s[output.request_id] = now - began_s
                    assert output.num_cached_tokens == self._num_cached, output
                    found = self._found.pop(output.request_id, set())
                    assert found == TIERS[where], f"{where}: loaded from {found}"
        assert len(first_s) == count, f"{where}: not all hits were answered in {WINDOW} steps"
        return list(first_s.values()), gaps_s

    def _place(self, where: str) -> None:
        """Drop the prompts from the tiers above this one."""
        from flexcache.integration.adapter import LayerwiseRule

        gets = self._side.gets
        gets.layerwise = LayerwiseRule("off", None) if where == WAITING else self._rule
        pool = self._engine.scheduler.kv_cache_manager
        if where != GPU:
            free = pool.block_pool.free_block_queue.get_all_free_blocks()
            pool.evict_blocks({block.block_id for block in free})
        if where == SSD:
            self._engine.manager.clear("CPU")

    def _add(self, tokens: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = str(next(self._ids))
        self._llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def close(self) -> None:
        self._llm_engine.engine_core.shutdown()


def measure(bench: Bench, count: int, rounds: int, say: Say) -> Iterator[Result]:
    ttft: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    in_step: dict[str, int] = defaultdict(int)
    others = bench.run_others()
    for number in range(rounds + 1):
        say(f"{count} at once, round {number} of {rounds}")
        rest = [GPU, WAITING, DRAM]  # an SSD hit leaves the prompts in DRAM
        for where in (SSD, *rest[:: 1 if number % 2 else -1]):
            before = bench.num_in_step
            first_s, between_s = bench.hit(where, count)
            if number:  # the first warms up
                in_step[where] += bench.num_in_step - before
                ttft[where].extend(seconds * 1e3 for seconds in first_s)
                gaps[where].extend(seconds * 1e3 for seconds in between_s)
    bench.end(others)
    hits = f"{count} hit{'s' if count > 1 else ''} at once"
    for where, seen in ttft.items():
        bound, name = (None, "") if where == GPU else (median(ttft[GPU]), GPU)
        note = "" if where == GPU else f"{in_step[where]} of {len(seen)} loads within a step"
        goal = TTFT_GOALS.get(where)
        yield Result(f"{where}, {hits}: TTFT", "ms", seen, bound, name, goal, note=note)
    for where, seen in gaps.items():
        bound, name = (None, "") if where == GPU else (p99(gaps[GPU]), GPU)
        goal = GAP_GOAL if where in TTFT_GOALS else None
        what = f"{where}, {hits}: gap between tokens"
        yield Result(f"{what}, p99", "ms", [p99(seen)], bound, name, goal)
        yield Result(f"{what}, median", "ms", seen)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[ceil(0.99 * len(values)) - 1]


def run(directory: Path, num_tokens: int, rounds: int, say: Say) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=directory) as ssd:
        bench = Bench(ssd, num_tokens)
        try:
            bench.store()
            for count in AT_ONCE:
                yield from measure(bench, count, rounds, say)
        finally:
            bench.close()


def main(
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = 30,
    tokens: Annotated[int, typer.Option(help="Of a prompt; all whole blocks are cached.")] = 1500,
    spare: Annotated[
        int, typer.Option(min=0, help="Processors that the model does not compute on.")
    ] = 0,
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tier.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    num_threads = computing_threads(spare)
    os.environ.update(
        ENGINE_ENV,
        OMP_NUM_THREADS=str(num_threads),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )

    def sections(say: Say) -> dict[str, list[Case]]:
        return {
            "hits beside running requests": [
                Case(
                    f"136 M model, {num_threads} compute threads",
                    partial(run, directory, tokens, rounds, say),
                )
            ]
        }

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
