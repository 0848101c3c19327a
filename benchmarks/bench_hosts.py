"""What another host has stored: how soon it is found, and what asking for it in vain costs.

    python benchmarks/bench_hosts.py [--rounds 3] [--store mooncake --store s3 --store file]
        [--json FILE]

Two caches share a store on loopback, and nothing else. One puts a prompt, the other asks for it
every 5 ms. Then 50 users ask 100 prompts/s of a store that lacks everything; beside it the same
with blocks that are not asked for again within 5 s, in the same run.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import search_path  # noqa: F401
import typer
from bench_remote import STORES
from reporting import Say, run_and_show

from flexcache.bench.dram import TOKENS_PER_BLOCK, CpuEngine, Tokens
from flexcache.bench.suite import Case, Result
from flexcache.cache import tiers

NUM_BLOCKS = 64  # of 2 MiB
ASK_EVERY_S = 0.005
PATIENCE_S = 30.0
FOUND_S = 0.3
USERS, PROMPTS_PER_S, TURN_BLOCKS, VAIN_S = 50, 100, 4, 10.0
GROWTH = 2.0


def cache(url: str, seed: int) -> CpuEngine:
    return CpuEngine(
        32, 64 << 10, NUM_BLOCKS, seed, num_cpu_blocks=4 * NUM_BLOCKS, remote_url=url,
        remote_lookup_timeout_s=1.0, server_timeout_s=10.0, skip_slow_loads=False,
    )  # fmt: skip


def num_found(engine: CpuEngine, prompt: Tokens) -> int:
    task, mask = engine.manager.get_match(prompt)
    engine.manager.cancel([task])
    return int(mask.sum()) // TOKENS_PER_BLOCK


def seconds_until_found(engine: CpuEngine, prompt: Tokens) -> float:
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        if num_found(engine, prompt) == NUM_BLOCKS:
            return time.monotonic() - began
        time.sleep(ASK_EVERY_S)
    raise TimeoutError("the other cache's prompt was not found")


def measure_found(store: str, rounds: int) -> Iterator[Result]:
    polled, asked_before = [], []
    with ExitStack() as stack:
        url = stack.enter_context(STORES[store]())
        one, two = (stack.enter_context(cache(url, seed)) for seed in (1, 2))
        for engine in (one, two):
            while not engine.manager.stats()["tiers"]["REMOTE"]["available"]:
                time.sleep(ASK_EVERY_S)
        for _ in range(rounds):
            prompt = one.prompt(NUM_BLOCKS)
            one.store([prompt], one.order())
            polled.append(seconds_until_found(two, prompt))
            prompt = one.prompt(NUM_BLOCKS)
            num_found(two, prompt)
            one.store([prompt], one.order(), completely=True)
            asked_before.append(seconds_until_found(two, prompt))
    yield Result(f"{store}: found after the put's GPU side, polled", "s", polled, limit=FOUND_S)
    yield Result(
        f"{store}: found after the whole put, asked before", "s", asked_before, limit=FOUND_S
    )


def num_asked(seed: int, first_ttl_s: float) -> int:
    """Ask as users do whose prompts grow by a turn each; return how often the store was asked."""
    usual, tiers.UNKNOWN_TTL_S = tiers.UNKNOWN_TTL_S, first_ttl_s
    try:
        with tempfile.TemporaryDirectory() as directory, cache(f"file://{directory}", seed) as one:
            rng, turns = np.random.default_rng(seed), [0] * USERS
            prompts = [one.prompt(NUM_BLOCKS) for _ in range(USERS)]
            began = time.monotonic()
            for number in itertools.count():
                due_s = began + number / PROMPTS_PER_S
                if due_s > began + VAIN_S:
                    break
                time.sleep(max(0.0, due_s - time.monotonic()))
                user = int(rng.integers(USERS))
                turns[user] += 1
                length = min(NUM_BLOCKS, turns[user] * TURN_BLOCKS) * TOKENS_PER_BLOCK
                num_found(one, prompts[user][:length])
            return int(one.manager.stats()["remote"]["lookups"]["asked"])
    finally:
        tiers.UNKNOWN_TTL_S = usual


def measure_vain(rounds: int) -> Iterator[Result]:
    pairs = [
        (num_asked(seed, tiers.UNKNOWN_TTL_S), num_asked(seed, tiers.ABSENT_TTL_S))
        for seed in range(rounds)
    ]
    asked = [found / VAIN_S for found, _ in pairs]
    before = [found / VAIN_S for _, found in pairs]
    note = f"asked not again within {tiers.ABSENT_TTL_S:.0f} s: {np.median(before):.1f}/s"
    yield Result(
        "questions a second, over those without a second try", "", [
            after / max(1e-9, once) for after, once in zip(asked, before, strict=True)
        ], note=f"{np.median(asked):.1f}/s; {note}; at most {GROWTH:.0f}",
    )  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option()] = 3,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file.")] = list(STORES),  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(_: Say) -> dict[str, list[Case]]:
        found = [Case(name, partial(measure_found, name, rounds)) for name in store]
        return {"hosts": [*found, Case("in vain", partial(measure_vain, rounds))]}

    raise typer.Exit(run_and_show(sections, Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
