"""CacheConfig: the settings of a cache. ``docs/configuration.md`` is generated from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_type_hints

from flexcache.config import sources
from flexcache.config.address import check_http_endpoint, server_of
from flexcache.config.quotas import check_quotas
from flexcache.config.remote_url import check_remote_url
from flexcache.config.tiers import TierConfig
from flexcache.config.values import (
    Count,
    Megabytes,
    Patience,
    Seconds,
    check_writable,
    read_endpoint,
    read_fields,
    read_path,
    reject,
    setting,
)
from flexcache.request_info import PromptDetail


@dataclass(frozen=True, kw_only=True)
class CacheConfig(TierConfig):
    """How much KV is kept where, and how it moves.

    Every field is also the environment variable ``FLEXCACHE_<FIELD>`` and, in vLLM, a key of
    ``kv_connector_extra_config``.
    """

    endpoint: str | None = setting(
        None,
        "Address of a server that engines share, `ipc://PATH` or `tcp://HOST:PORT`. Unset: "
        "data-parallel ranks share a private server, a single engine keeps its own cache.",
        read=read_endpoint,
    )
    curve_keys: str | None = setting(
        None,
        "Directory made by `flexcache server --keygen DIR`. Required for TCP beyond loopback.",
        read=read_path,
    )
    server_timeout_s: Patience = setting(
        3.0, "A server silent for this long is given up; every get misses until one is back.", "s"
    )
    client_timeout_s: Seconds = setting(
        30.0, "An engine silent for this long is considered dead; its tasks are cancelled.", "s"
    )
    model_version: str | None = setting(
        None,
        "Names the model's weights, beside what is known of them: engines share KV only with "
        "others of the same version. `new_weights` and `POST /cache/weights` replace it.",
    )
    max_open_tasks: Count = setting(
        4096,
        "Open tasks of one engine at a server. Beyond it gets are misses and puts are dropped.",
        "tasks",
    )
    io_engine: Literal["auto", "io_uring", "threads"] = setting(
        "auto", "SSD I/O: auto (io_uring, else threads), io_uring (or fail), threads."
    )
    direct_io: bool = setting(True, "O_DIRECT on the SSD tier where the directory allows it.")
    ssd_queue_depth: Count = setting(32, "Block I/Os in flight at the SSD tier.", "I/Os")
    transfer_chunk_mb: Megabytes = setting(
        16.0, "Blocks move from tier to tier in chunks of about this size.", "1e6 bytes"
    )
    op_timeout_s: Seconds = setting(
        30.0, "Deadline of one op. A late disk worker is replaced, a late rank fails.", "s"
    )
    tail_interval_tokens: Count | None = setting(
        None,
        "vLLM, models with sliding windows or chunked attention: tokens between the points of a "
        "prompt at which what these layers need is stored, besides its end, so that another prompt "
        "can resume there. Unset: four windows, at least 512.",
        "tokens",
    )
    layerwise_load: Literal["auto", "on", "off"] = setting(
        "auto",
        "vLLM computes while a load from DRAM arrives, layer by layer: on (its step waits for the "
        "layers), off (requests wait between steps), auto (on while nothing else runs; in vLLM "
        "also if the load is short beside the step).",
    )
    match_ttl_s: Seconds = setting(
        120.0, "A match that is not launched is cancelled after this long.", "s"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting(
        "INFO", "Level of the `flexcache` logger."
    )
    log_format: Literal["text", "json"] = setting(
        "text",
        "Format of a server's log: text, or json (one object per line). vLLM uses its own.",
    )
    http_endpoint: str | None = setting(
        None,
        "`HOST:PORT`, or a port on loopback, for `/metrics`, `/healthz`, `/status` and `/cache`. "
        "Unset: no HTTP.",
    )
    http_token: str | None = setting(
        None,
        "Bearer token that HTTP requests must carry. Required beyond loopback; without it only "
        "this user and root are answered.",
        is_secret=True,
    )
    kv_events: bool = setting(
        False,
        "Record every block that DRAM and the tiers below store or lose, for `take_changes`. vLLM "
        "and SGLang set it with their own KV events.",
    )
    kv_events_endpoint: str | None = setting(
        None,
        "ZMQ address to publish KV events at, for example `tcp://*:5558`. Implies kv_events.",
        read=read_endpoint,
    )
    kv_events_replay_endpoint: str | None = setting(
        None, "ZMQ address that serves missed events again.", read=read_endpoint
    )
    kv_events_topic: str | None = setting(
        None, "Topic of published KV events. Unset: `kv@HOST@MODEL`."
    )
    kv_events_format: Literal["map", "legacy_array"] = setting(
        "map", "map: as vLLM 0.24 and later. legacy_array: as vLLM until 0.23."
    )
    kv_events_hashes: Literal["int", "int_first", "bytes"] = setting(
        "int",
        "Block hashes as the last 64 bits of keys, vLLM's default; the first 64, as SGLang has "
        "them; or as bytes.",
    )
    kv_events_buffer: Count = setting(10_000, "Batches of KV events kept for replay.", "batches")
    kv_events_queue: Count = setting(
        10_000, "Batches of KV events that may wait; beyond it the oldest are dropped.", "batches"
    )
    trace_dir: str | None = setting(
        None,
        "Directory for traces of every call and op (`flexcache replay`). Unset: no trace.",
        read=read_path,
    )
    trace_file_mb: Megabytes = setting(
        64.0, "Size at which a trace continues in a new file.", "1e6 bytes"
    )
    trace_files: Count = setting(4, "Files of a trace to keep.", "files")

    def __post_init__(self) -> None:
        _check_gone(self)
        read_fields(self, _hints())
        if self.model_version is not None:
            _check_version(self.model_version)
        if self.endpoint is not None:  # possibly the address that an engine's manager hands out
            object.__setattr__(self, "endpoint", server_of(self.endpoint))
        _check_sizes(self)
        check_quotas(self.quotas, self.cpu_cache_gb, self.ssd_cache_gb)
        _check_policies(self)
        _check_ssd_directories(self)
        _check_without_dram(self)
        _check_endpoints(self)
        if self.trace_dir is not None:
            check_writable("trace_dir", self.trace_dir)
        if self.remote_lookup_timeout_s >= self.server_timeout_s / 2:
            raise reject(
                "remote_lookup_timeout_s",
                self.remote_lookup_timeout_s,
                f"must be below half of server_timeout_s, {self.server_timeout_s:g} s",
            )

    def check_has_tier(self) -> None:
        """Raise `ConfigError` if neither a size nor the endpoint of a server is set."""
        if not self.has_cpu_tier and self.endpoint is None:
            raise reject(
                "cpu_cache_gb",
                None,
                "no tier to cache in: set cpu_cache_gb or num_cpu_blocks, or the endpoint of a "
                "server that has one",
            )

    @property
    def records_changes(self) -> bool:
        """Whether what the tiers store and lose is recorded for an observer."""
        return self.kv_events or self.kv_events_endpoint is not None

    @property
    def prompt_detail(self) -> PromptDetail:
        """How much of each prompt observers need."""
        if self.records_changes:
            return PromptDetail.TOKENS
        return PromptDetail.INFO if self.trace_dir is not None else PromptDetail.NOTHING

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        origin: str = "an argument",
        /,
        **overrides: Any,
    ) -> CacheConfig:
        """Make a config from ``defaults``, then the file that ``FLEXCACHE_CONFIG`` names, then
        ``FLEXCACHE_*`` variables, then ``overrides``; later ones win.

        Errors call ``overrides`` by their ``origin``.

        A size given in one form replaces the other form of the same tier given earlier.
        """
        file, variables = sources.read_layers(environ)
        for name in sources.SERVER_ONLY:
            file.pop(name, None)
        return cls.from_layers(defaults or {}, file, variables, sources.Layer(overrides, origin))

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> CacheConfig:
        """Make a config from tables of settings; later ones win."""
        known = [spec.name for spec in fields(cls)]
        with sources.naming_origins(layers):
            for layer in layers:
                sources.require_known(layer, known)
            return cls(**sources.merge(*layers))


def _check_version(version: str) -> None:
    if not 0 < len(version) <= 256 or not version.isprintable():
        raise reject("model_version", version, "must be 1 to 256 printable characters")


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(CacheConfig, include_extras=True)


def _check_gone(config: CacheConfig) -> None:
    """Raise `ConfigError` for a value that earlier versions had, with what takes its place."""
    for name in ("ssd_write_policy", "remote_write_policy"):
        if getattr(config, name) == "density":
            hint = "is gone: write_through finds as much, selective writes least"
            raise reject(name, "density", hint)


def _check_sizes(config: CacheConfig) -> None:
    for blocks, gigabytes in (
        ("num_cpu_blocks", "cpu_cache_gb"),
        ("num_ssd_blocks", "ssd_cache_gb"),
    ):
        num_blocks = getattr(config, blocks)
        if num_blocks is not None and getattr(config, gigabytes) is not None:
            raise reject(blocks, num_blocks, f"set either this or {gigabytes}")


def _check_policies(config: CacheConfig) -> None:
    if config.ssd_compression != "none" and config.ssd_past_dram == "always":
        hint = "what ssd_compression has packed is unpacked in DRAM: set it to auto or never"
        raise reject("ssd_past_dram", "always", hint)


def _check_without_dram(config: CacheConfig) -> None:
    """Raise `ConfigError` for what a cache without a DRAM tier cannot do."""
    if config.num_cpu_blocks != 0:
        return
    if not config.has_ssd_tier:
        raise reject("num_cpu_blocks", 0, "without a DRAM tier there must be an SSD tier")
    if config.remote_url is not None:
        hint = "a remote store is written from DRAM: set num_cpu_blocks above 0, or cpu_cache_gb"
        raise reject("remote_url", config.remote_url, hint)
    if config.ssd_write_policy == "write_back":
        raise reject("ssd_write_policy", "write_back", "there is no DRAM tier to write back from")
    if config.ssd_past_dram == "never":
        raise reject("ssd_past_dram", "never", "there is no DRAM tier to load through")
    if config.ssd_compression != "none":
        hint = "without a DRAM tier, ranks write blocks to SSD themselves, and as they are"
        raise reject("ssd_compression", config.ssd_compression, hint)


def _check_ssd_directories(config: CacheConfig) -> None:
    directories = config.ssd_cache_dirs
    if config.has_ssd_tier and not directories:
        raise reject("ssd_cache_dirs", (), "an SSD tier needs at least one directory")
    if directories and not config.has_ssd_tier:
        hint = "ssd_cache_dirs is set: set ssd_cache_gb or num_ssd_blocks"
        raise reject("ssd_cache_gb", None, hint)
    for directory in directories:
        check_writable("ssd_cache_dirs", directory)


def _check_endpoints(config: CacheConfig) -> None:
    if config.remote_url is not None:
        check_remote_url(config.remote_url)
    token = config.http_token
    if token is not None and not (token and all("!" <= character <= "~" for character in token)):
        allowed = "must be visible ASCII characters, no spaces; one at least"
        raise reject("http_token", "...", allowed)
    if config.http_endpoint is not None:
        check_http_endpoint(config.http_endpoint, has_token=token is not None)
    replay = config.kv_events_replay_endpoint
    if replay is not None and config.kv_events_endpoint is None:
        hint = "set kv_events_endpoint, whose events it replays"
        raise reject("kv_events_replay_endpoint", replay, hint)
