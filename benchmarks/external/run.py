"""Benchmarks of others, on one small engine with each cache below its blocks.

    python benchmarks/external/run.py simulator --trace FILE
    python benchmarks/external/run.py prefix-repetition --venvs DIR
    python benchmarks/external/run.py timed-trace --trace FILE --venvs DIR
    python benchmarks/external/run.py cache-pressure --venvs DIR
    python benchmarks/external/run.py aiperf-agents --venvs DIR
    python benchmarks/external/run.py aiperf-mooncake --trace FILE --venvs DIR

Each run has a server of its own, and the arms take turns within a round, so that a machine that
becomes slower does so for all. Each run adds a line of JSON to ``external-NAME.jsonl``. What is
there is not run again, so a command that was stopped goes on where it was; a run that failed is
repeated. The arm with an SSD tier is asked once more after a restart, by the same traffic.

Lengths are about 1/16 of what the tools are used with on GPUs. The conversation trace is
``FAST25-release/traces/conversation_trace.jsonl`` of the repository kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import external_path  # noqa: F401
import typer
from arms import ARMS, DidNotRun
from make_models import make_model
from paths import MODELS, ROOT
from rounds import RawFigures, console, run_all
from simulator import compare
from tools import task_of
from venvs import peer_python

from flexcache.bench.suite import Unsupported

RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("aiperf-agents", "aiperf-mooncake", "prefix-repetition", "timed-trace", "cache-pressure")

app = typer.Typer(no_args_is_help=True, add_completion=False)

Venvs = Annotated[Path, typer.Option(help="Environments of the tools; made where missing.")]
Results = Annotated[Path, typer.Option(help="Directory of the raw figures.")]


def command(name: str) -> None:
    """Add the command of a benchmark that needs engines."""

    @app.command(name)
    def run(
        venvs: Venvs,
        model: Annotated[
            Path | None, typer.Option(help="Directory of a model. Default: SmolLM2, made here.")
        ] = None,
        trace: Annotated[
            Path | None, typer.Option(help="Conversation trace in Mooncake's format.")
        ] = None,
        arm: Annotated[list[str], typer.Option(help="Of those in the table.")] = list(ARMS),  # noqa: B006
        rounds: Annotated[int, typer.Option(min=1)] = 3,
        load: Annotated[list[float] | None, typer.Option(help="Instead of the usual.")] = None,
        limit_s: Annotated[float, typer.Option(help="Of one run.")] = 240.0,
        minutes: Annotated[float, typer.Option(help="Begins no run after these.")] = 100.0,
        seed: Annotated[int, typer.Option(help="Of the traffic.")] = 1,
        directory: Annotated[Path, typer.Option("--dir", help="For SSD tiers.")] = Path("."),
        results: Results = RESULTS,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work_dir:
            venvs = venvs.resolve()
            where = make_model(MODELS, "smollm2") if model is None else model.resolve()
            trace = None if trace is None else trace.resolve()
            try:
                task = task_of(name, limit_s, seed, trace, venvs, Path(work_dir).resolve())
            except (Unsupported, DidNotRun) as error:
                console.print(f"{name}: {error}")
                raise typer.Exit(1) from None
            if load:
                task = replace(task, loads=load)
            extra = [each for each in task.arms if each not in ARMS] if len(arm) > 2 else []
            raw = RawFigures(results / f"external-{name}.jsonl")
            left = run_all(
                task, raw, [*extra, *arm], rounds, seed, minutes, where, venvs, directory.resolve()
            )
        console.print(f"{raw.path}: " + (f"{left} runs are left" if left else "complete"))
        raise typer.Exit(int(bool(left)))


for each in NAMES:
    command(each)


@app.command()
def simulator(
    trace: Annotated[list[Path], typer.Option(help="In any format that replay reads.")],
    venvs: Venvs,
    size: Annotated[list[int], typer.Option(help="Blocks.")] = [1000, 2000, 5000, 10_000],  # noqa: B006
    results: Results = RESULTS,
) -> None:
    """Compare FlexCache's LRU and optimum with kvcache-simulator's, to the token."""
    with console.status("kvcache-simulator") as status:
        python = peer_python(venvs.resolve(), "kvcache-simulator")
        rows = [row for path in trace for row in compare(path, size, python, status.update)]
    path = results / "external-simulator.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    different = [row for row in rows if row["hit_tokens"] != row["simulator_hit_tokens"]]
    for row in rows:
        same = "equal" if row not in different else f"NOT {row['hit_tokens']:,}"
        console.print(
            f"{row['trace']}, {row['blocks']:,} blocks, {row['policy']}: "
            f"{row['simulator_hit_tokens']:,} of {row['of_tokens']:,} tokens, {same}"
        )
    raise typer.Exit(int(bool(different) or not rows))


if __name__ == "__main__":
    app()
