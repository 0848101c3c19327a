"""TTFT of requests in line whose blocks are on SSD: loaded while they wait, or in their turn.

    python benchmarks/bench_early_ttft.py [--tokens 2000] [--rounds 5] [--dir DIR]

One vLLM engine (136 M model, CPU) with room for one request gets a line of prompts at once, all of
them on SSD alone. A request's TTFT counts from its arrival, its *turn* from the end of the
one before. The two ways take turns, round by round. Ends with an error if their answers differ.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import search_path  # noqa: F401
import typer
from engines import ENGINE_ENV, Engine, engine_arguments
from make_models import make_model
from paths import MODELS
from rich.console import Console
from rich.table import Table

NUM_REQUESTS = 4
NUM_GENERATED = 8
KV_BYTES_PER_TOKEN = 12_288

console = Console(width=100)


def serve_line(
    engine: Engine, prompts: list[list[int]]
) -> tuple[list[float], list[float], list[list[int]]]:
    """Serve prompts that arrive together, one at a time.

    Returns:
        Seconds to the first token since the arrival, and since its turn; the answers.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NUM_GENERATED, ignore_eos=True)
    llm = engine.llm.llm_engine
    arrived_s = turn_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    since_arrival, since_turn, answers = [], [], []
    while engine.scheduler.has_requests():
        for output in llm.step():
            now = time.perf_counter()
            if len(output.outputs[0].token_ids) == 1:
                since_arrival.append(now - arrived_s)
                since_turn.append(now - turn_s)
            if output.finished:
                answers.append(list(output.outputs[0].token_ids))
                turn_s = now
    return since_arrival, since_turn, answers


def main(
    tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Of each way, after one to warm up.")] = 5,
    directory: Annotated[Path, typer.Option("--dir", help="For the SSD tier.")] = Path("."),
) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as work_dir:
        os.environ.update(
            ENGINE_ENV, VLLM_ENABLE_V1_MULTIPROCESSING="0", KV_PROBE_DIR=work_dir,
            OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))),
        )  # fmt: skip
        measure(Path(work_dir), tokens, rounds)


def measure(work_dir: Path, tokens: int, rounds: int) -> None:
    from vllm import LLM

    make_model(MODELS, "mid")
    tiers = {"cpu_cache_gb": 1.0, "ssd_cache_gb": 1.0, "ssd_cache_dirs": [str(work_dir / "ssd")]}
    (work_dir / "ssd").mkdir()
    room = int(1.5 * tokens)  # the next in line has none
    memory = room * KV_BYTES_PER_TOKEN
    limits = {"max_model_len": tokens + NUM_GENERATED, "kv_cache_memory_bytes": memory}
    connector = {"kv_connector": "FlexCacheConnectorV1",
                 "kv_connector_module_path": "flexcache.integration.vllm"}  # fmt: skip
    settings = {**tiers, "skip_slow_loads": False}
    arguments = engine_arguments("mid", settings, connector=connector, **limits)
    engine = Engine(LLM(**arguments), work_dir)
    gets = engine.connector._scheduler.gets
    source = random.Random(0)
    prompts = [[source.randrange(3, 500) for _ in range(tokens)] for _ in range(NUM_REQUESTS)]
    serve_line(engine, prompts)
    expected: list[list[int]] = []  # computing in other pieces may round differently
    ways = {"when it is its turn": False, "while it waits": True}
    ttfts: dict[str, list[float]] = {way: [] for way in ways}
    turns: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, is_on in ways.items():
            engine.settle()
            engine.forget_gpu()
            engine.manager.clear("CPU")
            gets.early_loads.is_on = gets._may_load_early = is_on
            since_arrival, since_turn, answers = serve_line(engine, prompts)
            expected = expected or answers
            if answers != expected:
                raise SystemExit(f"loaded {way}: an answer differs")
            if number:  # the first in line does not wait
                ttfts[way] += since_arrival[1:]
                turns[way] += since_turn[1:]
    counts = engine.manager.stats()["early_loads"]
    show(ttfts, turns, f"{tokens} tokens; {counts}")
    engine.llm.llm_engine.engine_core.shutdown()


def show(ttfts: dict[str, list[float]], turns: dict[str, list[float]], title: str) -> None:
    table = Table(title=title)
    for column in ("loaded", "TTFT, median", "turn, median", "turn, p90"):
        table.add_column(column, justify="right")
    for way, seconds in ttfts.items():
        p90 = statistics.quantiles(turns[way], n=10)[-1]
        cells = (statistics.median(seconds), statistics.median(turns[way]), p90)
        table.add_row(way, *(f"{cell * 1e3:.1f} ms" for cell in cells))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
