"""A `KVTaskEngine` of a model with tails, over dictionaries instead of memory.

A prompt is a word, a letter is a position. Each unit of the cache holds as many GPU blocks as the
model's shape says, and each GPU block says what it must hold: which position of which prefix, or
which part of which prefix's tail. Executors do what the test lets them, and leave garbage where a
copy did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from builders import prefixes

from flexcache.cache.block_keys import ENGINE_KEYS, EngineBlockKeys, make_root
from flexcache.cache.plan import Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.tail_index import last_tail_key
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import CacheSizes, build_cache
from flexcache.config import CacheConfig
from flexcache.config.model import KVGroup, UnitShape
from flexcache.ids import (
    BlockKey,
    KVStatus,
    OpKind,
    TaskId,
    TaskIds,
    TaskKind,
    TierName,
    make_session,
)
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.instructions import (
    DISK,
    REMOTE,
    RunLookUp,
    RunOp,
    TaskAnswered,
    TaskResult,
    device,
)
from flexcache.transfer.messages import Done, LookedUp
from flexcache.transfer.scheduler import BlockIds

ROOT = make_root("a model with tails", [], ENGINE_KEYS)
ENGINE = "an engine"
TOKENS = 32
GARBAGE = "garbage"
TIER_OF = {
    OpKind.DISK2H: TierName.SSD,
    OpKind.H2DISK: TierName.SSD,
    OpKind.REMOTE2H: TierName.REMOTE,
    OpKind.H2REMOTE: TierName.REMOTE,
}

Content = tuple[str, str, int] | str
"""Content of a GPU block: ("block" | "tail", prefix, number within it)."""


def keys_of(word: str, behind: int = 0) -> EngineBlockKeys:
    """Return a word's keys; those ``behind`` the first positions alone are a continuation."""
    keys = [prefix.encode() for prefix in prefixes(word)][behind:]
    parent = BlockKey(word[:behind].encode()) if behind else None
    return EngineBlockKeys(ROOT, keys, len(keys), parent_key=parent)


@dataclass(eq=False)
class TailedTask:
    kind: TaskKind
    word: str
    plan: Plan
    gpu: BlockIds
    expected: list[Content]
    """What each of its GPU blocks holds (put), or must hold after all has arrived (get)."""
    result: TaskResult | None = None


class TailWorld:
    """One engine with one rank.

    Args:
        groups: Of the model; a position is 32 tokens.
        cpu, ssd: Units of the tiers; 0 for no SSD tier.
        remote: Whether there is a remote store.
        write_blocks_per_s: Limit of the units written to SSD.
        retention_s: How long what is not used is kept.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        cpu: int,
        ssd: int = 0,
        remote: bool = False,
        policy: str = "write_through",
        write_blocks_per_s: float | None = None,
        retention_s: float | None = None,
    ) -> None:
        self.shape = UnitShape(groups, TOKENS)
        config = CacheConfig(
            num_cpu_blocks=cpu,
            tokens_per_block=TOKENS,
            remote_url="memory://" if remote else None,
            ssd_write_policy=policy,  # type: ignore[arg-type]
            eviction_policy="lru",
            ssd_write_mb_s=write_blocks_per_s and write_blocks_per_s / 1e6,  # units of one byte
            retention_s=retention_s,
        )
        self.cache = build_cache(
            config, CacheSizes(cpu, ssd, 2, 1000, num_remembered=64), self.shape
        )
        self.engine = KVTaskEngine(self.cache)
        self.ids = TaskIds(make_session(0, 0))
        self.engine.add_session(self.ids.session, ENGINE)
        self.now = 1000.0
        self.tasks: dict[TaskId, TailedTask] = {}
        self.running: list[RunOp] = []
        self.gpu: dict[int, Content] = {}
        self.units: dict[tuple[TierName, int], list[Content]] = {}
        self.store: dict[bytes, list[Content]] = {}
        """The remote store's objects by key."""
        self._next_gpu_block = 0
        names = [device(ENGINE, 0), *([DISK] if ssd else []), *([REMOTE] if remote else [])]
        for name in names:
            self.engine.executor_up(name)

    # -- the remote store ------------------------------------------------------------------------

    def look_up(self, word: str) -> RunLookUp | None:
        """Return what a match would have the remote worker ask the store, if anything."""
        prompt = Prompt(TaskKind.GET, keys_of(word), 0, len(word), TOKENS * len(word))
        self.engine.look_up(prompt, self.now)
        [asked] = [i for i in self.engine.take_instructions() if isinstance(i, RunLookUp)] or [None]
        return asked

    def answer(self, asked: RunLookUp) -> None:
        """Answer as the remote worker does."""
        present = [key in self.store for key in asked.keys]
        count = present.index(False) if False in present else len(present)
        found = [
            number
            for number, (num_needed, key, count_units) in enumerate(asked.tails)
            if num_needed <= count and last_tail_key(key, count_units) in self.store
        ]
        tail = found[0] if found else -1
        self.engine.looked_up(LookedUp(asked.lookup_id, count, None, tail), self.now)
        self._carry_out()

    # -- calls -----------------------------------------------------------------------------------

    # ``behind``: the engine names only the positions behind so many.

    def put(
        self, word: str, tail_at: int = 0, stop: int | None = None, behind: int = 0
    ) -> TailedTask:
        stop = len(word) if stop is None else stop
        return self._start(TaskKind.PUT, word, behind, stop, tail_at, behind)

    def get(self, word: str, start: int = 0, behind: int = 0) -> TailedTask:
        start = max(start, behind)
        expected = start
        if self._can_continue(TaskKind.GET, word[:behind]):
            expected = self.resumable(word, start)
        task = self._start(TaskKind.GET, word, start, len(word), 0, behind)
        stop = task.plan.stop if task.plan.num_before == behind else task.plan.stop + behind
        assert stop in (*range(start, expected), max(start, expected))
        if task.plan.num_blocks:
            assert self.resumable(word[:stop], start) == stop
        return task

    def prefetch(self, word: str, behind: int = 0) -> TailedTask:
        return self._start(TaskKind.PREFETCH, word, behind, len(word), 0, behind)

    def _start(
        self, kind: TaskKind, word: str, start: int, stop: int, tail_at: int, behind: int
    ) -> TailedTask:
        task_id = self.ids.next()
        can_continue = self._can_continue(kind, word[:behind])
        prompt = Prompt(
            kind, keys_of(word, behind), start - behind, stop - behind,
            TOKENS * (len(word) - behind), tail_at=max(0, tail_at - behind),
        )  # fmt: skip
        plan = self.engine._match(task_id, prompt, self.now)
        assert plan.num_before == (behind if can_continue else 0)
        assert can_continue or plan.is_empty
        count = 0 if kind is TaskKind.PREFETCH else plan.num_gpu_blocks
        gpu = np.arange(self._next_gpu_block, self._next_gpu_block + count, dtype=np.int64)
        self._next_gpu_block += count
        expected = self._contents(word, plan)[:count]
        task = TailedTask(kind, word, plan, gpu, expected)
        if kind is TaskKind.PUT:
            self.gpu.update(zip(gpu.tolist(), expected, strict=True))
        self.tasks[task_id] = task
        if not plan.is_empty:
            self.engine.launch([task_id], [gpu], self.now)
        self._carry_out()
        return task

    def _contents(self, word: str, plan: Plan) -> list[Content]:
        size, contents = self.shape.blocks_per_unit, list[Content]()
        if self.shape.dense_blocks:
            for position in range(plan.start, plan.stop):
                contents += [("block", word[: position + 1], i) for i in range(size)]
        if plan.tail is not None:
            prefix, count = word[: plan.tail.position], len(plan.tail.units)
            contents += [("tail", prefix, i) for i in range(count * size)]
        return contents

    def cancel_all(self) -> None:
        self.engine.cancel([t for t, task in self.tasks.items() if task.result is None], self.now)
        self._carry_out()

    # -- events ----------------------------------------------------------------------------------

    def finish(self, run: RunOp, num_ok: int | None = None, *, is_bad: bool = False) -> None:
        """End an op with its first ``num_ok`` units moved; the next one is bad or just missing."""
        self.running.remove(run)
        op = run.op
        count = len(op) if num_ok is None else min(num_ok, len(op))
        if op.kind in (OpKind.DISK2H, OpKind.REMOTE2H):
            for index in range(count):
                if GARBAGE in self._source(run, index):
                    count, is_bad = index, True
                    break
        for index in range(len(op)):
            self._move(run, index, is_whole=index < count)
        checksums = bytes(8 * len(op)) if op.kind is OpKind.H2DISK else b""
        error = None if count == len(op) else "it failed"
        done = Done(op.op_id, count, error, is_bad and count < len(op), checksums)
        self.engine.op_done(run.executor, done, self.now)
        self._carry_out()

    def finish_all(self) -> None:
        while self.running:
            self.finish(self.running[0])

    def rot(self, tier: Tier, unit: int) -> None:
        """Let a unit of the SSD tier lose its content."""
        self.units[tier.name, unit] = [GARBAGE] * self.shape.blocks_per_unit

    def _source(self, run: RunOp, index: int) -> list[Content]:
        op, size = run.op, self.shape.blocks_per_unit
        assert op.src is not None
        if op.kind is OpKind.D2H:
            return [self.gpu[b] for b in op.src[index * size : (index + 1) * size].tolist()]
        if op.kind is OpKind.REMOTE2H:
            assert op.names is not None
            return self.store.get(op.names.keys[index], [GARBAGE] * size)
        tier = TierName.SSD if op.kind is OpKind.DISK2H else TierName.CPU
        return self.units[tier, int(op.src[index])]

    def _move(self, run: RunOp, index: int, is_whole: bool) -> None:
        op, size = run.op, self.shape.blocks_per_unit
        content = self._source(run, index) if is_whole else [GARBAGE] * size
        assert op.dst is not None
        if op.kind is OpKind.H2D:
            blocks = op.dst[index * size : (index + 1) * size].tolist()
            self.gpu.update(zip(blocks, content, strict=True))
        elif op.kind is OpKind.H2REMOTE:
            assert op.names is not None
            if is_whole:
                self.store[op.names.keys[index]] = list(content)
        else:
            tier = TierName.SSD if op.kind is OpKind.H2DISK else TierName.CPU
            self.units[tier, int(op.dst[index])] = list(content)

    def _carry_out(self) -> None:
        for instruction in self.engine.take_instructions():
            if isinstance(instruction, RunOp):
                self.running.append(instruction)
            elif isinstance(instruction, TaskAnswered):
                self._answered(self.tasks[instruction.task_id], instruction.result)

    def _answered(self, task: TailedTask, result: TaskResult) -> None:
        """A get has all or nothing: its tail, and every block before it."""
        task.result = result
        if task.kind is TaskKind.GET and result.status is KVStatus.SUCCESS:
            assert result.num_ok == task.plan.num_blocks
            assert [self.gpu[block] for block in task.gpu.tolist()] == task.expected

    # -- what must be true -----------------------------------------------------------------------

    def resumable(self, word: str, start: int) -> int:
        """Return the end of the longest prefix that can be resumed, by probing every position."""
        tiers = [t for t in self.cache.tiers if t.name not in self.cache.tiers.unavailable]
        ends = [start]
        for end in range(start + 1, len(word) + 1):
            key = BlockKey(word[:end].encode())
            has_blocks = not self.shape.dense_blocks or any(
                all(t.index.contains(ROOT, BlockKey(p.encode())) for p in prefixes(word[:end]))
                for t in tiers
            )
            if has_blocks and any(t.tails.find(ROOT, key) is not None for t in tiers):
                ends.append(end)
        return max(ends)

    def _can_continue(self, kind: TaskKind, word: str) -> bool:
        """Whether a tier that counts has all blocks of a prompt, or awaits those it lacks."""
        keys, tiers = keys_of(word), list(self.cache.tiers)
        cached = [(t, t.index.match(keys).num_blocks) for t in tiers]
        return not word or any(
            n + t.num_in_flight(keys, n, len(word)) == len(word)
            for t, n in cached
            if kind is not TaskKind.PUT or t is self.cache.tiers.host
        )

    def has_tail(self, name: TierName, word: str) -> bool:
        key = BlockKey(word.encode())
        return self.cache.tiers.by_name[name].tails.find(ROOT, key) is not None

    def check(self, words: Sequence[str]) -> None:
        self.engine.check()
        for tier in self.cache.tiers:
            if tier.name is TierName.REMOTE:
                continue
            for word in words:
                self._check_contents(tier, word)

    def _check_contents(self, tier: Tier, word: str) -> None:
        """Whatever can be found holds what it says, unless it has rotted."""
        size = self.shape.blocks_per_unit
        blocks = tier.index.blocks(tier.index.match(keys_of(word))).tolist()
        for position, block in enumerate(blocks):
            expected = [("block", word[: position + 1], i) for i in range(size)]
            assert self.units[tier.name, block] in (expected, [GARBAGE] * size)
        for prefix in prefixes(word):
            tail = tier.tails.find(ROOT, BlockKey(prefix.encode()))
            for index, unit in enumerate([] if tail is None else tail.units.tolist()):
                first = index * size
                expected = [("tail", prefix, i) for i in range(first, first + size)]
                found = self.units[tier.name, unit]
                assert found in (expected, [GARBAGE] * size)
                assert tier.name is TierName.SSD or found == expected
