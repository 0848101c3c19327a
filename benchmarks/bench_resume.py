"""Resumption of prompts by models with windows or states: how much is found, and its cost.

    python benchmarks/bench_resume.py [--model gemma3 --model qwen3next] [--json FILE]

The second turn of a chat (a prompt of 1,200 tokens, an answer of 400, 50 more), and prompts of
which the first 600, 1,400 and 2,800 tokens are those of one of 3,000 tokens. vLLM's own GPU cache,
its own offloading and FlexCache, each in an engine of its own, with vLLM's
`prefix_cache_retention_interval` at its default (states and windows at the end of prompts and where
vLLM saw prompts part) and None (all); FlexCache also with tails at every position
(`tail_interval_tokens`). Except for vLLM alone, GPU memory is emptied before each of these prompts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import search_path  # noqa: F401
import typer
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table

MODELS = ("gemma3", "gptoss", "llama4", "qwen3next", "nemotronh")
NUM_PROMPT, NUM_ANSWER, NUM_NEW = 1200, 400, 50
NUM_LONG, SHARED = 3000, (600, 1400, 2800)


@dataclass(frozen=True)
class Arm:
    """What caches, and how.

    Attributes:
        keeps_all: Whether vLLM keeps all windows and states.
        more: Further settings of FlexCache.
    """

    system: str
    keeps_all: bool
    name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


ARMS = (
    Arm("alone", False),
    Arm("alone", True),
    Arm("offloading", False),
    Arm("offloading", True),
    Arm("FlexCache", False),
    Arm("FlexCache", True),
    Arm("FlexCache", False, "FlexCache, tails everywhere", {"tail_interval_tokens": 1}),
)


@dataclass(frozen=True)
class Row:
    """Cached tokens.

    Attributes:
        retention: vLLM's.
        turn: Of the second turn.
        shared: Of the prompts with shared prefixes.
        stored_bytes: Copied from the GPU for the first turn.
    """

    model: str
    system: str
    retention: str
    turn: int
    shared: tuple[int, ...]
    stored_bytes: float | None


def engine_of(model: str, arm: Arm, directory: Path) -> DrivenEngine:
    engine: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "enable_prefix_caching": True}
    engine |= {"dtype": "bfloat16", "max_model_len": 4096, "seed": 0}
    if arm.keeps_all:
        engine["prefix_cache_retention_interval"] = None
    settings = Settings(
        arm.system, model, dram_gb=0.5, more=arm.more, engine=engine, num_threads=2,
        has_groups=True,
    )  # fmt: skip
    return DrivenEngine(settings, directory / "log", sys.executable)


def stored_bytes(engine: DrivenEngine, system: str) -> float | None:
    """Return the bytes copied from the GPU so far."""
    if system == "alone":
        return None
    engine.settle()
    if system == "offloading":
        return engine.metric("vllm:kv_offload_store_bytes")
    return float(engine.stats()["ops"]["D2H"]["bytes"])


def measure(model: str, arm: Arm, directory: Path) -> Row:
    with running(engine_of(model, arm, directory)) as engine:

        def ask(tokens: Sequence[int], num_generated: int = 8) -> dict[str, Any]:
            if arm.system != "alone":
                engine.forget("GPU")
            return engine.ask(tokens, num_generated)

        prompt, long = make_prompt(NUM_PROMPT, 1), make_prompt(NUM_LONG, 3)
        answer = ask(prompt, NUM_ANSWER)["tokens"]
        stored = stored_bytes(engine, arm.system)
        turn = ask([*prompt, *answer, *make_prompt(NUM_NEW, 2)])["cached"]
        ask(long)
        shared = tuple(
            ask([*long[:count], *make_prompt(NUM_NEW, 4 + number)])["cached"]
            for number, count in enumerate(SHARED)
        )
    retention = "None" if arm.keeps_all else "default"
    return Row(model, arm.name or arm.system, retention, turn, shared, stored)


def show(rows: Sequence[Row]) -> None:
    table = Table(title="cached tokens")
    for column in ("model", "system", "retention", "turn 2 of 1,650", "shared 600/1400/2800",
                   "stored KiB per token found"):  # fmt: skip
        table.add_column(column)
    for row in rows:
        cost = "" if not row.stored_bytes else f"{row.stored_bytes / 1024 / max(1, row.turn):.2f}"
        shared = " / ".join(map(str, row.shared))
        table.add_row(row.model, row.system, row.retention, str(row.turn), shared, cost)
    Console(width=120).print(table)


def main(
    model: Annotated[list[str] | None, typer.Option(help="A model of `make_models`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows.")] = None,
) -> None:
    """Compare what is found again."""
    cases = [(name, arm) for name in model or MODELS for arm in ARMS]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        console = Console(stderr=True)
        for name, arm in track(cases, "engines", console=console):
            rows.append(measure(name, arm, Path(directory)))
            console.print(rows[-1])
    show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
