"""Repeats the calls of a trace on a real cache of any configuration.

The cache is a `KVManager` in this process with meaningless KV tensors; the prompts are the trace's
own block keys. The order of calls determines everything except what the cache decides by the
clock: `lru` does not read it, `density` does.

A replay is traced too; the summaries of both traces are computed by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.manager import KVManager
from flexcache.replay.player import MAX_GPU_BLOCKS, Player, TraceOutline
from flexcache.replay.reader import RecordedTrace, Trace
from flexcache.replay.report import ReplayReport, differences_between, notes_on
from flexcache.replay.settings import check_memory, isolated
from flexcache.replay.summary import summarise

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
    outline = TraceOutline(trace)
    with (
        isolated(config, trace_dir) as config,
        _engine(config, block_bytes, outline.longest) as engine,
    ):
        player = Player(engine, config, outline.num_fills, speed)
        for number, record in enumerate(trace.records(with_keys=True)):
            if number % 64 == 0:
                progress(number, outline.num_records)
            player.play(record)
        player.end()
        progress(outline.num_records, outline.num_records)
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
