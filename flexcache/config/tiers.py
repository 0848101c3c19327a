"""TierConfig: the settings of the tiers themselves, the first part of `CacheConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from msgspec import Meta

from flexcache.config.values import (
    Count,
    Gigabytes,
    Megabytes,
    Retention,
    Seconds,
    read_paths,
    reject,
    setting,
)

EvictionName = Literal["density", "lru"]
EVICTION_POLICIES: tuple[str, ...] = get_args(EvictionName)
WritePolicy = Literal["write_through", "write_back", "selective"]
SsdSync = Literal["group", "none"]
SSD_SYNCS: tuple[str, ...] = get_args(SsdSync)


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """The tiers' sizes and places, and what is kept in each."""

    tokens_per_block: Count = setting(16, "Tokens of one cached block.", "tokens")
    num_cpu_blocks: Annotated[int, Meta(ge=0)] | None = setting(
        None,
        "Size of the DRAM tier in blocks. Give this or cpu_cache_gb. 0: no DRAM tier above the "
        "SSD, to which blocks then go past DRAM.",
        "blocks",
    )
    cpu_cache_gb: Gigabytes | None = setting(
        None, "Size of the DRAM tier in GB, over all ranks.", "1e9 bytes"
    )
    hugepages: Literal["transparent", "reserved"] = setting(
        "transparent",
        "Pages of the DRAM tier. transparent: huge pages where the kernel grants them on request. "
        "reserved: the system's reserved ones (vm.nr_hugepages), or refuse to start.",
    )
    num_ssd_blocks: Count | None = setting(
        None, "Size of the SSD tier in blocks. If this and ssd_cache_gb are unset: no SSD tier.",
        "blocks",
    )  # fmt: skip
    ssd_cache_gb: Gigabytes | None = setting(
        None, "Size of the SSD tier in GB, over all directories.", "1e9 bytes"
    )
    ssd_cache_dirs: Sequence[str] = setting(
        (),
        "Directories of the SSD tier, striped block by block: absolute paths, or below `~` "
        "(separated by `:` in the environment).",
        read=read_paths,
    )
    ssd_sync: SsdSync = setting(
        "group",
        "group: a block counts as stored once it is on the device (writes are synced together). "
        "none: left to the system; survives a killed process, not a power cut.",
    )
    ssd_on_mismatch: Literal["refuse", "clear"] = setting(
        "refuse",
        "What to do with a FlexCache directory that does not fit (another block size, say): "
        "refuse to start, or clear it.",
    )
    ssd_past_dram: Literal["auto", "always", "never"] = setting(
        "auto",
        "Whether loads go from SSD straight to the GPU, where that can be done, instead of "
        "through DRAM. auto: if that was clearly faster, since it leaves nothing in DRAM (on CPUs: "
        "never).",
    )
    ssd_compression: Literal["none", "zstd", "lz4"] = setting(
        "none",
        "Compression of blocks on SSD: none, zstd, lz4. Saves bandwidth and wear, not space.",
    )
    ssd_write_policy: WritePolicy = setting(
        "write_through",
        "write_through: every block at once. write_back: when DRAM holds too many that the SSD "
        "lacks. selective: blocks seen repeatedly.",
    )
    ssd_write_mb_s: Megabytes | None = setting(
        None,
        "Most that is written to the SSD tier per second, on average over 10 s, before "
        "compression: to spare the device. Blocks beyond it stay in DRAM only. Unset: no limit.",
        "1e6 bytes/s",
    )
    remote_url: str | None = setting(
        None,
        "Remote store: `mooncake://HOST:PORT`, `s3://BUCKET/PREFIX` (`gs://`, `az://`), "
        "`file:///DIR`.",
    )
    remote_write_policy: WritePolicy = setting("write_through", "As ssd_write_policy.")
    remote_write_mb_s: Megabytes | None = setting(
        None, "As ssd_write_mb_s: to leave room on a shared uplink.", "1e6 bytes/s"
    )
    remote_compression: Literal["none", "zstd", "lz4"] = setting(
        "none", "Compression of blocks in the remote store: none, zstd, lz4."
    )
    remote_concurrency: Count = setting(
        16,
        "Concurrent requests to an object store, or files of a directory, for one op.",
        "requests",
    )
    remote_timeout_s: Seconds = setting(
        3.0, "Deadline of one op of the remote store. A worker that exceeds it is replaced.", "s"
    )
    remote_lookup_timeout_s: Seconds = setting(
        0.25, "How long a match waits to learn what the store has. vLLM's steps do not wait.", "s"
    )
    remote_absent_ttl_s: Seconds = setting(
        5.0, "How long before a block that the store did not have is looked up again.", "s"
    )
    remote_index_blocks: Count = setting(
        262_144,
        "Blocks of the remote store to remember at most, at 0.2 to 1 KB of memory each. The least "
        "recently used are forgotten first, and looked up again when a prompt needs them.",
        "blocks",
    )
    write_min_sightings: Count = setting(
        2, "For selective: the sighting of a block at which it is written.", "sightings"
    )
    write_back_max_dirty: Annotated[float, Meta(gt=0, le=0.75)] = setting(
        0.5, "For write_back: the share of DRAM that may wait to be written.", "of DRAM"
    )
    priority_step_s: Seconds = setting(
        3600.0, "Each step of a put's priority counts as a use this much later.", "s"
    )
    skip_slow_loads: bool = setting(
        True,
        "Skip loads that the engine recomputes faster, judged by measured times of both, and wait "
        "for the remote store no longer than recomputing would take.",
    )
    skip_useless_ssd_writes: bool = setting(
        True,
        "With write_through: write nothing to a full SSD tier while nothing comes back: since a "
        "prompt was last found, the tier has replaced all that it held. Ends with the first prompt "
        "that is seen again. DRAM stores all the same. Without effect with quotas.",
    )
    early_load_share: Annotated[float, Meta(ge=0, le=0.75)] = setting(
        0.5,
        "Share of DRAM, at most 0.75, for blocks loaded ahead of their requests; 0: none in vLLM.",
        "of DRAM",
    )
    eviction_policy: EvictionName = setting(
        "density",
        "For DRAM and SSD. lru: evicts the least recently used blocks. density: evicts the blocks "
        "that promise the fewest hits per time kept, by the return times of similar prompts; LRU "
        "where that is no better.",
    )
    retention_s: Retention | None = setting(
        None,
        "Blocks that were not used for this long are dropped from every tier, and not taken over "
        "at a restart. Unset: they stay until their room is needed.",
        "s",
    )
    quotas: str | None = setting(
        None,
        "What namespaces are sure of in DRAM and on SSD, as shares or bytes: "
        "`team-a=50%,team-b=20GB/200GB,*=10%` (with a slash: DRAM/SSD; `*`: all others together). "
        "What is unused may be borrowed, and is given back first.",
    )

    @property
    def has_cpu_tier(self) -> bool:
        """False for an engine that only uses a server's cache."""
        return self.num_cpu_blocks is not None or self.cpu_cache_gb is not None

    @property
    def has_ssd_tier(self) -> bool:
        return self.num_ssd_blocks is not None or self.ssd_cache_gb is not None

    @property
    def has_workers(self) -> bool:
        """Whether a tier is served by a worker process."""
        return self.has_ssd_tier or self.remote_url is not None

    def cpu_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the DRAM tier in blocks of ``block_bytes`` (over all ranks)."""
        return _capacity("cpu_cache_gb", self.num_cpu_blocks, self.cpu_cache_gb, block_bytes)

    def ssd_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the SSD tier in blocks of ``block_bytes``; 0 without that tier."""
        if not self.has_ssd_tier:
            return 0
        return _capacity("ssd_cache_gb", self.num_ssd_blocks, self.ssd_cache_gb, block_bytes)


def _capacity(name: str, blocks: int | None, gigabytes: float | None, block_bytes: int) -> int:
    if blocks is not None:
        return blocks
    if gigabytes is None:
        raise reject(name, None, f"must be set where the cache is kept (or num_{name[:3]}_blocks)")
    capacity = int(gigabytes * 1e9) // block_bytes
    if capacity == 0:
        raise reject(
            name, gigabytes, f"must hold at least one block, which is {block_bytes / 1e9:.6f} GB"
        )
    return capacity
