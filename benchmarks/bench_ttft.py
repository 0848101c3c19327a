"""TTFT of the 136 M model: cold, from DRAM, from SSD; FlexCache with and without a DRAM tier,
beside vLLM's own offloading and, where environments of peers are named, LMCache.
Hits of FlexCache also beside the least they take: a hit in vLLM's own GPU cache, and one memcpy of
the bytes that are loaded, or one raw read of them.

    python benchmarks/bench_ttft.py [--tokens 1000] [--rounds 5] [--system FlexCache]
        [--model smollm2] [--venvs DIR] [--json FILE]

The engines run side by side, each in its own process, and take turns: in each round all of them
get the same new prompt, first cold, then as it is, then with GPU memory dropped, then with DRAM
dropped too. The benchmark ends if a hit of FlexCache changes the answer, or if an expected hit is a
miss. For peers both are counted (LMCache has chunks of 256 tokens, so it recomputes and rounds
more).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import search_path  # noqa: F401
import typer
from driven_engine import DidNotRun, DrivenEngine, running
from engines import Settings
from least_load import LeastLoad
from lmcache_server import running_server
from reporting import Say, run_and_show
from venvs import peer_python

from flexcache.bench.suite import Case, Result, Unsupported

ALONE, OURS, SSD_ALONE = "vLLM alone", "FlexCache", "FlexCache without DRAM"
PEER, LMCACHE = "vLLM's own offloading", "LMCache"
SYSTEMS = {ALONE: "alone", OURS: "FlexCache", SSD_ALONE: "FlexCache", PEER: "offloading",
           LMCACHE: "LMCache"}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    SSD_ALONE: {"dram_gb": None, "more": {"num_cpu_blocks": 0}},
}
RUNS = ("cold", "GPU", "DRAM", "SSD")
REACH = {"DRAM": 0.9, "SSD": 1.0}
"""Times the least that a hit takes."""
BLOCK = 32
CHUNKS = {"LMCache": 256}  # of tokens, that a system caches; for the others a block
DRAM_GB = 1.0
MODEL = "mid"
LENGTHS = (1000, 4000)
ROUNDS = 5

Start = Callable[[str, Path], AbstractContextManager[DrivenEngine]]
"""Runs the engine of a system, with its files in a directory."""


@dataclass
class Seen:
    """Measurements of one system: milliseconds by run, and prompts whose answer a hit changed."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {run: [] for run in RUNS})
    num_changed: int = 0


def measure_prompt(engine: DrivenEngine, tokens: Sequence[int]) -> tuple[dict[str, float], bool]:
    """Milliseconds to the first token of each run; whether all answers were equal.

    Raises:
        AssertionError: A hit was none, or a new prompt was known.
    """
    took, answers = {}, []
    runs = RUNS[:2] if engine.settings.system == "alone" else RUNS
    for run in runs:
        if run != "cold":
            engine.ask(tokens[-BLOCK // 2 :])  # a step that leaves nothing behind
        if run in REACH:
            engine.forget("DRAM" if run == "SSD" else "GPU")
        answer = engine.ask(tokens)
        took[run] = answer["ttft_s"] * 1e3
        answers.append(answer["tokens"])
        chunk = CHUNKS.get(engine.settings.system, BLOCK)
        known = 0 if run == "cold" else (len(tokens) - 1) // chunk * chunk
        assert answer["cached"] >= known and bool(answer["cached"]) == bool(known), (
            f"{engine.settings.system}, {run}: {answer['cached']} of {len(tokens)} tokens known"
        )
    engine.forget("GPU" if engine.settings.system == "alone" else "DRAM")
    return took, answers.count(answers[0]) == len(runs)


def bytes_of_hit(engine: DrivenEngine, length: int) -> int:
    """Return how many bytes FlexCache loads for a prompt of this length."""
    tokens = random.Random(0).choices(range(3, 500), k=length)

    def loaded() -> int:
        return int(engine.stats()["ops"]["H2D"]["bytes"])

    engine.ask(tokens)
    engine.forget("GPU")
    before = loaded()
    engine.ask(tokens)
    return loaded() - before


def measure(
    engines: dict[str, DrivenEngine], length: int, rounds: int, least: LeastLoad, say: Say
) -> dict[str, Seen]:
    """All systems in turn, in an order that alternates; the first round warms everything up."""
    source = random.Random(length)
    seen = {name: Seen() for name in engines}
    for number in range(rounds + 1):
        tokens = [source.randrange(3, 500) for _ in range(length if number else length // 4)]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            say(f"{length} tokens, round {number} of {rounds}: {name}")
            took, are_equal = measure_prompt(engines[name], tokens)
            if not are_equal and SYSTEMS[name] == OURS:
                raise AssertionError(f"{length} tokens: a hit changed the answer")
            seen[name].num_changed += not are_equal
            if number:
                for run, ms in took.items():
                    seen[name].ms[run].append(ms)
        least.measure()
    return seen


def figures(seen: dict[str, Seen], length: int, absent: str) -> Iterator[Result]:
    """Each run of each system; ours and LMCache's beside vLLM's own, or why there is none."""
    for run in RUNS:
        for name, mine in seen.items():
            if not mine.ms[run] or (run, name) == ("DRAM", SSD_ALONE):
                continue
            share = statistics.median(mine.ms[run]) / statistics.median(mine.ms["cold"])
            notes = [f"{share:.2%} of its cold run" if run != "cold" else absent]
            if run == "cold" and mine.num_changed:
                notes.append(f"hits changed the answers to {mine.num_changed} prompts")
            peer = seen.get(PEER) if name not in (PEER, ALONE) else None
            yield Result(
                f"{run}, {name}, {length} tokens", "ms", mine.ms[run],
                bound=statistics.median(peer.ms[run]) if peer else None,
                bound_name=PEER if peer else "",
                note="; ".join(filter(None, notes)),
            )  # fmt: skip


def beside_least(seen: dict[str, Seen], least: LeastLoad, length: int) -> Iterator[Result]:
    """Hits of FlexCache beside the bounds that vLLM and the machine set.

    A hit in the GPU cache is that of the engine which is faster at it. Of a prompt of whole blocks
    vLLM alone computes the last block again; with FlexCache it computes one token.
    """
    if not {ALONE, OURS} <= set(seen):
        return
    in_gpu = min(statistics.median(seen[name].ms["GPU"]) for name in (ALONE, OURS))
    for run, what in (("DRAM", "one memcpy"), ("SSD", "one raw read")):
        load = statistics.median(least.ms[run][1:])
        yield Result(
            f"{run}, beside the least it takes, {length} tokens", "ms", seen[OURS].ms[run],
            bound=in_gpu + load, bound_name=f"a hit in vLLM's GPU cache and {what}",
            reach=REACH[run], note=f"{in_gpu:.1f} ms and {load:.1f} ms",
        )  # fmt: skip


@contextmanager
def engine(name: str, work_dir: Path, venvs: Path | None, **changes: Any) -> Iterator[DrivenEngine]:
    """A system's engine, and for LMCache its server.

    Args:
        changes: Of the engine's `Settings`.

    Raises:
        DidNotRun, Unsupported: Says why.
    """
    directory, log = work_dir / name.replace(" ", "-"), work_dir / "engine.log"
    directory.mkdir()
    settings = replace(
        Settings(SYSTEMS[name], MODEL, str(directory), DRAM_GB), **(CHANGES.get(name, {}) | changes)
    )
    with ExitStack() as stack:
        python = sys.executable
        if name == LMCACHE:
            if venvs is None:
                raise Unsupported("no environments of peers are named")
            python = peer_python(venvs, "lmcache-vllm")
            server_log = stack.enter_context((work_dir / "server.log").open("w+b"))
            files = {"type": "fs_native", "base_path": str(directory), "use_odirect": True}
            options = ["--l2-adapter", json.dumps(files)]
            url = stack.enter_context(
                running_server(server_log, DRAM_GB, options, peer_python(venvs, "lmcache"))
            )
            settings = replace(settings, peer_url=url)
        yield stack.enter_context(running(DrivenEngine(settings, log, python)))


def run(
    lengths: Sequence[int], rounds: int, systems: Sequence[str], directory: Path, start: Start,
    say: Say,
) -> Iterator[Result]:  # fmt: skip
    """The figures of all lengths, on one set of engines."""
    engines, absent = {}, []
    with tempfile.TemporaryDirectory(dir=directory) as work_dir, ExitStack() as stack:
        for name in systems:
            say(f"starting {name}")
            try:
                engines[name] = stack.enter_context(start(name, Path(work_dir)))
            except (DidNotRun, Unsupported, RuntimeError) as error:
                if SYSTEMS[name] == OURS:
                    raise
                absent.append(f"{name} did not run: {error}")
        for length in lengths:
            num_bytes = bytes_of_hit(engines[OURS], length)
            with closing(LeastLoad(Path(work_dir), num_bytes)) as least:
                seen = measure(engines, length, rounds, least, say)
                yield from figures(seen, length, "; ".join(absent))
                yield from beside_least(seen, least, length)


def cases(
    directory: Path, say: Say, rounds: int = ROUNDS, lengths: Sequence[int] = LENGTHS,
    systems: Sequence[str] = tuple(SYSTEMS), *, venvs: Path | None = None, model: str = MODEL,
) -> list[Case]:  # fmt: skip
    start = partial(engine, venvs=venvs, model=model)
    name = "136 M model" if model == MODEL else f"{model} model"
    return [Case(name, partial(run, lengths, rounds, systems, directory, start, say))]


def main(
    tokens: Annotated[list[int], typer.Option(help="Lengths of prompts.")] = list(LENGTHS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = ROUNDS,
    system: Annotated[list[str], typer.Option(help="FlexCache and others.")] = list(SYSTEMS),  # noqa: B006
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tiers.")] = Path("."),
    venvs: Annotated[Path | None, typer.Option(help="Of peers; made where missing.")] = None,
    model: Annotated[str, typer.Option(help="mid, smollm2 or another of `make_models`.")] = MODEL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    if OURS not in system or not set(system) <= set(SYSTEMS):
        raise typer.BadParameter(f"--system {OURS}, and any of {', '.join(SYSTEMS)}")

    def sections(say: Say) -> dict[str, list[Case]]:
        made = cases(directory, say, rounds, tokens, system, venvs=venvs, model=model)
        return {"TTFT": made}

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
