"""Repeats the calls of a trace on a `KVManager`, one after the other, in the trace's order.

Before it repeats a call, the player waits for everything that had ended before that call in the
trace, so that the call finds the same blocks. At speed 0 the reverse holds as well: a task is
launched only at the point where its blocks became available in the trace.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexcache.cache.prompt import MAX_PRIORITY
from flexcache.config import CacheConfig
from flexcache.ids import OpKind, RequestInfo, TaskKind
from flexcache.manager import KVManager
from flexcache.replay.reader import Trace
from flexcache.tracing.records import (
    KEY_BYTES,
    Cancelled,
    ClearedTier,
    Ended,
    Launched,
    Matched,
    OpEnded,
    Record,
)

MAX_GPU_BLOCKS = 256
"""Tasks share the same GPU slots: their contents have no meaning."""

_FILLS_DRAM = (OpKind.D2H, OpKind.DISK2H, OpKind.REMOTE2H)
_SETTLE_LOOK_S = 0.01


class TraceOutline:
    """Facts about a trace that a replay must know in advance.

    Attributes:
        num_fills: Number of ops that brought blocks to DRAM, by task.
        longest: Blocks of the longest prompt.
    """

    def __init__(self, trace: Trace) -> None:
        self.num_records = 0
        self.num_fills: Counter[int] = Counter()
        self.longest = 0
        for record in trace.records():
            self.num_records += 1
            if isinstance(record, OpEnded) and record.kind in _FILLS_DRAM:
                self.num_fills[record.task] += 1
            elif isinstance(record, Matched):
                self.longest = max(self.longest, record.stop)


@dataclass(slots=True)
class _OpenTask:
    """A task of the replay that has not ended yet."""

    task_id: int
    num_blocks: int
    launched: bool = False


class Player:
    """Repeats the calls of a trace, record by record.

    Attributes:
        latest_s: Largest delay behind the trace's pace.
    """

    def __init__(
        self, manager: KVManager, config: CacheConfig, num_fills: Counter[int], speed: float
    ) -> None:
        self._manager = manager
        self._size = config.tokens_per_block
        self._priority_step_s = config.priority_step_s
        self._fills_left = num_fills
        self._speed = speed
        self._open: dict[int, _OpenTask] = {}  # by the trace's task id
        self._prefill_blocks_per_s = 0.0
        self._began: tuple[float, float] | None = None  # the trace's clock, this process's clock
        self.latest_s = 0.0

    def play(self, record: Record) -> None:
        match record:
            case Matched():
                self._pace(record.time)
                self._match(record)
            case Launched(task=task) if self._speed:
                self._pace(record.time)
                self._launch(task)
            case OpEnded(task=task, kind=kind) if kind in _FILLS_DRAM:
                self._fills_left[task] -= 1
                if not self._fills_left[task]:
                    self._launch(task)
                    self._wait(task, completely=False)
            case Cancelled(task=task):
                self._pace(record.time)
                if task in self._open:
                    self._manager.cancel([self._open[task].task_id])
            case Ended(task=task):
                self._launch(task)
                self._wait(task, completely=True)
                self._open.pop(task, None)
            case ClearedTier(tier=tier):
                self._pace(record.time)
                self._clear(tier)

    def end(self) -> None:
        """End tasks whose end is missing from the trace; wait until writes below DRAM are done."""
        for task in list(self._open.values()):
            if not task.launched:
                self._manager.cancel([task.task_id])
            self._manager.wait([task.task_id], completely=True)
        while any(self._manager.stats()["tasks"][state] for state in ("ready", "running")):
            time.sleep(_SETTLE_LOOK_S)

    def _pace(self, then_s: float) -> None:
        """Sleep until a call is due."""
        now = time.monotonic()
        if self._began is None:
            self._began = then_s, now
        elif self._speed:
            early = (then_s - self._began[0]) / self._speed - (now - self._began[1])
            self.latest_s = max(self.latest_s, -early)
            if early > 0:
                time.sleep(early)

    def _match(self, match: Matched) -> None:
        if "parent_missing" in match.dropped:
            return  # the trace cannot tell where in its prompt this was
        self._report_prefill(match.prefill_blocks_per_s)
        manager, keys = self._manager, match.keys
        num_tokens = match.stop * self._size  # the trace has no keys beyond these tokens
        wanted = np.zeros(num_tokens, dtype=np.bool_)
        wanted[_first_block(match) * self._size : match.stop * self._size] = True
        block_keys = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        asked: dict[str, Any] = {
            "namespace": match.root,
            "block_keys": block_keys,
            "request_info": RequestInfo(match.request),
        }
        if match.kind is TaskKind.PREFETCH:
            task_id = manager.prefetch_async(range(num_tokens), wanted, **asked)
            self._open[match.task] = _OpenTask(task_id, 0, launched=True)
        elif match.kind is TaskKind.GET:
            task_id, mask = manager.get_match(range(num_tokens), wanted, **asked)
            self._begin(match, task_id, int(mask.sum()) // self._size)
        else:
            task_id, mask = manager.put_match(
                range(num_tokens), wanted, **asked, **self._retention(match.retain_s)
            )
            self._begin(match, task_id, int(mask.sum()) // self._size)

    def _begin(self, match: Matched, task_id: int, num_blocks: int) -> None:
        if not num_blocks:
            return  # the task is already final
        self._open[match.task] = _OpenTask(task_id, num_blocks)
        if not match.num_blocks:  # it was not launched in the trace
            self._launch(match.task)
            self._wait(match.task, completely=not self._speed)
            del self._open[match.task]

    def _report_prefill(self, blocks_per_s: float) -> None:
        if blocks_per_s not in (0.0, self._prefill_blocks_per_s):
            self._prefill_blocks_per_s = blocks_per_s
            self._manager.report_prefill(blocks_per_s * self._size)

    def _retention(self, retain_s: float) -> dict[str, Any]:
        """Return the hints of a put that add up to ``retain_s``.

        With a smaller ``priority_step_s`` than the trace's, the lowest priority may be higher.
        """
        priority = max(-MAX_PRIORITY, min(0, int(retain_s // self._priority_step_s)))
        ttl_s = max(0.0, retain_s - priority * self._priority_step_s)
        return {"priority": priority, "ttl_s": ttl_s}

    def _launch(self, task: int) -> None:
        opened = self._open.get(task)
        if opened is None or opened.launched:
            return
        opened.launched = True
        num_gpu_blocks = min(opened.num_blocks, MAX_GPU_BLOCKS)
        blocks = np.arange(opened.num_blocks) % num_gpu_blocks
        slots = (blocks[:, None] * self._size + np.arange(self._size)).ravel()
        self._manager.launch([opened.task_id], [slots])

    def _wait(self, task: int, *, completely: bool) -> None:
        opened = self._open.get(task)
        if opened is not None:
            self._manager.wait([opened.task_id], completely=completely)

    def _clear(self, tier: str | None) -> None:
        if tier is None:
            self._manager.reset()
        elif tier in self._manager.stats()["tiers"]:
            self._manager.clear(tier)


def _first_block(match: Matched) -> int:
    """Return the first block that a repeated call covers.

    A put covers the whole prompt: what the cache supplied to the engine in the trace, the engine
    may have to compute and store in the replay.
    """
    is_whole = match.kind is TaskKind.PUT and "prefix_not_cached" not in match.dropped
    return 0 if is_whole else match.start
