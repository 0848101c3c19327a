"""The story of the demos: a question about a text, asked cold, then answered from DRAM, by another
engine, and from NVMe after a restart of everything.

Exits non-zero unless each tier served what it should, and answers and KV bytes are those of the
cold run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paths import MODELS, ROOT, python_path

TEXT = Path(__file__).with_name("demo_text.txt")
QUESTION = "Who is the keeper of the lighthouse? Answer in one sentence."
BLOCK, NUM_WARM_UP, NUM_ANSWER = 32, 64, 48
MAX_PROMPT = 2000  # where the model has few words, a text has many tokens
PROBES = "rank-0.jsonl"
"""A JSON row for each block that an engine has stored or loaded: ``event``, ``key``, ``digest``."""


class Run(NamedTuple):
    """Seconds to the first token, the answer's tokens, how many of the prompt each tier had."""

    ttft_s: float
    answer: list[int]
    from_tier: dict[str, int]


class Prompt(NamedTuple):
    """Tokens of text and question, and a function that reads an answer's tokens."""

    tokens: list[int]
    read: Callable[[list[int]], str]


class Step(NamedTuple):
    """A run of the story: what the output says of it, and the tier that must have the prompt."""

    name: str
    tier: str | None
    run: Run


class Engine(Protocol):
    """An engine with FlexCache, in a process of its own."""

    def wait_ready(self) -> None:
        """Wait until it can be asked."""

    def run(self, tokens: list[int], num_generated: int) -> Run:
        """Ask with the engine's own cache empty; return once every tier has what is stored."""

    def stop(self) -> None:
        """End the process."""


Start = Callable[[Path, str, Path], Engine]
"""Starts an engine, without waiting for it: of a model's directory, the cache server's endpoint,
and a directory for `PROBES`."""


def show(name: str, start: Start) -> int:
    """Play and report; return the exit status."""
    from rich.console import Console
    from rich.markup import escape

    console, started = Console(width=max(120, Console().width)), time.monotonic()
    # Beside the repository's files, so on a disk: some machines have /tmp in memory.
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=ROOT) as directory:
        with waiting(console, "making the model (once)"):
            from make_models import make_real_model

            model, told = make_real_model(MODELS)
        console.print(f"[green]✓[/] model: {escape(told)}")
        prompt = make_prompt(model)
        steps = play(name, start, model, prompt, Path(directory), console)
        stored, loaded = read_probes(Path(directory) / PROBES)
    console.print(make_table(steps, prompt))
    whole = (len(prompt.tokens) - 1) // BLOCK  # blocks; the last token is always computed
    cold, *hits = (step.run for step in steps)
    checks = {
        "every tier served what it should": all(
            step.run.from_tier
            == {tier: whole * BLOCK * (tier == step.tier) for tier in step.run.from_tier}
            for step in steps
        ),
        "the answers are the same": all(hit.answer == cold.answer for hit in hits),
        f"KV bytes of all {len(loaded)} loaded blocks, every layer, are equal": (
            len(loaded) == whole * len(hits)
            and all(digest in stored[key] for key, digest in loaded)
        ),
    }
    for text, holds in checks.items():
        console.print(f"[green]✓[/] {text}" if holds else f"[red]✗ NOT: {text}[/]")
    console.print(f"{time.monotonic() - started:.0f} s in all")
    return 0 if all(checks.values()) else 1


def make_prompt(model: Path) -> Prompt:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = f"{TEXT.read_text()}\n{QUESTION}"
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": asked}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(asked, add_special_tokens=False)["input_ids"]

    def read(answer: list[int]) -> str:
        end = answer.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in answer else None
        return " ".join(tokenizer.decode(answer[:end]).split())

    return Prompt(tokens[-MAX_PROMPT:], read)


def play(
    name: str, start: Start, model: Path, prompt: Prompt, directory: Path, console: Any
) -> list[Step]:
    steps = []

    def ask(told: str, tier: str | None, engine: Engine) -> None:
        with waiting(console, told):
            run = engine.run(prompt.tokens, NUM_ANSWER)
        steps.append(Step(told, tier, run))
        console.print(f"[green]✓[/] {told}: first token after {run.ttft_s:.3f} s")
        console.print("  ", prompt.read(run.answer), style="italic", markup=False)

    def started(told: str, *seeds: int) -> Any:
        return running(start, model, directory, console, told, seeds)

    with started(f"two {name} engines and their cache server", 1, 2) as (one, other):
        console.print(f"  {TEXT.name}, {len(prompt.tokens):,} tokens: [bold]{QUESTION}[/]")
        ask("asked for the first time", None, one)
        ask("GPU cache emptied, asked again", "DRAM", one)
        ask("the other engine asked", "DRAM", other)
    with started("all stopped; an engine and a server started again", 3) as (again,):
        ask("asked after the restart", "NVMe", again)
    return steps


@contextmanager
def running(
    start: Start, model: Path, directory: Path, console: Any, told: str, seeds: tuple[int, ...]
) -> Iterator[list[Engine]]:
    """Run a cache server and one engine per seed of a first, short prompt."""
    environment = {
        **os.environ, "PYTHONPATH": python_path(ROOT),
        "FLEXCACHE_CPU_CACHE_GB": "1", "FLEXCACHE_SSD_CACHE_GB": "2",
        "FLEXCACHE_SSD_CACHE_DIRS": str(directory / "ssd"),
    }  # fmt: skip
    with ExitStack() as stack:
        with waiting(console, told):
            sockets = stack.enter_context(tempfile.TemporaryDirectory())  # of a short path
            endpoint = f"ipc://{sockets}/cache.sock"
            log = stack.enter_context((directory / "server.log").open("ab"))
            command = [sys.executable, "-m", "flexcache.cli", "server", "--endpoint", endpoint]
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.terminate)
            engines = []
            for _ in seeds:
                engines.append(start(model, endpoint, directory))
                stack.callback(engines[-1].stop)
            for engine, seed in zip(engines, seeds, strict=True):
                engine.wait_ready()
                draw = random.Random(seed)  # the first request of an engine is never typical
                engine.run([draw.randrange(3, 500) for _ in range(NUM_WARM_UP)], NUM_ANSWER)
        console.print(f"[green]✓[/] {told}")
        yield engines


@contextmanager
def waiting(console: Any, told: str) -> Iterator[None]:
    """Show that something goes on, and for how long."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(told), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task("", total=None)
        yield


def read_tiers(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that each tier served between two `KVManager.stats`."""
    moved = {
        kind: (after["ops"][kind]["blocks"] - before["ops"][kind]["blocks"]) * BLOCK
        for kind in ("H2D", "DISK2H")
    }
    return {"DRAM": moved["H2D"] - moved["DISK2H"], "NVMe": moved["DISK2H"]}


def read_probes(path: Path) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """Return digests of stored blocks by key, and keys and digests of loaded ones."""
    stored, loaded = defaultdict(set), []
    for row in map(json.loads, path.read_text().splitlines()):
        if row["event"] == "stored":
            stored[row["key"]].add(row["digest"])
        else:
            loaded.append((row["key"], row["digest"]))
    return stored, loaded


def make_table(steps: list[Step], prompt: Prompt) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{QUESTION} ({TEXT.name}, {len(prompt.tokens):,} tokens)", show_lines=True)
    for column in ("", "KV from", "first token", "sooner"):
        table.add_column(column, justify="left" if column in ("", "KV from") else "right")
    table.add_column("answer", ratio=1)
    for step in steps:
        ttft_s, cold_s = step.run.ttft_s, steps[0].run.ttft_s
        table.add_row(
            step.name,
            step.tier or "computed",
            f"{ttft_s:.3f} s",
            f"{cold_s / ttft_s:.0f} x" if step.tier else "",
            Text(prompt.read(step.run.answer)),
        )
    return table
