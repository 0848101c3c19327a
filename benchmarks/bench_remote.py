"""Mooncake and S3: FlexCache's reads and writes beside the store's own calls, in one run.

    python benchmarks/bench_remote.py [--rounds 9] [--store mooncake --store s3 --store file]
        [--delay-ms 10] [--loss 0.001] [--json FILE]

Starts each store on loopback and measures it as `flexcache bench remote` does. With a delay or
loss, the store is behind a proxy that adds them: all of S3, but of Mooncake only its master.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from reporting import Say, run_and_show
from slow_link import behind_link
from stores import mooncake_master, mooncake_segment, s3_server

from flexcache.bench.remote import measure_store
from flexcache.bench.suite import Case, Result

BLOCK_SIZES = (2 << 20, 400 << 10)


@contextmanager
def mooncake() -> Iterator[str]:
    """The blocks lie in another process, so they go through TCP on loopback."""
    with mooncake_master(segment_gb=4.0) as master, mooncake_segment(master.url):
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


def measure(store: str, rounds: int, delay_ms: float, loss: float) -> Iterator[Result]:
    with ExitStack() as stack:
        url = stack.enter_context(STORES[store]())
        if delay_ms or loss:
            link = behind_link(url, delay_s=delay_ms / 1e3, loss=loss)
            _, url = stack.enter_context(link)
        for size in BLOCK_SIZES:
            yield from measure_store(url, size, rounds)


def main(
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = 9,
    store: Annotated[list[str], typer.Option(help="One of mooncake, s3, file.")] = list(STORES),  # noqa: B006
    delay_ms: Annotated[float, typer.Option(help="One-way delay of the link.")] = 0.0,
    loss: Annotated[float, typer.Option(help="Share of chunks of 64 KiB lost once.")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    def sections(_: Say) -> dict[str, list[Case]]:
        return {
            "remote": [Case(name, partial(measure, name, rounds, delay_ms, loss)) for name in store]
        }

    raise typer.Exit(run_and_show(sections, Path(tempfile.gettempdir()), json_file))


if __name__ == "__main__":
    typer.run(main)
