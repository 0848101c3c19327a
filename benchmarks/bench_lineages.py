"""Memory of what is remembered of lineages: by the eviction policy, and for session hints.

    python benchmarks/bench_lineages.py [--lineages 1000000]

A lineage is a line of prompts each of which continues the one before: here one or two turns of
1,024 new tokens each, with a session id of its own. Each prompt is looked up and stored, without a
tier. All that is remembered is bounded, so the second half of the lineages must not take more than
the first; exits with 1 if it does. To save time, returns are learned a tenth as often as by a
server, which changes nothing that is kept.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from bench_growth import private_mb
from bench_write_policies import ROOT, study
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache import density as eviction
from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.density import DensityPolicy
from flexcache.cache.plan import Plan
from flexcache.cache.prompt_sessions import PromptSessions
from flexcache.cache.tier import Tier
from flexcache.cache.tiers import Tiers
from flexcache.ids import BlockKey, TaskKind, TierName

TOKENS_PER_BLOCK = 512
NEW_BLOCKS = 2
TURNS = (1, 1, 1, 2)
"""How many turns lineages have, each the next of these."""
OPEN_LINEAGES = 1_000
"""Lineages that begin before one of them goes on."""
VISITS_PER_FIT = 10 * eviction.VISITS_PER_FIT
ALLOWED = 1.1
"""How many times the memory of the first half of the lineages all of them may take."""

console = Console(width=120)


class Lineages:
    """What a cache remembers of the lineages that pass through it."""

    def __init__(self, capacity: int) -> None:
        self.forecaster = DensityPolicy(TOKENS_PER_BLOCK)
        tier = Tier(TierName.CPU, capacity, self.forecaster.for_tier(capacity))
        self.sessions = PromptSessions(Tiers([tier], self.forecaster))

    def serve(self, number: int, turn: int, now: float) -> None:
        """Look up and store a turn of a lineage."""
        stop, start = turn * NEW_BLOCKS, (turn - 1) * NEW_BLOCKS
        keys = [BlockKey(b"%08d-%06d" % (number, at)) for at in range(stop)]
        prompt = EngineBlockKeys(ROOT, keys, stop)
        self.forecaster.look_up(prompt, now)
        self.forecaster.store(prompt, stop)
        self.sessions.used(str(number), prompt, Plan(TaskKind.GET, ROOT, 0, start))
        self.sessions.used(str(number), prompt, Plan(TaskKind.PUT, ROOT, start, stop))
        study(self.forecaster)

    def check(self) -> None:
        self.forecaster.check()
        self.sessions.check()


def turns(num_lineages: int) -> Iterator[tuple[int, int]]:
    """Yield lineages, from 1 on, and the turn that each takes."""
    waiting: deque[tuple[int, int]] = deque()
    for number in range(1, num_lineages + 1):
        yield number, 1
        waiting.extend((number, turn) for turn in range(2, TURNS[number % len(TURNS)] + 1))
        while waiting and waiting[0][0] <= number - OPEN_LINEAGES:
            yield waiting.popleft()


def main(
    lineages: Annotated[int, typer.Option(min=16)] = 1_000_000,
    capacity: Annotated[int, typer.Option(help="Blocks of the tier")] = 16_384,
) -> None:
    eviction.VISITS_PER_FIT = VISITS_PER_FIT
    marks = [lineages // part for part in (16, 8, 4, 2, 1)]
    world, before = Lineages(capacity), private_mb(os.getpid())
    started, random = time.process_time(), np.random.default_rng(1)
    now, taken = 0.0, list[tuple[float, float]]()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("lineages", total=lineages)
        for number, turn in turns(lineages):
            now += random.exponential(0.1)
            world.serve(number, turn, now)
            if turn == 1 and number % 1_000 == 0:
                bar.update(task, completed=number)
            if turn == 1 and number == marks[len(taken)]:
                gc.collect()
                taken.append((private_mb(os.getpid()) - before, time.process_time() - started))
    world.check()
    table = Table("lineages", "MB", "CPU seconds", title=f"Beside a tier of {capacity:,} blocks")
    for mark, (megabytes, seconds) in zip(marks, taken, strict=True):
        table.add_row(f"{mark:,}", f"{megabytes:.0f}", f"{seconds:.0f}")
    console.print(table)
    raise typer.Exit(taken[-1][0] > ALLOWED * taken[-2][0])


if __name__ == "__main__":
    typer.run(main)
