"""Replay: makes the calls of a trace again, at a real cache of any configuration.

The cache is a `KVManager` in this process with KV tensors of no meaning; the prompts are the
trace's own block keys. Calls are made one after the other, in the trace's order. What of a task
ended before a call then has ended before that call now, so that it finds the same; at speed 0 the
reverse holds as well: a task is launched only where in the trace its blocks were there. What that
leaves open is what the cache does by the clock: `lru` does not look at it, `reuse` does.

A replay is traced too, and what came of both is read off the traces by the same code.
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

from flexcache.cache.prompt import MAX_PRIORITY
from flexcache.client.rank import KVTPClient
from flexcache.config import CONFIG_FILE_ENV, CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.ids import OpKind, TaskKind, TierName
from flexcache.manager import KVManager
from flexcache.replay.reader import RecordedTrace, Trace
from flexcache.replay.summary import Summary, summarise
from flexcache.request_info import RequestInfo
from flexcache.tracing.records import (
    KEY_BYTES,
    SETTINGS,
    Cancelled,
    ClearedTier,
    Ended,
    Launched,
    Matched,
    OpEnded,
    Record,
    TraceHeader,
)

_FILLS_DRAM = (OpKind.D2H, OpKind.DISK2H, OpKind.REMOTE2H)
_MAX_GPU_BLOCKS = 256  # tasks use the same slots: what is in them means nothing
_INDEX_BYTES = 160  # of one block that a tier has room for
_READY_S = 60.0
_SETTLE_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Difference:
    """A get that found something else than in the trace: blocks by tier."""

    call: int
    time: float
    request: str
    then: dict[str, int]
    now: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        then: What the trace says; None if it says nothing of outcomes.
        now: What the replay came to; its wall time is that of all calls.
        tiers: `KVManager.stats()["tiers"]` at the end.
        latest_s: How far the replay fell behind the pace.
        notes: What of the trace could not be done again.
    """

    then: Summary | None
    now: Summary
    differences: list[Difference]
    tiers: dict[str, dict[str, int]]
    latest_s: float
    notes: list[str]

    def report(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "trace": None if self.then is None else self.then.report(),
            "replay": self.now.report(),
            "differing_gets": len(self.differences),
            "tiers": self.tiers,
            "latest_s": self.latest_s,
            "notes": self.notes,
        }


def replay_config(
    header: TraceHeader, file: Path | None, chosen: Mapping[str, str], block_bytes: int
) -> CacheConfig:
    """The trace's own sizes and policies, then those of ``file``, then those ``chosen``.

    Args:
        chosen: Settings as text. ``none`` takes one away.

    Raises:
        ConfigError: A setting is wrong, or there is no size to take from the trace.
    """
    own: dict[str, Any] = {"tokens_per_block": header.tokens_per_block}
    own |= {name: value for name, value in header.settings.items() if name in SETTINGS}
    sizes = {"num_cpu_blocks": TierName.CPU, "num_ssd_blocks": TierName.SSD}
    own |= {name: header.capacities[t] for name, t in sizes.items() if t in header.capacities}
    if isinstance(own.get("transfer_chunk_mb"), int | float):  # as many blocks to a chunk as then
        own["transfer_chunk_mb"] *= block_bytes / header.block_bytes
    wanted: dict[str, Any] = {}
    for name, value in chosen.items():
        if value.lower() == "none":
            own.pop(name, None)
        else:
            wanted[name] = value.split(":") if name == "ssd_cache_dirs" else value
    if "num_ssd_blocks" in own or {"num_ssd_blocks", "ssd_cache_gb"} & set(wanted):
        own["ssd_cache_dirs"] = [tempfile.gettempdir()]
    env = {} if file is None else {CONFIG_FILE_ENV: str(file)}
    config = CacheConfig.from_env(env, own, **wanted)
    if config.tokens_per_block != header.tokens_per_block:
        raise ConfigError(
            f"tokens_per_block = {config.tokens_per_block!r}: the trace has the keys of blocks of "
            f"{header.tokens_per_block} tokens"
        )
    return config


def replay(
    trace: Trace,
    config: CacheConfig,
    block_bytes: int,
    *,
    speed: float = 0.0,
    trace_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayReport:
    """Make the calls of a trace again.

    Args:
        config: As `replay_config` makes it. Its SSD directories are only where the replay makes
            directories of its own; whatever lies in them stays as it is.
        block_bytes: A multiple of ``tokens_per_block``.
        speed: 1 is the trace's pace, 2 twice that; 0 is as fast as can be.
        trace_dir: Where the trace of the replay is to stay.
        progress: Told now and then of how many records how many are done.

    Raises:
        ConfigError: The cache cannot be made so.
        TraceError: A line of the trace is wrong.
    """
    if block_bytes <= 0 or block_bytes % config.tokens_per_block:
        raise ConfigError(
            f"block_bytes = {block_bytes}: must be a multiple of the block's "
            f"{config.tokens_per_block} tokens"
        )
    config.check_has_tier()
    _check_fits(config, block_bytes)
    outlook = _Outlook(trace)
    with ExitStack() as stack:
        config = _apart(config, stack, trace_dir)
        engine = stack.enter_context(_engine(config, block_bytes, outlook.longest))
        player = _Player(engine, config, outlook.num_fills, speed)
        for number, record in enumerate(trace.records(with_keys=True)):
            if number % 64 == 0:
                progress(number, outlook.num_records)
            player.play(record)
        player.end()
        progress(outlook.num_records, outlook.num_records)
        stats = engine.stats()
        engine.shutdown()  # writes the rest of its trace
        own_trace = RecordedTrace([Path(stats["trace"]["file"])])
        return ReplayReport(
            summarise(trace) if trace.has_outcomes else None,
            summarise(own_trace),
            list(_differences(trace, own_trace)) if trace.has_outcomes else [],
            stats["tiers"],
            player.latest_s,
            _notes(trace.header, config, stats["trace"]["dropped_lines"]),
        )


def _check_fits(config: CacheConfig, block_bytes: int) -> None:
    """Sizes come from a file. Nothing has been allocated yet."""
    num_cpu, num_ssd = config.cpu_blocks_for(block_bytes), config.ssd_blocks_for(block_bytes)
    wanted = (num_cpu + _MAX_GPU_BLOCKS) * block_bytes + (num_cpu + num_ssd) * _INDEX_BYTES
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > installed:
        raise ConfigError(
            f"{num_cpu:,} blocks of {block_bytes:,} bytes in DRAM and {num_ssd:,} on SSD: a replay "
            f"needs {wanted / 1e9:.1f} GB of memory and this machine has {installed / 1e9:.1f} GB: "
            "give other sizes with --set num_cpu_blocks=N, --set num_ssd_blocks=N or --block-bytes"
        )


def _apart(config: CacheConfig, stack: ExitStack, trace_dir: Path | None) -> CacheConfig:
    """The same cache, for nobody but us, in directories that go with the replay."""

    def make_directory(parent: str | None) -> str:
        if parent is not None:
            _make_writable(Path(parent))
        made = tempfile.TemporaryDirectory(prefix="flexcache-replay-", dir=parent)
        return stack.enter_context(made)

    if trace_dir is not None:
        _make_writable(trace_dir)
    return replace(
        config,
        ssd_cache_dirs=tuple(make_directory(parent) for parent in config.ssd_cache_dirs),
        trace_dir=make_directory(None) if trace_dir is None else str(trace_dir),
        trace_file_mb=1e6,  # a single file
        endpoint=None,
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


@contextmanager
def _engine(config: CacheConfig, block_bytes: int, longest: int) -> Iterator[KVManager]:
    """A manager and its only rank."""
    size = config.tokens_per_block
    num_blocks = max(1, min(longest, _MAX_GPU_BLOCKS))
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


class _Outlook:
    """What must be known of a trace before it is replayed.

    Attributes:
        num_fills: Ops by which each task brought blocks to DRAM.
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
class _Open:
    """A task of the replay: its own id, and its blocks."""

    task_id: int
    num_blocks: int
    launched: bool = False


class _Player:
    """Makes the calls of a trace, record by record."""

    def __init__(
        self, manager: KVManager, config: CacheConfig, num_fills: Counter[int], speed: float
    ) -> None:
        self._manager = manager
        self._size = config.tokens_per_block
        self._priority_step_s = config.priority_step_s
        self._has_remote = config.remote_url is not None
        self._fills_left = num_fills
        self._speed = speed
        self._open: dict[int, _Open] = {}  # by the trace's task
        self._prefill_blocks_per_s = 0.0
        self._began: tuple[float, float] | None = None  # the trace's clock and ours
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
        """Of tasks whose end the trace does not have, and of all that goes on below DRAM."""
        for task in list(self._open.values()):
            if not task.launched:
                self._manager.cancel([task.task_id])
            self._manager.wait([task.task_id], completely=True)
        while any(self._manager.stats()["tasks"][state] for state in ("ready", "running")):
            time.sleep(_SETTLE_LOOK_S)

    def _pace(self, then_s: float) -> None:
        """Wait until it is time for a call."""
        now = time.monotonic()
        if self._began is None:
            self._began = then_s, now
        elif self._speed:
            early = (then_s - self._began[0]) / self._speed - (now - self._began[1])
            self.latest_s = max(self.latest_s, -early)
            if early > 0:
                time.sleep(early)

    def _match(self, match: Matched) -> None:
        self._report_prefill(match.prefill_blocks_per_s)
        manager, keys = self._manager, match.keys
        num_tokens = match.stop * self._size  # of more the trace has no keys
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
            self._open[match.task] = _Open(task_id, 0, launched=True)
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
            return  # it is over
        self._open[match.task] = _Open(task_id, num_blocks)
        if not match.num_blocks:  # nothing was launched then
            self._launch(match.task)
            self._wait(match.task, completely=not self._speed)
            del self._open[match.task]

    def _report_prefill(self, blocks_per_s: float) -> None:
        if blocks_per_s not in (0.0, self._prefill_blocks_per_s):
            self._prefill_blocks_per_s = blocks_per_s
            self._manager.report_prefill(blocks_per_s * self._size)

    def _retention(self, retain_s: float) -> dict[str, Any]:
        """The hints of a put that come to so many seconds; with a smaller step than the trace's the
        lowest priority may not be as low."""
        priority = max(-MAX_PRIORITY, min(0, int(retain_s // self._priority_step_s)))
        ttl_s = max(0.0, retain_s - priority * self._priority_step_s)
        return {"priority": priority, "ttl_s": ttl_s}

    def _launch(self, task: int) -> None:
        opened = self._open.get(task)
        if opened is None or opened.launched:
            return
        opened.launched = True
        num_gpu_blocks = min(opened.num_blocks, _MAX_GPU_BLOCKS)
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
    """A put stores what is not cached of the whole prompt: what the engine was given by the cache
    then, it may have to compute and store now."""
    is_whole = match.kind is TaskKind.PUT and "prefix_not_cached" not in match.dropped
    return 0 if is_whole else match.start


def _differences(then: Trace, now: Trace) -> Iterator[Difference]:
    for number, (first, second) in enumerate(zip(_matches(then), _matches(now), strict=False)):
        is_get = first.kind is TaskKind.GET
        if is_get and (first.num_blocks, first.sources) != (second.num_blocks, second.sources):
            yield Difference(number, first.time, first.request, first.sources, second.sources)


def _matches(trace: Trace) -> Iterator[Matched]:
    return (record for record in trace.records() if isinstance(record, Matched))


def _notes(header: TraceHeader, config: CacheConfig, num_dropped: int) -> list[str]:
    notes = []
    if header.file > 1:
        notes.append(f"the trace's first {header.file - 1} files are gone: it begins in the middle")
    held = {tier: count for tier, count in header.indexed.items() if count}
    if held:
        listed = ", ".join(f"{count:,} in {tier}" for tier, count in held.items())
        notes.append(f"blocks that were cached when the trace began are not here: {listed}")
    if TierName.REMOTE in header.capacities and config.remote_url is None:
        notes.append("the trace had a remote store, the replay has none (--set remote_url=...)")
    if num_dropped:
        notes.append(f"{num_dropped:,} lines of the replay's own trace were dropped")
    return notes
