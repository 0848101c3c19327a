"""Settings of a replay: the traced cache's, with changes, isolated from any other cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexcache.config import CacheConfig
from flexcache.config.sources import CONFIG_FILE_ENV
from flexcache.errors import ConfigError
from flexcache.ids import TierName
from flexcache.storage.machine import usable_memory
from flexcache.tracing.records import SETTINGS, TraceHeader

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
