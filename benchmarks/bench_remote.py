"""Mooncake and S3: FlexCache's reads and writes beside the store's own calls, in one run.

    python benchmarks/bench_remote.py [--rounds 9] [--store mooncake --store s3 --store file]

Starts each store on loopback and measures it as `flexcache bench remote` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import search_path  # noqa: F401
import typer
from rich.console import Console
from rich.table import Table
from stores import mooncake_master, mooncake_segment, s3_server

from flexcache.bench.remote import ROUND_BYTES, measure_store

BLOCK_SIZES = (2 << 20, 400 << 10)


@contextmanager
def mooncake() -> Iterator[str]:
    """The blocks lie in another process, so they go through TCP on loopback."""
    with mooncake_master(segment_gb=1.0) as master, mooncake_segment(master.url):
        yield master.url.partition("?")[0]


@contextmanager
def s3() -> Iterator[str]:
    with s3_server() as server:
        yield server.url


@contextmanager
def file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield f"file://{directory}"


STORES = {"mooncake": mooncake, "s3": s3, "file": file}


def main(
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = 9,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file.")] = list(STORES),  # noqa: B006
) -> None:
    table = Table(title=f"GB/s, medians of {rounds} rounds of {ROUND_BYTES >> 20} MiB")
    for heading in ("what", "FlexCache", "own calls", "ratio"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name in store:
        with STORES[name]() as url:
            for size in BLOCK_SIZES:
                for result in measure_store(url, size, rounds):
                    figures = (result.median, result.bound, result.ratio)
                    table.add_row(result.name, *(f"{figure:.2f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
