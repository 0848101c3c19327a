"""What another host has stored: how soon it is found.

    python benchmarks/bench_hosts.py [--rounds 3] [--store mooncake --store s3 --store file]
        [--json FILE]

Two caches share a store on loopback, and nothing else. One puts a prompt, the other asks for it
once before that and then from its end in the store on, every 5 ms; or all the time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from bench_remote import STORES
from reporting import Say, run_and_show

from flexcache.bench.dram import TOKENS_PER_BLOCK, CpuEngine, Tokens
from flexcache.bench.suite import Case, Result

NUM_BLOCKS = 64  # of 2 MiB
ASK_EVERY_S = 0.005
PATIENCE_S = 30.0
FOUND_S = 0.3


def cache(url: str, seed: int) -> CpuEngine:
    return CpuEngine(
        32, 64 << 10, NUM_BLOCKS, seed, num_cpu_blocks=8 * NUM_BLOCKS, remote_url=url,
        remote_lookup_timeout_s=1.0, server_timeout_s=10.0, skip_slow_loads=False,
    )  # fmt: skip


def num_found(engine: CpuEngine, prompt: Tokens) -> int:
    task, mask = engine.manager.get_match(prompt)
    engine.manager.cancel([task])
    return int(mask.sum()) // TOKENS_PER_BLOCK


def when_found(engine: CpuEngine, prompt: Tokens) -> float:
    """Ask until the whole prompt is found; return when that was."""
    give_up = time.monotonic() + PATIENCE_S
    while num_found(engine, prompt) < NUM_BLOCKS:
        if time.monotonic() > give_up:
            raise TimeoutError("the other cache's prompt was not found")
        time.sleep(ASK_EVERY_S)
    return time.monotonic()


def measure(store: str, rounds: int) -> Iterator[Result]:
    polled, asked_before = [], []
    with ExitStack() as stack:
        url = stack.enter_context(STORES[store]())
        one, two = (stack.enter_context(cache(url, seed)) for seed in (1, 2))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for engine in (one, two):
            while not engine.manager.stats()["tiers"]["REMOTE"]["available"]:
                time.sleep(ASK_EVERY_S)
        for _ in range(rounds):
            prompt = one.prompt(NUM_BLOCKS)
            found = pool.submit(when_found, two, prompt)
            one.store([prompt], one.order(), completely=True)
            stored_s = time.monotonic()
            polled.append(max(0.0, found.result() - stored_s))
            prompt = one.prompt(NUM_BLOCKS)
            num_found(two, prompt)
            one.store([prompt], one.order(), completely=True)
            stored_s = time.monotonic()
            asked_before.append(when_found(two, prompt) - stored_s)
    yield Result(f"{store}: found after it was stored, asked all the time", "s", polled,
                 limit=FOUND_S)  # fmt: skip
    yield Result(f"{store}: found after it was stored, asked once before", "s", asked_before,
                 limit=FOUND_S)  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option()] = 3,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file.")] = list(STORES),  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(_: Say) -> dict[str, list[Case]]:
        found = [Case(name, partial(measure, name, rounds)) for name in store]
        return {"hosts": found}

    raise typer.Exit(run_and_show(sections, Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
