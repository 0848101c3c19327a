"""TTFT of the 136 M model in SGLang: cold, from its tree, from DRAM, from SSD; FlexCache behind the
tree beside HiCache with its own file backend.

    .venv-sglang/bin/python benchmarks/bench_sglang_ttft.py [--tokens 1000] [--rounds 5]
        [--model smollm2] [--json FILE]

The engines run side by side, each in its own process, and take turns: in each round both get the
same new prompt, first cold, then from the tree, then with GPU memory dropped, then with DRAM
dropped too. HiCache's files are written back and dropped from the page cache before they are
read, since FlexCache reads past that cache. The benchmark ends if an expected hit is a miss, or if
one changes the answer.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Protocol

import search_path  # noqa: F401
import typer
from reporting import Say, run_and_show
from sglang_engine import ENVIRONMENT, STAND_INS, TinyEngine, forget_gpu, linker_options, settle

from flexcache.bench.suite import Case, Result

OURS, PEER = "FlexCache", "HiCache, files"
RUNS = ("cold", "tree", "DRAM", "SSD")
PAGE = 32
DRAM_GB, SSD_GB = 1.0, 4.0
LENGTHS = (1000, 3000)
ROUNDS = 5
MODEL = "mid"
_ENGINE: dict[str, Any] = {
    "dtype": "float32",  # in bf16 a hit may round to other tokens, with any cache
    "page_size": PAGE,
    "context_length": 4096,
    "max_total_tokens": 8192,
    "log_level": "error",
}


class System(Protocol):
    """An engine whose tiers can be dropped one by one."""

    engine: TinyEngine

    def settle(self) -> None:
        """Step until all is stored, in every tier."""

    def drop_gpu(self) -> None:
        """Drop what the GPU has."""

    def drop_dram(self) -> None:
        """Drop that, and what DRAM has."""


class FlexCacheSystem:
    def __init__(self, model: str, directory: Path) -> None:
        tiers: dict[str, Any] = {"cpu_cache_gb": DRAM_GB, "ssd_cache_gb": SSD_GB}
        self.engine = TinyEngine(
            model, **_ENGINE, **linker_options(**tiers, ssd_cache_dirs=[str(directory)])
        )

    def settle(self) -> None:
        settle(self.engine)

    def drop_gpu(self) -> None:
        forget_gpu(self.engine)

    def drop_dram(self) -> None:
        forget_gpu(self.engine, "CPU")


class HiCacheSystem:
    def __init__(self, model: str, directory: Path) -> None:
        self._directory = directory
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(directory)
        self.engine = TinyEngine(
            model,
            **_ENGINE,
            enable_hierarchical_cache=True,
            hicache_size=int(DRAM_GB),
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
        )
        self.engine.tree.cache_controller.storage_host_pool.pin_memory = False  # there is no CUDA

    def settle(self) -> None:
        tree = self.engine.tree
        queue = tree.cache_controller.backup_queue
        self.engine.step_until(
            lambda: not (tree.ongoing_write_through or tree.ongoing_backup or queue.qsize())
        )

    def drop_gpu(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.settle()
        self.engine.tree.evict(EvictParams(num_tokens=_ENGINE["max_total_tokens"]))

    def drop_dram(self) -> None:
        self.settle()
        self.engine.flush()
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


SYSTEMS: dict[str, Callable[[str, Path], System]] = {OURS: FlexCacheSystem, PEER: HiCacheSystem}


def ask(system: System, tokens: list[int]) -> tuple[float, int, list[int]]:
    """Serve a prompt; return milliseconds to the first token, cached tokens, and the answer."""
    start_s = time.perf_counter()
    request = system.engine.add(tokens, 2)
    system.engine.step_until(lambda: bool(request.output_ids))
    took_s = time.perf_counter() - start_s
    system.engine.step_until(request.finished)
    system.settle()
    return took_s * 1e3, request.cached_tokens, list(request.output_ids)


def serve_prompt(system: System, tokens: list[int]) -> dict[str, float]:
    """Return the milliseconds of each run.

    Raises:
        AssertionError: A hit was none, a new prompt was known, or a hit changed the answer.
    """
    took: dict[str, float] = {}
    first_answer: list[int] = []
    for run in RUNS:
        if run == "DRAM":
            system.drop_gpu()
        if run == "SSD":
            system.drop_dram()
        took[run], num_cached, answer = ask(system, tokens)
        known = 0 if run == "cold" else (len(tokens) - 1) // PAGE * PAGE
        assert num_cached == known, f"{run}: {num_cached} of {len(tokens)} tokens known"
        first_answer = first_answer or answer
        assert answer == first_answer, f"{run}: another answer"
    system.drop_dram()
    return took


def drive(pipe: Connection, name: str, model: str, directory: Path) -> None:
    """Serve prompts that come through a pipe, until it is closed."""
    sys.path.insert(0, str(STAND_INS))
    system = SYSTEMS[name](model, directory)
    pipe.send({})
    while True:
        try:
            tokens = pipe.recv()
        except EOFError:
            os._exit(0)  # SGLang's threads do not end by themselves
        try:
            pipe.send(serve_prompt(system, tokens))
        except (AssertionError, TimeoutError) as error:
            pipe.send(f"{name}, {error}")


@contextmanager
def running(name: str, model: str, directory: Path) -> Iterator[Connection]:
    directory.mkdir()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=drive, args=(theirs, name, model, directory))
    process.start()
    theirs.close()
    try:
        answer(ours)
        yield ours
    finally:
        ours.close()
        process.join(30)
        process.kill()


def answer(pipe: Connection) -> Any:
    """Return an engine's answer. Raises `RuntimeError` if it failed."""
    try:
        received = pipe.recv()
    except EOFError:
        raise RuntimeError("an engine has ended") from None
    if isinstance(received, str):
        raise RuntimeError(received)
    return received


def measure(
    engines: dict[str, Connection], length: int, rounds: int, say: Say
) -> dict[str, dict[str, list[float]]]:
    """All systems in turn, in an order that alternates; the first round warms everything up."""
    source = random.Random(length)
    seen: dict[str, dict[str, list[float]]] = {name: {run: [] for run in RUNS} for name in engines}
    for number in range(rounds + 1):
        tokens = [source.randrange(3, 500) for _ in range(length)]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            say(f"{length} tokens, round {number} of {rounds}: {name}")
            engines[name].send(tokens)
            for run, took_ms in answer(engines[name]).items():
                if number:
                    seen[name][run].append(took_ms)
    return seen


def figures(seen: dict[str, dict[str, list[float]]], length: int) -> Iterator[Result]:
    for run in RUNS:
        for name, took in seen.items():
            share = statistics.median(took[run]) / statistics.median(took["cold"])
            is_ours = name == OURS
            yield Result(
                f"{run}, {name}, {length} tokens", "ms", took[run],
                bound=statistics.median(seen[PEER][run]) if is_ours else None,
                bound_name=PEER if is_ours else "",
                note="" if run == "cold" else f"{share:.1%} of its cold run",
            )  # fmt: skip


def run(
    lengths: Sequence[int], rounds: int, model: str, directory: Path, say: Say
) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=directory) as work_dir, ExitStack() as stack:
        engines = {}
        for name, part in ((OURS, "flexcache"), (PEER, "hicache")):
            say(f"starting {name}")
            engines[name] = stack.enter_context(running(name, model, Path(work_dir) / part))
        for length in lengths:
            yield from figures(measure(engines, length, rounds, say), length)


def main(
    tokens: Annotated[list[int], typer.Option(help="Lengths of prompts.")] = list(LENGTHS),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="After one to warm up.")] = ROUNDS,
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tiers.")] = Path("."),
    model: Annotated[str, typer.Option(help="mid, smollm2 or another of `make_models`.")] = MODEL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep every sample.")] = None,
) -> None:
    paths = os.pathsep.join([str(STAND_INS), *filter(None, sys.path)])
    num_threads = str(len(os.sched_getaffinity(0)))
    os.environ.update({**ENVIRONMENT, "OMP_NUM_THREADS": num_threads, "PYTHONPATH": paths})

    def sections(say: Say) -> dict[str, list[Case]]:
        name = "136 M model" if model == MODEL else f"{model} model"
        return {"SGLang": [Case(name, partial(run, tokens, rounds, model, directory, say))]}

    raise typer.Exit(run_and_show(sections, directory, json_file))


if __name__ == "__main__":
    typer.run(main)
