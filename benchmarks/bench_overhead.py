"""The cost of a cache when nothing hits: vLLM's throughput with FlexCache beside vLLM alone.

    python benchmarks/bench_overhead.py [--model mid] [--rounds 9] [--spare 1] [--idle] [--json F]

Every prompt is new, so all that a cache can do is cost. In a round an engine serves four batches of
prompts of the same lengths: with its KV connector, twice with that taken out, and with it again (or
the other way round), so that drift cancels. Two engines, even two equal ones, differ by more than
what is to be measured. The model computes on all processors, so that whatever else runs displaces
it; `--spare 1` leaves it one fewer, as vLLM's server does by itself: it keeps a core for its
scheduler and one more for a KV connector (`vllm/utils/ompmultiprocessing.py`). A batch ends when
all that it leaves behind is stored in every tier (of vLLM's own offloading: in DRAM). An engine
without a cache, asked likewise, says how far equal rounds are apart; with `--idle`, one with a
connector that does nothing says what vLLM itself does for a connector.

FlexCache writes nothing to SSD once it has seen for long that nothing comes back
(`skip_useless_ssd_writes`). One engine shows that state, reached before its first round; the others
write everything.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import search_path  # noqa: F401
import typer
from driven_engine import DrivenEngine, running
from engines import Settings
from reporting import Say, computing_threads, run_and_show

from flexcache.bench.suite import Case, Result

ALONE = "vLLM alone"
IDLE = "vLLM with a connector that does nothing"
TO_REACH = 0.98
DRAM_GB = 0.1  # small, so that puts have to evict
RESTING = ", once nothing comes back"
NUM_GENERATED = 16
WARM_UP_ROUNDS = 1
ROUNDS = 9  # odd: then the median is one of them


@dataclass(frozen=True)
class Load:
    """What a batch is."""

    num_prompts: int
    num_tokens: tuple[int, int]


LOADS = {"tiny": Load(24, (200, 1200)), "mid": Load(6, (150, 350))}


def settings(model: str, work_dir: str, num_threads: int | None) -> dict[str, Settings]:
    """The engines, by what they are called in the table; ``num_threads`` compute."""
    ours, theirs, resting = (
        str(Path(work_dir, name)) for name in ("flexcache", "offloading", "resting")
    )
    made = partial(Settings, model=model, dram_gb=DRAM_GB, num_threads=num_threads)
    return {
        ALONE: made("alone"),
        IDLE: made("idle"),
        "FlexCache, DRAM": made("FlexCache"),
        "FlexCache, DRAM and SSD": made(
            "FlexCache", directory=ours, more={"skip_useless_ssd_writes": False}
        ),
        f"FlexCache, DRAM and SSD{RESTING}": made(
            "FlexCache", directory=resting, more={"ssd_cache_gb": DRAM_GB}
        ),
        "vLLM's own offloading, DRAM": made("offloading"),
        "vLLM's own offloading, DRAM and files": made("offloading", directory=theirs),
    }


def systems(part: str, with_idle: bool) -> list[str]:
    """vLLM alone, with an idle connector if asked for, and those with ``part`` in the name."""
    controls = {ALONE: True, IDLE: with_idle}
    return [name for name in settings("", "", None) if controls.get(name, part in name)]


def rounds_of(load: Load, seed: int) -> Iterator[list[list[list[int]]]]:
    """Four batches of as many tokens each; no prompt shares a block with another."""
    source = random.Random(seed)
    while True:
        lengths = [source.randint(*load.num_tokens) for _ in range(load.num_prompts)]
        yield [
            [[source.randrange(3, 500) for _ in range(length)] for length in lengths]
            for _ in range(4)
        ]


@contextmanager
def engines(
    model: str, num_threads: int, names: Sequence[str], work_dir: str, say: Say
) -> Iterator[dict[str, DrivenEngine]]:
    """Started one after the other: two at once would take twice as long each."""
    wanted, log = settings(model, work_dir, num_threads), Path(work_dir, "engine.log")
    with ExitStack() as stack:
        made = {}
        for name in names:
            say(f"{model} model: starting {name}")
            made[name] = stack.enter_context(
                running(DrivenEngine(wanted[name], log, sys.executable))
            )
        yield made


@dataclass
class Seen:
    """Measurements of one engine: seconds of each round alone and with its cache.

    ``more_cpu_s`` is the CPU time that the cache's batches took beyond the others.
    """

    alone_s: list[float] = field(default_factory=list)
    cached_s: list[float] = field(default_factory=list)
    more_cpu_s: float = 0.0
    num_requests: int = 0
    bytes_copied: int = 0


def measure(made: dict[str, DrivenEngine], load: Load, rounds: int, say: Say) -> dict[str, Seen]:
    """All engines in turn; the first rounds warm everything up."""
    seen = {name: Seen() for name in made}
    source = rounds_of(load, seed=5)
    for name, engine in made.items():
        if name.endswith(RESTING):
            say(f"until nothing is written: {name}")
            while not is_resting(engine):
                engine.serve(next(source)[0], NUM_GENERATED)
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, engine in made.items():
            say(f"round {number + 1} of {rounds}: {name}")
            copied = bytes_copied(engine)
            took: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            order = [bool(number % 2), not number % 2, not number % 2, bool(number % 2)]
            for cached, prompts in zip(order, next(source), strict=True):
                took[cached].append(
                    engine.serve(prompts, NUM_GENERATED, None if cached else "cache")
                )
            if number < 0:
                continue
            mine = seen[name]
            mine.cached_s.append(sum(batch["wall_s"] for batch in took[True]))
            mine.alone_s.append(sum(batch["wall_s"] for batch in took[False]))
            mine.more_cpu_s += sum(batch["cpu_s"] for batch in took[True])
            mine.more_cpu_s -= sum(batch["cpu_s"] for batch in took[False])
            mine.num_requests += 2 * load.num_prompts
            mine.bytes_copied += bytes_copied(engine) - copied
    return seen


def is_resting(engine: DrivenEngine) -> bool:
    """Whether the engine's cache has begun to write nothing to SSD."""
    return bool(engine.stats()["tiers"]["SSD"]["writes_paused"])


def bytes_copied(engine: DrivenEngine) -> int:
    """Off the engine into DRAM so far; unknown, so none, of others than FlexCache."""
    stats = engine.stats()
    return int(stats["ops"]["D2H"]["bytes"]) if stats else 0


def memcpy_bytes_per_s() -> float:
    """Return the rate of one large copy, the best of a few."""
    source = np.ones(128 << 20, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return source.nbytes / min(times)


def figures(seen: dict[str, Seen], memcpy: float) -> Iterator[Result]:
    """Throughput with each cache as a ratio to the same engine without it, round by round."""
    for name, mine in seen.items():
        ratios = [alone / cached for alone, cached in zip(mine.alone_s, mine.cached_s, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        cached_s = sum(mine.cached_s)
        note = (
            f"half of the rounds between {low:.3f} and {high:.3f}, over all "
            f"{sum(mine.alone_s) / cached_s:.3f}; per request "
            f"{(cached_s - sum(mine.alone_s)) / mine.num_requests * 1e3:.2f} of "
            f"{cached_s / mine.num_requests * 1e3:.1f} ms, "
            f"{mine.more_cpu_s / mine.num_requests * 1e3:.2f} ms of CPU time"
        )
        if mine.bytes_copied:
            copies_s = mine.bytes_copied / memcpy / mine.num_requests
            note += f", {copies_s * 1e3:.2f} ms of copies at memcpy's speed"
        limit = TO_REACH if name.startswith("FlexCache") else None
        yield Result(f"{name}: throughput, of vLLM alone", "", ratios, limit=limit, note=note)


def run(
    model: str, num_threads: int, rounds: int, names: Sequence[str], directory: Path, say: Say
) -> Iterator[Result]:
    """The figures of one model."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as work_dir,
        engines(model, num_threads, names, work_dir, say) as made,
    ):
        seen = measure(made, LOADS[model], rounds, say)
        memcpy = memcpy_bytes_per_s()
    yield from figures(seen, memcpy)


def cases(
    directory: Path, say: Say, rounds: int = ROUNDS, spare: int = 0,
    models: Sequence[str] = tuple(LOADS), part: str = "", with_idle: bool = False,
) -> list[Case]:  # fmt: skip
    """One per model, of the systems with ``part`` in the name.

    Args:
        spare: Processors that the model does not compute on.
    """
    num_threads = computing_threads(spare)
    return [
        Case(
            f"distinct prompts, {model} model, {num_threads} compute threads",
            partial(run, model, num_threads, rounds, systems(part, with_idle), directory, say),
        )
        for model in models
    ]


def main(
    model: Annotated[list[str], typer.Option(help="tiny, mid.")] = list(LOADS),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=2, help="After one to warm up.")] = ROUNDS,
    spare: Annotated[
        int, typer.Option(min=0, help="Processors that the model does not compute on.")
    ] = 0,
    only: Annotated[
        str, typer.Option(help="Besides vLLM alone, those with this in the name.")
    ] = "",
    idle: Annotated[
        bool, typer.Option("--idle", help="Besides, vLLM with a connector that does nothing.")
    ] = False,
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tier.")] = Path("."),
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(say: Say) -> dict[str, list[Case]]:
        return {"overhead": cases(directory, say, rounds, spare, model, only, idle)}

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
