"""The story of the demos: one prompt cold, from DRAM, from NVMe; another that shares half of it.

Exits non-zero unless tokens and KV bytes are equal to the cold run's.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paths import ROOT

if TYPE_CHECKING:  # torch must not be imported before the engines' settings are made
    from flexcache.manager import KVManager

SHARED_TOKENS, OTHER_TOKENS, BLOCK = 2048, 512, 32
CACHE_GB = {"DRAM": 1.0, "NVMe": 2.0}


@dataclass
class Run:
    name: str
    ttft_s: float
    tokens: list[int]
    num_prompt: int
    from_tier: dict[str, int]
    moved_bytes: int
    moved_s: float


class Compared(NamedTuple):
    """Blocks that were loaded, and those of them that differ from what was computed."""

    num_loaded: int
    num_different: int


class Demo(Protocol):
    """A running engine with FlexCache in this process, so that its tiers can be cleared one by
    one."""

    manager: KVManager

    def run(self, name: str, tokens: list[int]) -> Run:
        """Generate a few tokens."""

    def settle(self) -> None:
        """Let puts reach every tier."""

    def drop_gpu(self, drop_all: bool = False) -> None:
        """Empty the engine's own cache, and with ``drop_all`` FlexCache's."""

    def close(self) -> Compared:
        """End the engine; return what became of the bytes."""


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(num_tokens)]


def show(engine: str, start: Callable[[Path], Demo]) -> int:
    """Play and report; return the exit status."""
    from rich.console import Console

    console = Console(width=max(130, Console().width))
    say = console.print
    work_dir = Path(tempfile.mkdtemp(prefix="flexcache-demo-", dir=ROOT))
    try:
        with console.status("making the model (136 M parameters, random)"):
            from make_models import make_model

            make_model(ROOT / ".models", "mid")
        say("[green]✓[/] model: 136 M parameters, 12 layers, random weights")
        with console.status(f"starting {engine} with FlexCache"):
            demo = start(work_dir)
        say(f"[green]✓[/] {engine} is up, with FlexCache on DRAM and NVMe")
        runs = play(demo, say, console)
        demo.settle()
        stats = demo.manager.stats()
        compared = demo.close()
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return report(runs, compared, stats, say)


def play(demo: Demo, say: Any, console: Any) -> dict[str, Run]:
    shared = make_prompt(SHARED_TOKENS + BLOCK // 2, seed=1)  # the last token is always computed
    other = shared[: SHARED_TOKENS // 2] + make_prompt(OTHER_TOKENS, seed=2)
    runs: dict[str, Run] = {}

    def step(key: str, name: str, tokens: list[int]) -> None:
        with console.status(name):
            runs[key] = demo.run(name, tokens)
            demo.settle()
        say(f"[green]✓[/] {name}: first token after {runs[key].ttft_s:.3f} s")

    step("other cold", "the other prompt, cold", other)
    demo.drop_gpu(drop_all=True)
    step("cold", "a long prompt, cold", shared)
    demo.drop_gpu()
    step("dram", "GPU cache dropped, the same from DRAM", shared)
    demo.drop_gpu()
    demo.manager.clear("CPU")
    step("ssd", "DRAM cleared, the same from NVMe", shared)
    demo.drop_gpu()
    step("other", "the other prompt, half of it shared", other)
    return runs


def report(runs: dict[str, Run], compared: Compared, stats: Mapping[str, Any], say: Any) -> int:
    from rich.table import Table

    table = Table(title="Where the prompt's KV came from")
    for column in ("run", "prompt", "from DRAM", "from NVMe", "TTFT", "of cold", "moved", "GB/s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    colds = {"dram": "cold", "ssd": "cold", "other": "other cold"}
    for key, run in runs.items():
        ratio = run.ttft_s / runs[colds[key]].ttft_s if key in colds else 1.0
        speed = f"{run.moved_bytes / run.moved_s / 1e9:.2f}" if run.moved_bytes else ""
        table.add_row(
            run.name,
            f"{run.num_prompt} tokens",
            str(run.from_tier["DRAM"] or ""),
            str(run.from_tier["NVMe"] or ""),
            f"{run.ttft_s:.3f} s",
            f"{ratio:.1%}",
            f"{run.moved_bytes / 1e6:.1f} MB" if run.moved_bytes else "",
            speed,
        )
    say(table)
    say("GB/s: of the slower leg, host memory to engine or NVMe to host memory, queueing included")
    written = stats["ops"]["H2DISK"]
    say(f"written to NVMe: {written['bytes'] / 1e6:.1f} MB in {written['ops']} ops")
    tokens_equal = all(runs[key].tokens == runs[cold].tokens for key, cold in colds.items())
    expected = {"dram": ("DRAM", SHARED_TOKENS), "ssd": ("NVMe", SHARED_TOKENS)}
    served = all(runs[key].from_tier[tier] == count for key, (tier, count) in expected.items())
    served &= runs["other"].from_tier["DRAM"] == SHARED_TOKENS // 2
    bytes_equal = compared.num_loaded > 0 and not compared.num_different
    checks = {
        "every tier served what it should": served,
        "tokens are equal to the cold run's": tokens_equal,
        f"KV bytes of all {compared.num_loaded} loaded blocks, every layer, are equal": bytes_equal,
    }
    for text, holds in checks.items():
        say(f"[green]✓[/] {text}" if holds else f"[red]✗ NOT: {text}[/]")
    return 0 if all(checks.values()) else 1
