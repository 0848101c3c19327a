"""The cost of requests between their match and their end, without moving bytes.

The task engine plans, launches and completes ops that are not executed: each is reported done as
soon as it is handed out. Beside it, what the bare scheduler takes for a graph of such ops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from graphlib import TopologicalSorter

import numpy as np

from flexcache.bench.suite import Case, Result, sample_beside
from flexcache.cache.block_keys import ENGINE_KEYS, EngineBlockKeys, make_root
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiered_cache import CacheSizes, build_cache
from flexcache.config import CacheConfig
from flexcache.ids import KVStatus, OpId, OpKind, TaskId, TaskIds, TaskKind, TierName, make_session
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import DISK, RunOp, TaskAnswered, device
from flexcache.tasks.model import TaskLimits
from flexcache.transfer.messages import Done
from flexcache.transfer.scheduler import StartOp, TransferOp, TransferOpGraph, TransferScheduler

CHUNK_BLOCKS = 8
"""As many 2 MiB blocks as one op moves between DRAM and SSD with the default settings."""
ROOT = make_root("bench", (), ENGINE_KEYS)
PHASES = ("plan", "launch", "complete")


class Requests:
    """A task engine over DRAM and SSD, whose executors do nothing and are always done."""

    def __init__(self, num_blocks: int) -> None:
        size = 2 * num_blocks
        config = CacheConfig(num_cpu_blocks=size, eviction_policy="lru", skip_slow_loads=False)
        self.cache = build_cache(config, CacheSizes(size, size, CHUNK_BLOCKS, size))
        self.engine = KVTaskEngine(self.cache, TaskLimits(2 << 20))
        self._ids = TaskIds(make_session(1, 1))
        self.engine.add_session(self._ids.session, "bench")
        for executor in (device("bench", 0), DISK):
            self.engine.executor_up(executor)
        self._slots = np.arange(num_blocks, dtype=np.int64)

    def serve(self, kind: TaskKind, keys: EngineBlockKeys) -> tuple[list[float], int]:
        """Seconds of each phase of a request for all blocks of a prompt, and its number of ops."""
        task_id, count, engine = self._ids.next(), keys.num_blocks, self.engine
        times = [time.perf_counter()]
        engine.match(task_id, Prompt(kind, keys, 0, count, 16 * count), time.monotonic())
        times.append(time.perf_counter())
        engine.launch([task_id], [self._slots[:count]], time.monotonic())
        instructions = engine.take_instructions()
        times.append(time.perf_counter())
        num_ops, result = 0, None
        while instructions:
            for instruction in instructions:
                if isinstance(instruction, TaskAnswered):
                    result = instruction.result
                elif isinstance(instruction, RunOp):
                    num_ops += 1
                    op = instruction.op
                    engine.op_done(instruction.executor, Done(op.op_id, len(op)), time.monotonic())
            instructions = engine.take_instructions()
        times.append(time.perf_counter())
        assert result is not None
        if (result.status, result.num_ok) != (KVStatus.SUCCESS, count):
            raise AssertionError(f"{result.num_ok} of {count} blocks, {result.status.value}")
        return np.diff(times).tolist(), num_ops


def cases(thorough: bool) -> list[Case]:
    rounds = 200 if thorough else 30
    sizes = [64, 1024, 8192]
    in_flight = [10, 100, 10_000]
    return [
        *(Case(f"requests of {size:,} blocks", partial(requests, size, rounds)) for size in sizes),
        Case("scheduler, long graphs", partial(long_graphs, [4, 128, 2048, 16_384], rounds)),
        Case("scheduler, many graphs in flight", partial(many_graphs, in_flight, rounds)),
    ]


def requests(num_blocks: int, rounds: int) -> Iterator[Result]:
    """A put with write-through, a get from DRAM, and a get from SSD, of the same blocks."""
    served = Requests(num_blocks)
    samples: dict[str, list[tuple[list[float], int]]] = {}
    for number in range(rounds + 1):
        keys = [(number * num_blocks + i).to_bytes(16, "big") for i in range(num_blocks)]
        prompt = EngineBlockKeys(ROOT, keys, num_blocks)
        put = served.serve(TaskKind.PUT, prompt)
        from_dram = served.serve(TaskKind.GET, prompt)
        served.cache.tiers.clear(TierName.CPU.value)
        from_ssd = served.serve(TaskKind.GET, prompt)
        served.cache.tiers.clear(None)
        if number:  # the first warms up
            measured = {"put to DRAM and SSD": put, "get from DRAM": from_dram,
                        "get from SSD": from_ssd}  # fmt: skip
            for name, one in measured.items():
                samples.setdefault(name, []).append(one)
    served.engine.check()
    for name, taken in samples.items():
        for phase, label in enumerate(PHASES):
            yield Result(
                f"{name}: {label}, per op", "us",
                [times[phase] * 1e6 / num_ops for times, num_ops in taken],
                parameter="blocks", at=num_blocks,
            )  # fmt: skip
        yield Result(
            f"{name}: all of a request", "us", [sum(times) * 1e6 for times, _ in taken],
            note=f"an op moves {CHUNK_BLOCKS} blocks, but a get from DRAM is a single op",
            parameter="blocks", at=num_blocks,
        )  # fmt: skip


def _graph(first_id: int, num_ops: int) -> TransferOpGraph:
    """As of a get from SSD: each chunk is read, and goes up once it is there."""
    graph, blocks = TransferOpGraph(), np.arange(CHUNK_BLOCKS, dtype=np.int64)
    for chunk in range(num_ops // 2):
        read, first = OpId(first_id + 2 * chunk), chunk * CHUNK_BLOCKS
        graph.ops.append(TransferOp(read, OpKind.DISK2H, first, blocks, blocks))
        upload = TransferOp(OpId(read + 1), OpKind.H2D, first, blocks, blocks, (read,))
        graph.ops.append(upload)
    return graph


def _schedule(scheduler: TransferScheduler, task_id: TaskId, graph: TransferOpGraph) -> None:
    """Every op ends as soon as it has started."""
    started = scheduler.submit(task_id, graph)
    num_ended = 0
    while started:
        outcome = started.pop()
        if isinstance(outcome, StartOp):
            num_ended += 1
            started += scheduler.op_ended(outcome.op.op_id, len(outcome.op))
    if num_ended != len(graph.ops):
        raise AssertionError(f"{num_ended} of {len(graph.ops)} ops ended")


def _schedule_by_graphlib(graph: TransferOpGraph) -> None:
    sorter: TopologicalSorter[OpId] = TopologicalSorter()
    for op in graph.ops:
        sorter.add(op.op_id, *op.depends_on)
    sorter.prepare()
    while sorter.is_active():
        for op_id in sorter.get_ready():
            sorter.done(op_id)


def _per_op(scheduler: TransferScheduler, num_ops: int, rounds: int) -> tuple[list[float], float]:
    graph = _graph(1, num_ops)
    return sample_beside(
        partial(_schedule, scheduler, TaskId(1), graph), partial(_schedule_by_graphlib, graph),
        rounds=rounds, scale=1e6 / num_ops,
    )  # fmt: skip


def long_graphs(sizes: Sequence[int], rounds: int) -> Iterator[Result]:
    for num_ops in sizes:
        times, bound = _per_op(TransferScheduler(), num_ops, rounds)
        yield Result("scheduler, one op", "us", times, bound, "graphlib",
                     parameter="ops of its graph", at=num_ops)  # fmt: skip


def many_graphs(counts: Sequence[int], rounds: int) -> Iterator[Result]:
    """One graph after the other runs beside others that wait for their reads."""
    for count in counts:
        scheduler = TransferScheduler()
        for number in range(2, count + 1):
            scheduler.submit(TaskId(number), _graph(1000 * number, 64))
        times, bound = _per_op(scheduler, 64, rounds)
        yield Result("scheduler, one op", "us", times, bound, "graphlib, one graph",
                     parameter="graphs in flight", at=count)  # fmt: skip
