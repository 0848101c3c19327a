"""The router's index beside Dynamo's RadixTree and SelectionService, on the same events.

    python benchmarks/router/bench_router_index.py --dynamo-python DIRECTORY/bin/python
    python benchmarks/router/bench_router_index.py --venvs DIRECTORY --workers 1000 --json out.json

*decide* is what a routing decision needs of the index: the depth at each worker and the worker with
the largest. Prompts come as block hashes, except SelectionService's, which come as tokens: it
hashes them itself. Look-ups are wall time; events are CPU time, of the whole process where the peer
has threads. RadixTree gets hashes that were computed beforehand. SelectionService includes the
sender of its events. Without an environment of Dynamo's only FlexCache is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import router_path  # noqa: F401
import typer
from index_workload import Measured, Memory, Times, make_workload, save
from rich.console import Console
from rich.table import Table
from venvs import peer_python

from flexcache.bench.suite import Unsupported

HERE = Path(__file__).resolve().parent
OURS, RADIX, SELECTION = "FlexCache", "RadixTree", "SelectionService"
DECIDE_US, DECIDE_P99_US = 25.0, 150.0
STORED_MILLIONS = 0.4
BYTES_PER_BLOCK = 180.0
HASH_US = 1_300.0
NOT_MEASURED = "-"

app = typer.Typer(add_completion=False)
console = Console(width=170)


def _run(python: str, script: str, *arguments: object) -> bytes:
    """Return the last line that a script prints.

    Raises:
        Unsupported: It ended with an error.
    """
    environment = {**os.environ, "DYN_LOG": "error", "PYTHONPATH": str(HERE.parent.parent)}
    command = [python, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True)
    if done.returncode:
        raise Unsupported(f"{script}: {done.stderr.decode(errors='replace')[-400:]}")
    return done.stdout.splitlines()[-1]


def _measure(workers: int, blocks: int, rounds: int, seed: int, dynamo: str | None
             ) -> dict[str, Measured]:  # fmt: skip
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "workload")
        save(make_workload(workers, blocks, seed), path)
        found[OURS] = _decode(_run(sys.executable, "index_ours.py", path, rounds))
        if dynamo is not None:
            few = max(rounds // 10, 20)
            found[RADIX] = _decode(_run(dynamo, "index_dynamo.py", "radix", path, rounds))
            found[SELECTION] = _decode(_run(dynamo, "index_dynamo.py", "selection", path, few))
    return found


def _decode(line: bytes) -> Measured:
    return msgspec.json.decode(line, type=Measured)


def _text(times: Times | None) -> str:
    if times is None:
        return NOT_MEASURED
    return f"{times.p50:,.1f} / {times.p10:,.1f} / {times.p99:,.0f}"


def _show_lookups(workers: int, found: dict[str, Measured]) -> None:
    table = Table(title=f"{workers:,} workers: us, p50 / p10 / p99")
    table.add_column("prompt")
    for name in found:
        table.add_column(f"{name} decide", justify="right")
    table.add_column("FlexCache match", justify="right")
    table.add_column("RadixTree / FlexCache", justify="right")
    ours, radix = found[OURS], found.get(RADIX)
    for prompt, kinds in ours.lookups.items():
        ratio = NOT_MEASURED
        if radix is not None:
            ratio = f"{radix.lookups[prompt]['decide'].p50 / kinds['decide'].p50:.1f}x"
        decisions = [_text(each.lookups[prompt]["decide"]) for each in found.values()]
        table.add_row(prompt, *decisions, _text(kinds["match"]), ratio)
    hashing = [_text(each.hash_tokens) for each in found.values()]
    table.add_row("hash 131,072 tokens of a list", *hashing, "", "")
    console.print(table)


def _show_events(found: dict[int, dict[str, Measured]]) -> None:
    table = Table(title="events: million blocks per CPU second")
    for title in ("workers", "index", "stored", "stored, from bytes", "removed"):
        table.add_column(title, justify="right")
    for workers, measured in found.items():
        for name, each in measured.items():
            rates = [each.apply.get(kind) for kind in ("stored", "stored, from bytes", "removed")]
            cells = [NOT_MEASURED if rate is None else f"{rate:.2f}" for rate in rates]
            table.add_row(f"{workers:,}", name, *cells)
    console.print(table)


def _show_memory(found: dict[str, list[Memory]]) -> None:
    table = Table(title="memory, each block on one worker")
    for title in ("index", "blocks", "bytes/block", "own estimate", "million blocks/s",
                  "slowest batch of 512 blocks, ms"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, sizes in found.items():
        for each in sizes:
            estimate, slowest = each.estimated_bytes, each.slowest_batch_ms
            table.add_row(
                name,
                f"{each.num_blocks:,}",
                f"{each.num_bytes / each.num_blocks:.1f}",
                NOT_MEASURED if estimate is None else f"{estimate / each.num_blocks:.1f}",
                f"{each.num_blocks / 1e6 / each.cpu_s:.2f}",
                NOT_MEASURED if slowest is None else f"{slowest:.1f}",
            )
    console.print(table)


def _show_targets(found: dict[int, dict[str, Measured]], memory: dict[str, list[Memory]]) -> None:
    workers, measured = list(found.items())[-1]
    table = Table(title=f"targets, at {workers:,} workers")
    for title in ("what", "FlexCache", "target", "reached", "RadixTree", "SelectionService"):
        table.add_column(title, justify="right")
    prompt = next(name for name in measured[OURS].lookups if name.startswith("8,192"))
    decide = {name: each.lookups[prompt]["decide"] for name, each in measured.items()}

    def row(what: str, values: dict[str, float], target: float, is_least: bool = False) -> None:
        ours = values[OURS]
        is_reached = ours >= target if is_least else ours <= target
        peers = [f"{values[name]:,.2f}" if name in values else NOT_MEASURED
                 for name in (RADIX, SELECTION)]  # fmt: skip
        sign = ">=" if is_least else "<="
        table.add_row(
            what, f"{ours:,.2f}", f"{sign} {target:g}", "yes" if is_reached else "NO", *peers
        )

    row(f"{prompt}, decide, p50 us", {name: t.p50 for name, t in decide.items()}, DECIDE_US)
    row(f"{prompt}, decide, p99 us", {name: t.p99 for name, t in decide.items()}, DECIDE_P99_US)
    row(
        f"{prompt}, decide, p99 us of CPU",
        {name: t.cpu_p99 for name, t in decide.items()},
        DECIDE_P99_US,
    )
    row(
        "hash 131,072 tokens, p50 us",
        {name: each.hash_tokens.p50 for name, each in measured.items()},
        HASH_US,
    )
    stored = {name: each.apply["stored, from bytes"] for name, each in measured.items()}
    stored[OURS] = measured[OURS].apply["stored"]
    row("stored (ours: decoded), million blocks/s", stored, STORED_MILLIONS, is_least=True)
    sizes = {name: each[-1].num_bytes / each[-1].num_blocks for name, each in memory.items()}
    if sizes:
        largest = memory[OURS][-1].num_blocks
        row(f"bytes per block, {largest:,} blocks", sizes, BYTES_PER_BLOCK)
    console.print(table)


def _plain(found: dict[int, dict[str, Measured]], memory: dict[str, list[Memory]]) -> Any:
    return msgspec.to_builtins(
        {"by_workers": {str(workers): each for workers, each in found.items()}, "memory": memory}
    )


@app.command()
def main(
    workers: Annotated[list[int] | None, typer.Option(help="Default: 8, 64 and 1000.")] = None,
    blocks: Annotated[int, typer.Option(help="Blocks in the events, at least.")] = 300_000,
    rounds: Annotated[int, typer.Option(help="Calls of each look-up.")] = 1000,
    memory: Annotated[
        list[int] | None, typer.Option(help="Blocks to measure memory with; 0: not at all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    dynamo_python: Annotated[
        Path | None, typer.Option(help="Interpreter of an environment with ai-dynamo-runtime.")
    ] = None,
    venvs: Annotated[
        Path | None, typer.Option(help="Make that environment in this directory, if it is not.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
) -> None:
    """Measure look-ups, events and memory of the router's index, and of Dynamo's."""
    dynamo = None if dynamo_python is None else str(dynamo_python)
    if dynamo is None and venvs is not None:
        dynamo = peer_python(venvs, "dyn")
    found: dict[int, dict[str, Measured]] = {}
    sizes: dict[str, list[Memory]] = {}
    for number in workers or [8, 64, 1000]:
        found[number] = _measure(number, blocks, rounds, seed, dynamo)
        _show_lookups(number, found[number])
    for number in filter(None, memory or [1_000_000, 10_000_000]):
        line = _run(sys.executable, "index_ours.py", "memory", number)
        sizes.setdefault(OURS, []).append(msgspec.json.decode(line, type=Memory))
        if dynamo is not None:
            line = _run(dynamo, "index_dynamo.py", "memory", number)
            sizes.setdefault(RADIX, []).append(msgspec.json.decode(line, type=Memory))
    _show_events(found)
    _show_memory(sizes)
    _show_targets(found, sizes)
    if json_file is not None:
        json_file.write_text(json.dumps(_plain(found, sizes), indent=1))


if __name__ == "__main__":
    app()
