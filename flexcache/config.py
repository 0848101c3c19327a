"""Configuration: what the model's KV looks like and how much of it is kept where.

Both classes are frozen and are wholly checked when they are made; a bad value is a `ConfigError`
that names the field, the value and what is allowed. The environment is read here and nowhere
else, once, by whoever calls `CacheConfig.from_env`; other processes get the result handed over.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.protocol.address import server_of
from flexcache.remote_url import check_remote_url
from flexcache.request_info import PromptDetail

ENV_PREFIX = "FLEXCACHE_"
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG"
LAYOUT_VERSION = 1
"""Goes up when the bytes that FlexCache stores for the same KV change."""

EVICTION_POLICIES = ("reuse", "lru")
IO_ENGINES = ("auto", "io_uring", "threads")
LAYERWISE_LOADS = ("auto", "on", "off")
WRITE_POLICIES = ("write_through", "write_back", "selective", "adaptive")
SYNC_POLICIES = ("group", "none")
MISMATCH_POLICIES = ("refuse", "clear")
HUGEPAGES = ("transparent", "reserved")
LOG_FORMATS = ("text", "json")
KV_EVENT_FORMATS = ("map", "legacy_array")
KV_EVENT_HASHES = ("int", "bytes")
COMPRESSIONS = ("none", "zstd", "lz4")
_IDLE_EXIT_S = 15.0
_MOST_GB = 1e9  # an exabyte: beyond it lies a slip of the pen


def _reject(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r}: {allowed}")


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            raise _reject(name, value, "must be greater than zero")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model's KV cache.

    Args:
        model_id: Name of the weights; KV of different models never mixes.
        num_layers: Layers that hold KV.
        num_kv_heads: KV heads of the whole model, over all tensor-parallel ranks.
        head_size: Elements of one head of K (and of V). For MLA the latent size (512 + 64).
        dtype: Element type of the KV cache as the engine allocates it.
        use_mla: One latent vector per token instead of K and V per head; every rank holds the same.
        tp_size: Tensor-parallel ranks, each with its share of the heads.
        dp_size: Data-parallel engine ranks.
    """

    model_id: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    use_mla: bool = False
    tp_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model_id, str) or not self.model_id:
            raise _reject("model_id", self.model_id, "must be a non-empty string")
        for name in ("num_layers", "num_kv_heads", "head_size", "tp_size", "dp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _reject(name, value, "must be an integer of at least 1")
        if not isinstance(self.dtype, torch.dtype):
            raise _reject("dtype", self.dtype, "must be a torch.dtype")
        if not self.use_mla and max(self.num_kv_heads, self.tp_size) % min(
            self.num_kv_heads, self.tp_size
        ):
            raise _reject(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide evenly over tp_size = {self.tp_size}, or the other way round",
            )

    @property
    def num_kv_copies(self) -> int:
        """Ranks whose bytes are stored: one for MLA, where every rank holds the same."""
        return 1 if self.use_mla else self.tp_size

    @property
    def token_size_in_bytes_per_rank(self) -> int:
        """KV bytes of one token on one rank, over all layers."""
        if self.use_mla:
            elements = self.head_size
        else:  # more ranks than heads: heads are replicated, as vLLM does
            elements = 2 * max(1, self.num_kv_heads // self.tp_size) * self.head_size
        return self.num_layers * elements * int(self.dtype.itemsize)

    @property
    def token_size_in_bytes(self) -> int:
        """KV bytes of one token as stored: over all layers and all ranks (MLA: one rank's copy)."""
        return self.token_size_in_bytes_per_rank * self.num_kv_copies

    def fingerprint(self, tokens_per_block: int) -> str:
        """What must agree for KV bytes to be interchangeable, in a readable form."""
        attention = "mla" if self.use_mla else "mha"
        return (
            f"{self.model_id}|{str(self.dtype).removeprefix('torch.')}|{attention}"
            f"|layers={self.num_layers}|heads={self.num_kv_heads}|head={self.head_size}"
            f"|tp={self.tp_size}|block={tokens_per_block}|layout=v{LAYOUT_VERSION}"
        )


def _setting(default: Any, help: str, unit: str = "") -> Any:
    return field(default=default, metadata={"help": help, "unit": unit})


@dataclass(frozen=True)
class CacheConfig:
    """How much KV is kept where, and how it moves.

    Every field is also the environment variable ``FLEXCACHE_<FIELD>`` and, in vLLM, a key of
    ``kv_connector_extra_config``. ``docs/configuration.md`` is made from this class.
    """

    tokens_per_block: int = _setting(16, "Tokens of one cached block.", "tokens")
    num_cpu_blocks: int | None = _setting(
        None, "Size of the DRAM tier in blocks. Give this or cpu_cache_gb.", "blocks"
    )
    cpu_cache_gb: float | None = _setting(
        None, "Size of the DRAM tier in GB, over all ranks.", "1e9 bytes"
    )
    hugepages: str = _setting(
        "transparent",
        "Pages of the DRAM tier. transparent: huge ones if the system gives them to shared memory "
        "by advice. reserved: of the system's reserved ones (vm.nr_hugepages), or refuse to start.",
    )
    num_ssd_blocks: int | None = _setting(
        None, "Size of the SSD tier in blocks. Unset, as ssd_cache_gb: no SSD tier.", "blocks"
    )
    ssd_cache_gb: float | None = _setting(
        None, "Size of the SSD tier in GB, over all directories.", "1e9 bytes"
    )
    ssd_cache_dirs: Sequence[str] = _setting(
        (),
        "Directories of the SSD tier, striped block by block (`:` between in the environment).",
    )
    ssd_sync: str = _setting(
        "group",
        "group: a block counts as stored once it is on the device (writes are synced together). "
        "none: left to the system; survives a killed process, not a power cut.",
    )
    ssd_on_mismatch: str = _setting(
        "refuse",
        "What to do with a directory of ours that does not fit (another block size, say): refuse "
        "to start, or clear it.",
    )
    ssd_write_policy: str = _setting(
        "write_through",
        "write_through: every block at once. write_back: when DRAM has too many that the SSD "
        "lacks. selective: blocks seen repeatedly. adaptive: whichever of the first and the third "
        "pays better.",
    )
    remote_url: str | None = _setting(
        None,
        "Cluster store: `mooncake://HOST:PORT`, `s3://BUCKET/PREFIX` (`gs://`, `az://`), "
        "`file:///DIR`.",
    )
    remote_write_policy: str = _setting("write_through", "As ssd_write_policy.")
    remote_compression: str = _setting(
        "none", f"Of the blocks in the store: {', '.join(COMPRESSIONS)}."
    )
    remote_concurrency: int = _setting(
        16, "Requests of one op to an object store at once.", "requests"
    )
    remote_timeout_s: float = _setting(
        3.0, "Deadline of one op of the store. What hangs longer is replaced.", "s"
    )
    remote_lookup_timeout_s: float = _setting(
        0.25, "For how long a match waits to hear what the store has; vLLM's steps do not.", "s"
    )
    remote_absent_ttl_s: float = _setting(
        5.0, "A block that the store did not have is not asked for again for so long.", "s"
    )
    remote_index_blocks: int = _setting(
        262_144,
        "Blocks of the store that are known of at most, at 0.2 to 1 KB of memory each. The least "
        "recently used are forgotten first, and asked for again when they are wanted.",
        "blocks",
    )
    write_min_sightings: int = _setting(
        2, "For selective: the sighting of a block at which it is written.", "sightings"
    )
    write_back_max_dirty: float = _setting(
        0.5, "For write_back: the share of DRAM that may wait to be written.", "of DRAM"
    )
    priority_step_s: float = _setting(
        3600.0, "One step of a put's priority counts as having been used so much later.", "s"
    )
    skip_slow_loads: bool = _setting(
        True, "Do not load what the engine computes faster, by what both were measured to take."
    )
    eviction_policy: str = _setting(
        "reuse",
        "Of DRAM and SSD. lru: what was not used for longest goes first. reuse: what is worth its "
        "place least, by how prompts of its kind came back so far; LRU where that is no better.",
    )
    endpoint: str | None = _setting(
        None,
        "Address of a server that engines share, `ipc://PATH` or `tcp://HOST:PORT`. Unset: "
        "data-parallel ranks share a private one, a single engine keeps its cache to itself.",
    )
    curve_keys: str | None = _setting(
        None, "Directory made by `flexcache server --keygen DIR`. Needed for TCP beyond loopback."
    )
    server_timeout_s: float = _setting(
        3.0,
        "A server that is silent for so long is given up; until one is back all is missed.",
        "s",
    )
    client_timeout_s: float = _setting(
        30.0,
        "An engine that is silent for so long is taken for dead; its tasks are cancelled.",
        "s",
    )
    max_open_tasks: int = _setting(
        4096, "Of one engine at a server. Beyond it gets are misses and puts are dropped.", "tasks"
    )
    io_engine: str = _setting(
        "auto", "SSD I/O: auto (io_uring, else threads), io_uring (or fail), threads."
    )
    direct_io: bool = _setting(True, "O_DIRECT on the SSD tier where the directory allows it.")
    ssd_queue_depth: int = _setting(32, "Block I/Os in flight at the SSD tier.", "I/Os")
    transfer_chunk_mb: float = _setting(
        16.0, "Blocks are handed from tier to tier in chunks of about this size.", "1e6 bytes"
    )
    op_timeout_s: float = _setting(
        30.0, "Deadline of one op. A late disk worker is replaced, a late rank fails.", "s"
    )
    layerwise_load: str = _setting(
        "auto",
        "vLLM computes while a load out of DRAM is coming in, layer by layer: on (its step waits "
        "for the layers), off (requests wait between steps), auto (on while nothing else runs).",
    )
    match_ttl_s: float = _setting(
        120.0, "A match that nobody launches is cancelled after this long.", "s"
    )
    log_level: str = _setting("INFO", "Level of the `flexcache` logger.")
    log_format: str = _setting(
        "text", "Of a server's log: text, or json (one object per line). In vLLM, its own."
    )
    http_endpoint: str | None = _setting(
        None,
        "`HOST:PORT`, or a port on loopback, for `/metrics`, `/healthz`, `/status` and `/cache`. "
        "Unset: none.",
    )
    http_token: str | None = _setting(
        None, "Bearer token that HTTP requests must carry. Needed beyond loopback."
    )
    kv_events: bool = _setting(
        False,
        "Tell of every block that DRAM and the tiers below store or lose (`take_changes`). vLLM "
        "sets it with its own KV events.",
    )
    kv_events_endpoint: str | None = _setting(
        None, "ZMQ address to publish KV events at, `tcp://*:5557` say. Implies kv_events."
    )
    kv_events_replay_endpoint: str | None = _setting(
        None, "ZMQ address that missed events can be asked for at."
    )
    kv_events_topic: str | None = _setting(None, "Unset: `kv@HOST@MODEL`.")
    kv_events_format: str = _setting(
        "map", "map: as vLLM 0.24 and later. legacy_array: as vLLM until 0.23."
    )
    kv_events_hashes: str = _setting(
        "int", "Block hashes as 64-bit integers, vLLM's default, or as bytes."
    )
    kv_events_buffer: int = _setting(10_000, "Kept for replay.", "batches")
    kv_events_queue: int = _setting(
        10_000, "That may wait to be sent; beyond it the oldest are dropped.", "batches"
    )
    trace_dir: str | None = _setting(
        None, "Directory for traces of every call and op (`flexcache replay`). Unset: none."
    )
    trace_file_mb: float = _setting(64.0, "A trace goes on in a new file then.", "1e6 bytes")
    trace_files: int = _setting(4, "Files of a trace that are kept.", "files")

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _typed(spec.name, getattr(self, spec.name)))
        if self.endpoint is not None:  # what an engine's `KVManager.endpoint` says, maybe
            object.__setattr__(self, "endpoint", server_of(self.endpoint))
        _require_positive(
            self,
            "tokens_per_block", "num_cpu_blocks", "cpu_cache_gb", "num_ssd_blocks", "ssd_cache_gb",
            "ssd_queue_depth", "transfer_chunk_mb", "op_timeout_s", "match_ttl_s",
            "server_timeout_s", "client_timeout_s", "max_open_tasks", "remote_concurrency",
            "remote_timeout_s", "remote_lookup_timeout_s", "remote_absent_ttl_s",
            "remote_index_blocks", "write_min_sightings", "write_back_max_dirty",
            "priority_step_s", "kv_events_buffer", "kv_events_queue", "trace_file_mb",
            "trace_files",
        )  # fmt: skip
        for name in ("cpu_cache_gb", "ssd_cache_gb"):
            if (getattr(self, name) or 0) > _MOST_GB:
                raise _reject(name, getattr(self, name), f"must be at most {_MOST_GB:g}")
        self._check_tier("num_cpu_blocks", "cpu_cache_gb")
        self._check_tier("num_ssd_blocks", "ssd_cache_gb")
        if self.has_ssd_tier and not self.ssd_cache_dirs:
            raise _reject("ssd_cache_dirs", (), "an SSD tier needs at least one directory")
        if self.ssd_cache_dirs and not self.has_ssd_tier:
            raise _reject(
                "ssd_cache_gb", None, "ssd_cache_dirs is set: set ssd_cache_gb or num_ssd_blocks"
            )
        if len(set(self.ssd_cache_dirs)) != len(self.ssd_cache_dirs):
            raise _reject("ssd_cache_dirs", self.ssd_cache_dirs, "names a directory twice")
        for directory in self.ssd_cache_dirs:
            _check_writable("ssd_cache_dirs", directory)
        for name, allowed in (
            ("eviction_policy", EVICTION_POLICIES),
            ("hugepages", HUGEPAGES),
            ("io_engine", IO_ENGINES),
            ("ssd_sync", SYNC_POLICIES),
            ("ssd_on_mismatch", MISMATCH_POLICIES),
            ("ssd_write_policy", WRITE_POLICIES),
            ("remote_write_policy", WRITE_POLICIES),
            ("remote_compression", COMPRESSIONS),
            ("layerwise_load", LAYERWISE_LOADS),
            ("log_level", ("DEBUG", "INFO", "WARNING", "ERROR")),
            ("log_format", LOG_FORMATS),
            ("kv_events_format", KV_EVENT_FORMATS),
            ("kv_events_hashes", KV_EVENT_HASHES),
        ):
            if getattr(self, name) not in allowed:
                raise _reject(name, getattr(self, name), f"must be one of {', '.join(allowed)}")
        if self.remote_url is not None:
            check_remote_url(self.remote_url)
        if self.http_token is not None and not _is_visible(self.http_token):
            raise _reject(
                "http_token", "...", "must be visible ASCII characters, no spaces; one at least"
            )
        if self.http_endpoint is not None:
            check_http_endpoint(self.http_endpoint, has_token=self.http_token is not None)
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise _reject(
                "kv_events_replay_endpoint",
                self.kv_events_replay_endpoint,
                "set kv_events_endpoint, whose events it replays",
            )
        if self.trace_dir is not None:
            _check_writable("trace_dir", self.trace_dir)
        if self.remote_lookup_timeout_s >= self.server_timeout_s / 2:
            raise _reject(
                "remote_lookup_timeout_s",
                self.remote_lookup_timeout_s,
                f"must be below half of server_timeout_s, {self.server_timeout_s:g} s",
            )
        if self.write_back_max_dirty > 0.75:
            raise _reject("write_back_max_dirty", self.write_back_max_dirty, "must be at most 0.75")

    def check_has_tier(self) -> None:
        """Raise `ConfigError` if neither a size nor the endpoint of a server is set."""
        if not self.has_cpu_tier and self.endpoint is None:
            raise _reject(
                "cpu_cache_gb",
                None,
                "no tier to cache in: set cpu_cache_gb or num_cpu_blocks, or the endpoint of a "
                "server that has one",
            )

    def _check_tier(self, blocks: str, gigabytes: str) -> None:
        if getattr(self, blocks) is not None and getattr(self, gigabytes) is not None:
            raise _reject(blocks, getattr(self, blocks), f"set either this or {gigabytes}")

    @property
    def has_cpu_tier(self) -> bool:
        """False for an engine that only uses another's server."""
        return self.num_cpu_blocks is not None or self.cpu_cache_gb is not None

    @property
    def has_ssd_tier(self) -> bool:
        return self.num_ssd_blocks is not None or self.ssd_cache_gb is not None

    @property
    def records_changes(self) -> bool:
        """Whether somebody is to be told what the tiers store and lose."""
        return self.kv_events or self.kv_events_endpoint is not None

    @property
    def wanted(self) -> PromptDetail:
        """What of prompts is passed on."""
        if self.records_changes:
            return PromptDetail.TOKENS
        return PromptDetail.INFO if self.trace_dir is not None else PromptDetail.NOTHING

    @property
    def has_workers(self) -> bool:
        """Whether there is a tier that a process of its own serves."""
        return self.has_ssd_tier or self.remote_url is not None

    def cpu_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the DRAM tier in blocks of ``block_bytes`` (over all ranks)."""
        return _capacity("cpu_cache_gb", self.num_cpu_blocks, self.cpu_cache_gb, block_bytes)

    def ssd_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the SSD tier in blocks of ``block_bytes``; 0 without that tier."""
        if not self.has_ssd_tier:
            return 0
        return _capacity("ssd_cache_gb", self.num_ssd_blocks, self.ssd_cache_gb, block_bytes)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        /,
        **overrides: Any,
    ) -> CacheConfig:
        """Make a config from ``defaults``, then the file that ``FLEXCACHE_CONFIG`` names, then
        ``FLEXCACHE_*`` variables, then ``overrides``; the later wins.

        A size given in one form replaces the other form of the same tier given earlier.
        """
        env = os.environ if environ is None else environ
        path = env.get(CONFIG_FILE_ENV)
        content = _read_file(path) if path else {}
        for name in _SERVER_ONLY:  # a server and its engines may share one file
            content.pop(name, None)
        return cls.from_layers(defaults or {}, content, _read_env(env), overrides)

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> CacheConfig:
        """Make a config from tables of settings; the later wins."""
        merged: dict[str, Any] = {}
        for layer in layers:
            _reject_unknown(layer)
            for pair in (("num_cpu_blocks", "cpu_cache_gb"), ("num_ssd_blocks", "ssd_cache_gb")):
                if any(layer.get(name) is not None for name in pair):
                    for name in pair:
                        merged.pop(name, None)
            merged.update(layer)
        return cls(**merged)


_SERVER_ONLY = ("model", "idle_exit_s")


@dataclass(frozen=True)
class ServerConfig:
    """A server process: its cache, and where no engine shall decide it, the model.

    Args:
        cache: Sizes, endpoint, timeouts.
        model: What is cached; None to take it, with the block size, from the first engine.
        idle_exit_s: Stop once the last client has left, or this long after it has died. None:
            serve until stopped.
    """

    cache: CacheConfig
    model: ModelConfig | None = None
    idle_exit_s: float | None = None

    def __post_init__(self) -> None:
        if not self.cache.has_cpu_tier:
            raise _reject("cpu_cache_gb", None, "a server needs cpu_cache_gb or num_cpu_blocks")
        if self.cache.endpoint is None:
            raise _reject("endpoint", None, "a server needs an endpoint")

    @classmethod
    def for_engines(cls, config: CacheConfig, endpoint: str) -> ServerConfig:
        """Of a server that engines start for themselves: it ends with them."""
        return cls(replace(config, endpoint=endpoint), idle_exit_s=_IDLE_EXIT_S)

    @classmethod
    def load(
        cls,
        path: str | None,
        environ: Mapping[str, str] | None = None,
        *,
        default_endpoint: str,
        **overrides: Any,
    ) -> ServerConfig:
        """From a file with the fields of `CacheConfig`, optionally ``idle_exit_s`` and a table
        ``model`` with the fields of `ModelConfig`; then ``FLEXCACHE_*``, then ``overrides``."""
        env = os.environ if environ is None else environ
        path = path or env.get(CONFIG_FILE_ENV)
        content = _read_file(path) if path else {}
        return cls.from_layers({"endpoint": default_endpoint}, content, _read_env(env), overrides)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ServerConfig:
        """The inverse of `to_dict`."""
        return cls.from_layers(content)

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> ServerConfig:
        """Make a config from tables of settings; the later wins."""
        own = {k: v for layer in layers for k, v in layer.items() if k in _SERVER_ONLY}
        others = [{k: v for k, v in layer.items() if k not in _SERVER_ONLY} for layer in layers]
        model = own.get("model")
        return cls(
            CacheConfig.from_layers(*others),
            None if model is None else _model_from_table(model),
            own.get("idle_exit_s"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for another process."""
        content = {k: v for k, v in asdict(self.cache).items() if v is not None}
        if self.model is not None:
            dtype = str(self.model.dtype).removeprefix("torch.")
            content["model"] = asdict(self.model) | {"dtype": dtype}
        if self.idle_exit_s is not None:
            content["idle_exit_s"] = self.idle_exit_s
        return content


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def read_dtype(name: str) -> torch.dtype:
    """Raises `ConfigError` if torch has none of this name."""
    if name not in _DTYPES:
        raise _reject("dtype", name, f"must be one of {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


def _model_from_table(table: Any) -> ModelConfig:
    if not isinstance(table, Mapping):
        raise _reject("model", table, "must be a table")
    try:
        return ModelConfig(**{**table, "dtype": read_dtype(str(table.get("dtype")))})
    except TypeError as error:
        raise _reject("model", dict(table), str(error)) from None


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(CacheConfig)


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type; text from the environment is parsed."""
    if name == "ssd_cache_dirs":
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise _reject(name, value, "must be a list of directories")
        return tuple(os.fspath(item) for item in value)
    try:
        return msgspec.convert(value, _field_types()[name], strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise _reject(name, value, str(error)) from None


def _is_visible(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)


def check_http_endpoint(endpoint: str, has_token: bool) -> tuple[str, int]:
    """Host and port; a bare port is on loopback.

    Raises:
        ConfigError: It is none, or open to other hosts without a token.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65_535:
        raise _reject("http_endpoint", endpoint, "must be HOST:PORT, or a port on loopback")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and not has_token:
        raise _reject("http_endpoint", endpoint, "beyond loopback http_token must be set")
    return host, int(port)


def _check_writable(name: str, directory: str) -> None:
    existing = Path(directory).absolute()
    while not os.access(existing, os.F_OK) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise _reject(name, directory, f"{existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _reject(name, directory, f"{existing} must be writable")


def _capacity(name: str, blocks: int | None, gigabytes: float | None, block_bytes: int) -> int:
    if blocks is not None:
        return blocks
    if gigabytes is None:
        raise _reject(name, None, f"must be set where the cache is kept (or num_{name[:3]}_blocks)")
    capacity = int(gigabytes * 1e9) // block_bytes
    if capacity == 0:
        raise _reject(
            name, gigabytes, f"must hold at least one block, which is {block_bytes / 1e9:.6f} GB"
        )
    return capacity


def field_names() -> list[str]:
    return [spec.name for spec in fields(CacheConfig)]


def _reject_unknown(layer: Mapping[str, Any]) -> None:
    known = field_names()
    for name in layer:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{name}: no such setting; {hint}")


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_FILE_ENV:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        found[name] = text.split(":") if name == "ssd_cache_dirs" and text else text
    return {name: value for name, value in found.items() if value != ""}


def _read_file(path: str) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise _reject(CONFIG_FILE_ENV, path, f"cannot be read: {error.strerror}") from None
    decoders: dict[str, Callable[[bytes], Any]] = {
        ".json": msgspec.json.decode,
        ".toml": _toml_decode,
        ".yaml": _yaml_decode,
    }
    suffix = Path(path).suffix.replace(".yml", ".yaml")
    if suffix not in decoders:
        raise _reject(CONFIG_FILE_ENV, path, "must end in .json, .toml or .yaml")
    try:
        content = decoders[suffix](data)
    except (msgspec.DecodeError, ValueError) as error:
        raise _reject(CONFIG_FILE_ENV, path, f"cannot be parsed: {error}") from None
    if not isinstance(content, dict):
        raise _reject(CONFIG_FILE_ENV, path, "must hold a table of settings")
    return content


def _toml_decode(data: bytes) -> Any:
    if sys.version_info < (3, 11):
        try:
            import tomli  # noqa: F401
        except ImportError:
            raise MissingDependencyError("a .toml config needs the package tomli here") from None
    return msgspec.toml.decode(data)


def _yaml_decode(data: bytes) -> Any:
    try:
        return msgspec.yaml.decode(data)
    except ImportError:
        raise MissingDependencyError("a .yaml config needs the package pyyaml") from None


def describe_settings() -> list[dict[str, str]]:
    """One row per setting, for the documentation and ``flexcache config``."""
    rows = []
    for spec in fields(CacheConfig):
        default = "" if spec.default is MISSING or spec.default is None else spec.default
        if default == ():
            default = ""
        rows.append(
            {
                "field": spec.name,
                "environment": ENV_PREFIX + spec.name.upper(),
                "default": str(default),
                "unit": spec.metadata["unit"],
                "meaning": spec.metadata["help"],
            }
        )
    return rows
