"""What a cache costs when nothing hits: vLLM's throughput with FlexCache beside vLLM alone.

    python scripts/bench_overhead.py [--model mid] [--rounds 8] [--json FILE]

Engines stand side by side, each in a process of its own, and serve the same batch of prompts one
after the other, in an order that changes from round to round; every prompt is new, so all that a
cache can do is cost. A second engine without a cache says how much two equal ones differ on this
machine. A batch ends when all that it leaves behind is stored in every tier (of vLLM's own
offloading: in DRAM). The figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from engine_process import EngineProcess, Settings, running
from reporting import Say, run_and_show

from flexcache.bench.results import Case, Result

ALONE = "vLLM alone"
TO_REACH = 0.98
DRAM_GB = 0.1  # small, so that puts have to evict
NUM_GENERATED = 16
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Load:
    """What a batch is."""

    num_prompts: int
    num_tokens: tuple[int, int]


LOADS = {"tiny": Load(24, (200, 1200)), "mid": Load(4, (150, 350))}


def settings(model: str, work_dir: str) -> dict[str, Settings]:
    """The engines, by what they are called in the table."""
    ours, theirs = str(Path(work_dir, "flexcache")), str(Path(work_dir, "offloading"))
    return {
        ALONE: Settings("alone", model),
        "vLLM alone, again": Settings("alone", model),
        "FlexCache, DRAM": Settings("FlexCache", model, None, DRAM_GB),
        "FlexCache, DRAM and SSD": Settings("FlexCache", model, ours, DRAM_GB),
        "vLLM's own offloading, DRAM": Settings("offloading", model, None, DRAM_GB),
        "vLLM's own offloading, DRAM and files": Settings("offloading", model, theirs, DRAM_GB),
    }


def batches(load: Load, seed: int) -> Iterator[list[list[int]]]:
    """Prompts that share no block with each other."""
    source = random.Random(seed)
    while True:
        yield [
            [source.randrange(3, 500) for _ in range(source.randint(*load.num_tokens))]
            for _ in range(load.num_prompts)
        ]


@contextmanager
def engines(
    model: str, names: Sequence[str], work_dir: str, say: Say
) -> Iterator[dict[str, EngineProcess]]:
    """Started one after the other: two at once would take twice as long each."""
    wanted, log = settings(model, work_dir), Path(work_dir, "engine.log")
    with ExitStack() as stack:
        made = {}
        for name in names:
            say(f"{model} model: starting {name}")
            made[name] = stack.enter_context(running(EngineProcess(wanted[name], log)))
        yield made


def measure(
    made: dict[str, EngineProcess], load: Load, rounds: int, say: Say
) -> tuple[dict[str, list[dict[str, float]]], dict[str, int]]:
    """What each engine took for each batch, and the bytes it copied for all of them."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    source, names, before = batches(load, seed=5), list(made), {}
    for number in range(-WARM_UP_ROUNDS, rounds):
        prompts, turn = next(source), number % len(names)
        if number == 0:
            before = {name: bytes_copied(engine) for name, engine in made.items()}
        for name in names[turn:] + names[:turn]:
            say(f"round {number + 1} of {rounds}: {name}")
            took = made[name].serve(prompts, NUM_GENERATED)
            if number >= 0:
                seen[name].append(took)
    return seen, {name: bytes_copied(engine) - before[name] for name, engine in made.items()}


def bytes_copied(engine: EngineProcess) -> int:
    """Off the engine into DRAM so far; unknown, so none, of others than FlexCache."""
    stats = engine.stats()
    return int(stats["ops"]["D2H"]["bytes"]) if stats else 0


def memcpy_bytes_per_s() -> float:
    """Of one large copy, the best of a few."""
    source = np.ones(128 << 20, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return source.nbytes / min(times)


def figures(
    seen: dict[str, list[dict[str, float]]], copied: dict[str, int], memcpy: float
) -> Iterator[Result]:
    """Throughput of each engine as a ratio to vLLM alone, batch by batch."""
    for name, mine in seen.items():
        if name == ALONE:
            continue
        wall = [a["wall_s"] / b["wall_s"] for a, b in zip(seen[ALONE], mine, strict=True)]
        cpu = [b["cpu_s"] / a["cpu_s"] for a, b in zip(seen[ALONE], mine, strict=True)]
        quartiles = statistics.quantiles(wall, n=4)
        took_s = sum(batch["wall_s"] for batch in mine)
        note = (
            f"half of the batches between {quartiles[0]:.3f} and {quartiles[2]:.3f}; over all "
            f"{sum(batch['wall_s'] for batch in seen[ALONE]) / took_s:.3f}; "
            f"{statistics.median(cpu):.3f} of the CPU time"
        )
        if copied[name]:
            share = copied[name] / memcpy / took_s
            note += (
                f"; copied {copied[name] / 1e6:.0f} MB, at memcpy's speed {share:.2%} of the time"
            )
        limit = TO_REACH if name.startswith("FlexCache") else None
        yield Result(f"{name}: throughput, of vLLM alone", "", wall, limit=limit, note=note)


def run(
    model: str, rounds: int, names: Sequence[str], directory: Path, say: Say
) -> Iterator[Result]:
    """The figures of one model."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as work_dir,
        engines(model, names, work_dir, say) as made,
    ):
        seen, copied = measure(made, LOADS[model], rounds, say)
        memcpy = memcpy_bytes_per_s()
    yield from figures(seen, copied, memcpy)


def cases(
    directory: Path, say: Say, rounds: int = 8, models: Sequence[str] = tuple(LOADS),
    names: Sequence[str] = (),
) -> list[Case]:  # fmt: skip
    """One per model."""
    chosen = names or list(settings("tiny", ""))
    return [
        Case(
            f"distinct prompts, {model} model", partial(run, model, rounds, chosen, directory, say)
        )
        for model in models
    ]


def main(
    model: Annotated[list[str], typer.Option(help="tiny, mid.")] = list(LOADS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="After two to warm up.")] = 8,
    only: Annotated[str, typer.Option(help="Besides vLLM alone, engines with this name.")] = "",
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tier.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    names = [name for name in settings("tiny", "") if name == ALONE or only in name]

    def sections(say: Say) -> dict[str, list[Case]]:
        return {"overhead": cases(directory, say, rounds, model, names)}

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
