"""Replay of a trace's calls on a real cache of any configuration.

The cache is a `KVManager` in this process with meaningless KV tensors; the prompts are the trace's
own block keys. The order of calls determines everything except what the cache decides by the
clock: `lru` does not read it, `density` does.

A replay is traced too; the summaries of both traces are computed by the same code.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexcache.cache.prompt import MAX_PRIORITY, PRIORITY_STEP_S
from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.sources import CONFIG_FILE_ENV
from flexcache.errors import ConfigError
from flexcache.ids import OpKind, RequestInfo, TaskKind, TierName
from flexcache.manager import KVManager
from flexcache.replay.history import Summary, summarise
from flexcache.replay.traces import RecordedTrace, Trace
from flexcache.storage.machine import usable_memory
from flexcache.tracing.records import (
    KEY_BYTES,
    SETTINGS,
    Cancelled,
    ClearedTier,
    Launched,
    OpEnded,
    Record,
    TaskEnded,
    TaskMatched,
    TraceHeader,
)

_INDEX_BYTES = 160  # index memory per block of a tier's capacity


def replay_config(
    header: TraceHeader, file: Path | None, chosen: Mapping[str, str], block_bytes: int
) -> CacheConfig:
    """Combine the trace's own sizes and policies, those of ``file``, and those ``chosen``.

    Later sources override earlier ones.

    Args:
        chosen: Settings as text. ``none`` removes one.

    Raises:
        ConfigError: A setting is wrong, or the trace does not determine a size.
    """
    own: dict[str, Any] = {
        "tokens_per_block": header.tokens_per_block,
        "skip_useless_ssd_writes": False,  # as in versions that do not name it
    }
    own |= {name: value for name, value in header.settings.items() if name in SETTINGS}
    sizes = {"num_cpu_blocks": TierName.CPU, "num_ssd_blocks": TierName.SSD}
    own |= {name: header.capacities[t] for name, t in sizes.items() if t in header.capacities}
    # A chunk keeps its number of blocks.
    if isinstance(own.get("transfer_chunk_mb"), int | float):
        own["transfer_chunk_mb"] *= block_bytes / header.block_bytes
    wanted: dict[str, Any] = {}
    for name, value in chosen.items():
        if value.lower() == "none":
            own.pop(name, None)
        else:
            wanted[name] = value
    if "num_ssd_blocks" in own or {"num_ssd_blocks", "ssd_cache_gb"} & set(wanted):
        own["ssd_cache_dirs"] = [tempfile.gettempdir()]
    env = {} if file is None else {CONFIG_FILE_ENV: str(file.absolute())}
    config = CacheConfig.from_env(env, own, "--set", **wanted)
    if config.tokens_per_block != header.tokens_per_block:
        raise ConfigError(
            f"tokens_per_block = {config.tokens_per_block!r}: the trace's keys are of blocks of "
            f"{header.tokens_per_block} tokens"
        )
    return config


def check_memory(config: CacheConfig, block_bytes: int, num_gpu_blocks: int) -> None:
    """Refuse a replay that needs more memory than there is, before anything is allocated.

    The sizes come from a file, so they cannot be trusted.

    Raises:
        ConfigError: The replay does not fit into memory.
    """
    num_cpu, num_ssd = config.cpu_blocks_for(block_bytes), config.ssd_blocks_for(block_bytes)
    needed = (num_cpu + num_gpu_blocks) * block_bytes + (num_cpu + num_ssd) * _INDEX_BYTES
    usable = usable_memory()
    if needed > usable:
        raise ConfigError(
            f"{num_cpu:,} blocks of {block_bytes:,} bytes in DRAM and {num_ssd:,} on SSD: a replay "
            f"needs {needed / 1e9:.1f} GB of memory and {usable / 1e9:.1f} GB may be used here: "
            "set other sizes with --set num_cpu_blocks=N, --set num_ssd_blocks=N or --block-bytes"
        )


@contextmanager
def isolated(config: CacheConfig, trace_dir: Path | None) -> Iterator[CacheConfig]:
    """Yield the same cache without any endpoint, in temporary directories.

    Args:
        trace_dir: Directory that keeps the trace of the replay; None for a temporary one.

    Raises:
        ConfigError: A directory cannot be written.
    """

    with ExitStack() as stack:

        def make_directory(parent: str | None) -> str:
            if parent is not None:
                _make_writable(Path(parent))
            directory = tempfile.TemporaryDirectory(prefix="flexcache-replay-", dir=parent)
            return stack.enter_context(directory)

        if trace_dir is not None:
            _make_writable(trace_dir)
        yield replace(
            config,
            ssd_cache_dirs=tuple(make_directory(parent) for parent in config.ssd_cache_dirs),
            trace_dir=make_directory(None) if trace_dir is None else str(trace_dir.absolute()),
            trace_file_mb=1e6,  # a single file
            endpoint=None,
            peer_endpoint=None,
            peers=(),
            http_endpoint=None,
            kv_events=False,
            kv_events_endpoint=None,
            kv_events_replay_endpoint=None,
        )


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory}: cannot be written")


MAX_GPU_BLOCKS = 256
"""Tasks share the same GPU slots: their contents have no meaning."""

_FILLS_DRAM = (OpKind.D2H, OpKind.DISK2H, OpKind.PEER2H, OpKind.REMOTE2H)
_SETTLE_LOOK_S = 0.01


@dataclass(slots=True)
class _OpenTask:
    """A task of the replay that has not ended yet."""

    task_id: int
    num_blocks: int
    launched: bool = False


class Player:
    """Repeats the calls of a trace, record by record.

    Before it repeats a call, the player waits for everything that had ended before that call in the
    trace, so that the call finds the same blocks. At speed 0 the reverse holds as well: a task is
    launched only at the point where its blocks became available in the trace.

    Attributes:
        latest_s: Largest delay behind the trace's pace.
    """

    def __init__(
        self, manager: KVManager, config: CacheConfig, num_fills: Counter[int], speed: float
    ) -> None:
        self._manager = manager
        self._size = config.tokens_per_block
        self._fills_left = num_fills
        self._speed = speed
        self._open: dict[int, _OpenTask] = {}  # by the trace's task id
        self._prefill_blocks_per_s = 0.0
        self._began: tuple[float, float] | None = None  # the trace's clock, this process's clock
        self.latest_s = 0.0

    def play(self, record: Record) -> None:
        match record:
            case TaskMatched():
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
            case TaskEnded(task=task):
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

    def _match(self, match: TaskMatched) -> None:
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

    def _begin(self, match: TaskMatched, task_id: int, num_blocks: int) -> None:
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
        """Return the hints of a put that add up to ``retain_s``."""
        priority = max(-MAX_PRIORITY, min(0, int(retain_s // PRIORITY_STEP_S)))
        ttl_s = max(0.0, retain_s - priority * PRIORITY_STEP_S)
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


def _first_block(match: TaskMatched) -> int:
    """Return the first block that a repeated call covers.

    A put covers the whole prompt: what the cache supplied to the engine in the trace, the engine
    may have to compute and store in the replay.
    """
    is_whole = match.kind is TaskKind.PUT and "prefix_not_cached" not in match.dropped
    return 0 if is_whole else match.start


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        then: Summary of the trace; None if it has no outcomes.
        now: Summary of the replay; its wall time includes all calls.
        tiers: `KVManager.stats()["tiers"]` at the end.
        latest_s: Largest delay behind the trace's pace.
        differences: Gets that found other blocks: those of the trace and of the replay.
        notes: Parts of the trace that could not be repeated.
    """

    then: Summary | None
    now: Summary
    differences: list[tuple[TaskMatched, TaskMatched]]
    tiers: dict[str, dict[str, int]]
    latest_s: float
    notes: list[str]

    def report(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "trace": None if self.then is None else self.then.report(),
            "replay": self.now.report(),
            "differing_gets": len(self.differences),
            "tiers": self.tiers,
            "latest_s": self.latest_s,
            "notes": self.notes,
        }


def differences_between(then: Trace, now: Trace) -> Iterator[tuple[TaskMatched, TaskMatched]]:
    """Yield the gets of a trace that found other blocks in its replay, and those of the replay."""
    calls = ((r for r in trace.records() if isinstance(r, TaskMatched)) for trace in (then, now))
    for first, second in zip(*calls, strict=False):
        is_get = first.kind is TaskKind.GET
        if is_get and (first.num_blocks, first.sources) != (second.num_blocks, second.sources):
            yield first, second


def notes_on(header: TraceHeader, config: CacheConfig, num_dropped: int) -> list[str]:
    """Return notes on what a replay with this configuration cannot repeat.

    Args:
        num_dropped: Lines missing from the replay's own trace.
    """
    notes = []
    if header.file > 1:
        notes.append(
            f"the trace's first {header.file - 1} files are gone: the replay begins in the middle"
        )
    held = {tier: count for tier, count in header.indexed.items() if count}
    if held:
        listed = ", ".join(f"{count:,} in {tier}" for tier, count in held.items())
        notes.append(f"blocks that were cached when the trace began are missing: {listed}")
    if TierName.PEER in header.capacities:
        notes.append("the trace had other hosts to read from, the replay has none")
    if TierName.REMOTE in header.capacities and config.remote_url is None:
        notes.append("the trace had a remote store, the replay has none (--set remote_url=...)")
    if num_dropped:
        notes.append(f"{num_dropped:,} lines of the replay's own trace were dropped")
    return notes


_READY_S = 60.0


def replay(
    trace: Trace,
    config: CacheConfig,
    block_bytes: int,
    *,
    speed: float = 0.0,
    trace_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayReport:
    """Repeat the calls of a trace.

    Args:
        config: Result of `replay_config`. The replay creates temporary directories inside its SSD
            directories and leaves their other contents alone.
        block_bytes: A multiple of ``tokens_per_block``.
        speed: 1 is the trace's pace, 2 twice that; 0 is as fast as possible.
        trace_dir: Directory that keeps the replay's own trace.
        progress: Called periodically with the records done and their total.

    Raises:
        ConfigError: A cache with this configuration cannot be created.
        TraceError: A line of the trace is wrong.
    """
    if block_bytes <= 0 or block_bytes % config.tokens_per_block:
        raise ConfigError(
            f"block_bytes = {block_bytes}: must be a multiple of the block's "
            f"{config.tokens_per_block} tokens"
        )
    config.check_has_tier()
    check_memory(config, block_bytes, MAX_GPU_BLOCKS)
    num_records, longest = 0, 0
    num_fills: Counter[int] = Counter()  # ops that brought blocks to DRAM, by task
    for record in trace.records():
        num_records += 1
        if isinstance(record, OpEnded) and record.kind in _FILLS_DRAM:
            num_fills[record.task] += 1
        elif isinstance(record, TaskMatched):
            longest = max(longest, record.stop)
    with (
        isolated(config, trace_dir) as config,
        _engine(config, block_bytes, longest) as engine,
    ):
        player = Player(engine, config, num_fills, speed)
        for number, record in enumerate(trace.records(with_keys=True)):
            if number % 64 == 0:
                progress(number, num_records)
            player.play(record)
        player.end()
        progress(num_records, num_records)
        stats = engine.stats()
        engine.shutdown()  # flushes its trace
        own_trace = RecordedTrace([Path(stats["trace"]["file"])])
        return ReplayReport(
            summarise(trace) if trace.has_outcomes else None,
            summarise(own_trace),
            list(differences_between(trace, own_trace)) if trace.has_outcomes else [],
            stats["tiers"],
            player.latest_s,
            notes_on(trace.header, config, stats["trace"]["dropped_lines"]),
        )


@contextmanager
def _engine(config: CacheConfig, block_bytes: int, longest: int) -> Iterator[KVManager]:
    """Yield a manager with one rank attached."""
    size = config.tokens_per_block
    num_blocks = max(1, min(longest, MAX_GPU_BLOCKS))
    kv = torch.zeros(num_blocks, size, block_bytes // size, dtype=torch.uint8)
    model = ModelConfig("replay", 1, 1, block_bytes // size, torch.uint8, use_mla=True)
    with KVManager(model, config) as manager:
        client = KVTPClient(manager.endpoint)
        try:
            client.register_kv_caches({"layer.0": kv})
            manager.wait_ready(_READY_S)
            yield manager
        finally:
            client.close()
