"""The control plane through a server, beside LMCache's server in the same run.

    python scripts/bench_server.py                              # FlexCache alone
    python scripts/bench_server.py --lmcache VENV/bin/python    # and LMCache 0.5.6
    python scripts/bench_server.py --clients 1 --clients 16 --clients 64 --json FILE

VENV is made by ``python -m venv VENV`` and
``VENV/bin/pip install --no-deps -r scripts/peers/requirements-lmcache.txt``.

FlexCache's side is that of `flexcache bench server`: `flexcache.bench.server` says what a client
and a cycle are. The clients of LMCache have the same prompts, and each is a process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.bench.server import BYTES_SENT, CYCLES_PER_S, MAIN, measure_server

SECONDS = 3.0
PEER = Path(__file__).parent / "peers" / "lmcache_server.py"
TARGETS_US = {"match with block_keys, all cached": 250, "match from tokens, all cached": 500}

Row = dict[str, Any]


def names_for(count: int) -> Sequence[str]:
    """All kinds of requests with few clients, the main ones with many."""
    return list(BYTES_SENT) if count <= 4 else MAIN


def measure_ours(counts: list[int]) -> Iterator[Row]:
    for found in measure_server(counts, names_for, SECONDS):
        times = np.sort(found.latencies_s) * 1e6
        yield {
            "system": "FlexCache", "what": found.name, "clients": found.num_clients,
            "median_us": float(np.median(times)), "p99_us": float(np.quantile(times, 0.99)),
            "per_s": found.cycles_per_s,
        }  # fmt: skip


def measure_lmcache(python: Path) -> tuple[list[Row], str]:
    run = subprocess.run([str(python), str(PEER)], stdout=subprocess.PIPE, text=True)
    report = json.loads(run.stdout.splitlines()[-1])
    return [{"system": report["peer"], **row} for row in report["rows"]], report["notes"]


def show(rows: list[Row], console: Console) -> None:
    table = Table("system", "what", "clients", "median", "p99", "per second", "median / target")
    for row in rows:
        target = TARGETS_US.get(row["what"]) if row["system"] == "FlexCache" else None
        ratio = "" if target is None or row["clients"] != 1 else f"{row['median_us'] / target:.2f}"
        per_s = "" if row["per_s"] is None else f"{row['per_s']:,.0f}"
        table.add_row(
            row["system"], row["what"], str(row["clients"]), f"{row['median_us']:,.0f} us",
            f"{row['p99_us']:,.0f} us", per_s, ratio,
        )  # fmt: skip
    console.print(table)


def compare(rows: list[Row], console: Console) -> None:
    """Cycles per second of one against the other, with as many clients."""
    for clients in sorted({row["clients"] for row in rows}):
        ours = _cycles(rows, "FlexCache", "match from tokens, all cached", clients)
        theirs = _cycles(rows, "lmcache", "request", clients)
        if ours is not None:
            against = "" if theirs is None else f", {ours / theirs:.0f}x of LMCache's {theirs:.1f}"
            console.print(
                f"{clients} clients: {ours:,.0f} cycles/s from raw tokens, "
                f"{ours / CYCLES_PER_S:.2f}x of the target{against}"
            )


def _cycles(rows: list[Row], system: str, what: str, clients: int) -> float | None:
    rates = [
        row["per_s"]
        for row in rows
        if row["system"].startswith(system) and row["what"].startswith(what)
        and row["clients"] == clients and row["per_s"]
    ]  # fmt: skip
    return max(rates, default=None)


def main(
    clients: Annotated[list[int] | None, typer.Option(help="Clients at once.")] = None,
    lmcache: Annotated[Path | None, typer.Option(help="Python of a venv with LMCache.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the rows here.")] = None,
) -> None:
    """Measure, print a table, and say what did not run."""
    console, rows = Console(width=140), list[Row]()
    counts = clients or [1, 2, 4]
    with Progress(console=Console(stderr=True)) as progress:
        total = sum(len(names_for(count)) for count in counts) + (lmcache is not None)
        task = progress.add_task("measuring", total=total)
        for row in measure_ours(counts):
            rows.append(row)
            progress.advance(task)
        notes = "LMCache was not measured: name a venv's Python by --lmcache"
        if lmcache is not None:
            theirs, notes = measure_lmcache(lmcache)
            rows += theirs
            progress.advance(task)
    show(rows, console)
    compare(rows, console)
    console.print(notes)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
