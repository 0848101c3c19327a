"""Seconds of prefill that a cache saves, with and without loads that begin while requests wait.

    python benchmarks/bench_early_loads.py --trace FILE

Replays a trace through a real task engine: DRAM and an SSD ten times its size. Each request waits
``--wait`` seconds before it is computed; its early load begins when it arrives. What the engine's
ops take is simulated: the SSD reads one block after another at 6 GB/s, in the order in which it is
given them; the GPU is reached at 40 GB/s; writes take no time. A block found saves the time of
computing it; waiting for blocks costs as much.

The model has 8 billion parameters (131,072 bytes of KV per token) and computes 30,000 tokens/s.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import search_path  # noqa: F401
import typer
from bench_write_policies import Request, read_trace, study
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flexcache.cache.density import DensityPolicy
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiered_cache import CacheSizes, build_cache
from flexcache.config import CacheConfig
from flexcache.ids import OpKind, TaskId, TaskIds, TaskKind, make_session
from flexcache.replay.traces import TOKENS_PER_ID
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import DISK, RunOp, TaskAnswered, device
from flexcache.tasks.model import TaskLimits
from flexcache.transfer.messages import Done

BLOCK_BYTES = TOKENS_PER_ID * 131_072
DISK_S = BLOCK_BYTES / 6e9
COPY_S = BLOCK_BYTES / 40e9
COMPUTE_S = TOKENS_PER_ID / 30_000
STEP_S = 0.02
"""A request whose blocks are on their way is asked about again after a step of its engine."""
SSD_PER_DRAM = 10
SIZES = (1_000, 2_000, 5_000)
WAITS = (0.5, 2.0)
ENGINE = "engine"

console = Console(width=120)


class Replay:
    """One replay over a cache of its own.

    Args:
        size: Blocks of DRAM.
        wait_s: How long a request waits before it is computed.
        is_early: Whether its load begins when it arrives.

    Attributes:
        saved_s: Seconds of prefill saved.
        total_s: Seconds that computing everything takes.
    """

    def __init__(self, size: int, wait_s: float, is_early: bool, policy: str) -> None:
        config = CacheConfig(
            num_cpu_blocks=size, num_ssd_blocks=size * SSD_PER_DRAM, ssd_cache_dirs=("/tmp",),
            tokens_per_block=TOKENS_PER_ID, eviction_policy=policy,
        )  # fmt: skip
        self.cache = build_cache(config, CacheSizes(size, size * SSD_PER_DRAM, 1, size))
        self._engine = KVTaskEngine(self.cache, TaskLimits(BLOCK_BYTES))
        self._ids = TaskIds(make_session(0, 0))
        self._engine.add_session(self._ids.session, ENGINE)
        self._engine.executor_up(DISK)
        self._engine.executor_up(device(ENGINE, 0))
        self._engine.report_prefill(self._ids.session, 1 / COMPUTE_S)
        self._wait_s = wait_s
        self._is_early = is_early
        self.saved_s = 0.0
        self.total_s = 0.0
        self._disk_free_s = 0.0
        self._gpu_free_s = 0.0
        self._gets: dict[TaskId, tuple[Request, float]] = {}
        """Those under way, and when their requests first asked."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._run_until(request.time_s)
            if self._is_early:
                self._match(TaskKind.PREFETCH, request, request.time_s)
                self._follow(request.time_s)
            self._ask_later(request, request.time_s + self._wait_s, request.time_s + self._wait_s)
        self._run_until(float("inf"))
        self._engine.check()
        policy = self.cache.tiers.policy
        if isinstance(policy, DensityPolicy) and policy.history.num_visits < len(requests) // 2:
            raise RuntimeError("the eviction policy has not seen the requests")

    # -- requests --------------------------------------------------------------------------------

    def _ask_later(self, request: Request, asked_s: float, at_s: float) -> None:
        self._at(at_s, lambda now: self._ask(request, asked_s, now))

    def _ask(self, request: Request, asked_s: float, now: float) -> None:
        prompt = self._prompt(TaskKind.GET, request)
        if self._engine.awaits_load(self._ids.session, prompt, now):
            self._ask_later(request, asked_s, now + STEP_S)
            return
        task_id, is_moving = self._match(TaskKind.GET, request, now)
        if is_moving:
            self._gets[task_id] = (request, asked_s)
        else:
            self._compute(request, asked_s, 0, now)

    def _compute(self, request: Request, asked_s: float, num_found: int, now: float) -> None:
        self.saved_s += num_found * COMPUTE_S - (now - asked_s)
        self.total_s += request.keys.num_blocks * COMPUTE_S
        self._match(TaskKind.PUT, request, now)

    def _prompt(self, kind: TaskKind, request: Request) -> Prompt:
        num_blocks = request.keys.num_blocks
        return Prompt(kind, request.keys, 0, num_blocks, num_blocks * TOKENS_PER_ID)

    def _match(self, kind: TaskKind, request: Request, now: float) -> tuple[TaskId, bool]:
        """Make a task and launch it; return whether it moves anything."""
        task_id = self._ids.next()
        offer = self._engine.match(task_id, self._prompt(kind, request), now)
        if not offer.num_blocks:
            return task_id, False
        num_gpu_blocks = 0 if kind is TaskKind.PREFETCH else offer.num_gpu_blocks
        self._engine.launch([task_id], [np.arange(num_gpu_blocks)], now)
        return task_id, True

    # -- what is simulated -----------------------------------------------------------------------

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _run_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            now, _, act = heapq.heappop(self._events)
            act(now)
            self._follow(now)

    def _follow(self, now: float) -> None:
        """Carry out what the task engine decided."""
        self._engine.tick(now)
        while instructions := self._engine.take_instructions():
            for instruction in instructions:
                if isinstance(instruction, RunOp):
                    self._begin(instruction, now)
                elif isinstance(instruction, TaskAnswered):
                    request, asked_s = self._gets.pop(instruction.task_id, (None, 0.0))
                    if request is not None:
                        self._compute(request, asked_s, instruction.result.num_ok, now)
        self.cache.tiers.settle()
        study(self.cache.tiers.policy)

    def _begin(self, run: RunOp, now: float) -> None:
        op, num_blocks = run.op, len(run.op)
        ends_s = now
        if op.kind is OpKind.DISK2H:
            ends_s = self._disk_free_s = max(self._disk_free_s, now) + num_blocks * DISK_S
        elif op.kind is OpKind.H2D:
            ends_s = self._gpu_free_s = max(self._gpu_free_s, now) + num_blocks * COPY_S
        op_done, done = self._engine.op_done, Done(op.op_id, num_blocks)
        if ends_s == now:
            op_done(run.executor, done, now)
        else:
            self._at(ends_s, lambda then: op_done(run.executor, done, then))


def main(
    trace: Annotated[Path, typer.Option(help="In Mooncake's format, maybe gzipped.")],
    size: Annotated[list[int], typer.Option(help="Blocks of DRAM.")] = list(SIZES),  # noqa: B006
    wait: Annotated[list[float], typer.Option(help="Seconds.")] = list(WAITS),  # noqa: B006
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "density",
) -> None:
    requests = [request for request in read_trace(trace) if request.keys.num_blocks]
    table = Table(title=f"{trace.name}: prefill time saved, of all")
    for column in ("DRAM blocks", "wait", "on demand", "early", "early / late / wasted blocks"):
        table.add_column(column, justify="right")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=len(size) * len(wait) * 2)
        for num_blocks, wait_s in itertools.product(size, wait):
            row = []
            for is_early in (False, True):
                done = Replay(num_blocks, wait_s, is_early, policy)
                done.run(requests)
                row.append(f"{done.saved_s:,.0f} s, {done.saved_s / done.total_s:.1%}")
                progress.advance(task)
            counts = done.cache.early.counters
            outcome = f"{counts.early:,} / {counts.late:,} / {counts.wasted:,}"
            table.add_row(f"{num_blocks:,}", f"{wait_s:g} s", *row, outcome)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
