"""Settings of a cache, and of a server process that keeps one.

``docs/operate/configuration.md`` is generated from `CacheConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta

from flexcache.config import sources
from flexcache.config.model import ModelConfig
from flexcache.config.quotas import check_quotas
from flexcache.config.remote_url import STORES, check_remote_url
from flexcache.config.values import (
    MAX_PORT,
    Count,
    Gigabytes,
    Megabytes,
    Patience,
    Retention,
    Seconds,
    check_http_endpoint,
    check_writable,
    is_loopback,
    parse,
    read_endpoint,
    read_fields,
    read_path,
    read_paths,
    read_peers,
    read_transport,
    reject,
    server_of,
    setting,
    split_tcp,
)
from flexcache.ids import PromptDetail

EVICTION_POLICIES: Mapping[str, tuple[str, str]] = {
    "lru": ("flexcache.cache.eviction_policy:LruPolicy", "evicts the least recently used blocks"),
    "density": ("flexcache.cache.density:DensityPolicy",
                "evicts the blocks that promise the fewest hits per time kept, by the return times "
                "of similar prompts; LRU where that is no better"),
}  # fmt: skip
"""The class of each eviction policy that has a name, as ``MODULE:CLASS``, and what it does."""
WritePolicy = Literal["write_through", "write_back", "selective"]
SsdSync = Literal["group", "none"]
SSD_SYNCS: tuple[str, ...] = get_args(SsdSync)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much KV is kept where, and how it moves.

    Every field is also the environment variable ``FLEXCACHE_<FIELD>`` and, in vLLM, a key of
    ``kv_connector_extra_config``.
    """

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
        "write_through: every block at once. write_back: when half of DRAM holds what the SSD "
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
        f"Remote store: {', '.join(f'`{form}`' for form in STORES)}, or a store of your own: "
        "`ITS.MODULE://...`.",
    )
    remote_write_policy: WritePolicy = setting("write_through", "As ssd_write_policy.")
    remote_write_mb_s: Megabytes | None = setting(
        None, "As ssd_write_mb_s: to leave room on a shared uplink.", "1e6 bytes/s"
    )
    remote_compression: Literal["none", "zstd", "lz4"] = setting(
        "none", "Compression of blocks in the remote store: none, zstd, lz4."
    )
    remote_timeout_s: Seconds = setting(
        3.0, "Deadline of one op of the remote store. A worker that exceeds it is replaced.", "s"
    )
    # Short, and the answer may be nothing: a store that answers later cannot be asked before each
    # prompt, and its breaker opens.
    remote_lookup_timeout_s: Seconds = setting(
        0.25, "How long a match waits to learn what the store has. vLLM's steps do not wait.", "s"
    )
    peer_endpoint: str | None = setting(
        None,
        "`tcp://HOST:PORT` at which other hosts' caches may read this one's DRAM; PORT + 1 is used "
        "too. Beyond loopback it needs curve_keys. Unset: none may.",
    )
    peers: Sequence[str] = setting(
        (),
        "Other hosts' caches, whose DRAM is read before the remote store: `tcp://HOST:PORT`, or "
        "`dns://NAME:PORT` for all addresses of a name (separated by `,` in the environment). This "
        "cache itself may be among them.",
        read=read_peers,
    )
    peer_transport: str = setting(
        "tcp",
        "How blocks come from other hosts: `tcp`; or `rdma`, by Mooncake's Transfer Engine (extra "
        "`mooncake`), with `rdma:DEVICE,...` by these network cards alone. Hosts that do not both "
        "have it use `tcp`.",
        read=read_transport,
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
    max_pinned_share: Annotated[float, Meta(ge=0, le=0.9)] = setting(
        0.5,
        "Share of DRAM, and of the SSD tier, that pins may hold together, at most 0.9; 0: no pins.",
        "of a tier",
    )
    # `reuse`, its predecessor, fell under LRU on traces that it was not tuned on.
    eviction_policy: str = setting(
        "density",
        "For DRAM and SSD. "
        + "".join(f"{name}: {what}. " for name, (_, what) in EVICTION_POLICIES.items())
        + "`MODULE:CLASS`: a policy of your own.",
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
    store_shards: Count | None = setting(
        None,
        "Parts in which blocks are stored, each some of the KV heads: then engines of other "
        "tensor-parallel sizes find them, in a peer's DRAM, on SSD and in the remote store. A "
        "multiple of each of these sizes that divides the KV heads. Unset: the engine's own size. "
        "Models with states only take that.",
    )
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
    io_engine: Literal["auto", "io_uring", "threads"] = setting(
        "auto", "SSD I/O: auto (io_uring, else threads), io_uring (or fail), threads."
    )
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
    answer_interval_tokens: Annotated[int, Meta(ge=0)] = setting(
        256,
        "vLLM, models of full attention: a running answer is stored every so many tokens, in whole "
        "blocks, so that an engine that dies loses no more. 0: at its end only.",
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
    kv_events_hashes: Literal["int", "int_first", "bytes"] = setting(
        "int",
        "Block hashes as the last 64 bits of keys, vLLM's default; the first 64, as SGLang has "
        "them; or as bytes.",
    )
    kv_events_locality: bool = setting(
        False,
        "KV events tell SSD (LOCAL) from remote store (REMOTE), as vLLM 0.33 does. Dynamo then "
        "forgets what only the store has.",
    )
    kv_events_runs: bool = setting(
        False,
        "`kv_events_endpoint` tells SSD and remote store by one name for 16 blocks, which only "
        "FlexCache's router reads: its index and these events shrink to a sixteenth.",
    )
    trace_dir: str | None = setting(
        None,
        "Directory for traces of every call and op (`flexcache replay`). Unset: no trace.",
        read=read_path,
    )
    trace_file_mb: Megabytes = setting(
        64.0, "Size at which a trace continues in a new file.", "1e6 bytes"
    )

    def __new__(cls, **settings: Any) -> CacheConfig:
        """Refuse settings of earlier versions with what replaces them."""
        sources.refuse_removed(settings, sources.REMOVED)
        return super().__new__(cls)

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
    def has_cpu_tier(self) -> bool:
        """False for an engine that only uses a server's cache."""
        return self.num_cpu_blocks is not None or self.cpu_cache_gb is not None

    @property
    def has_ssd_tier(self) -> bool:
        return self.num_ssd_blocks is not None or self.ssd_cache_gb is not None

    @property
    def has_workers(self) -> bool:
        """Whether a tier is served by a worker process."""
        return self.has_ssd_tier or self.remote_url is not None or self.has_peers

    @property
    def has_peers(self) -> bool:
        """Whether other hosts read this cache's DRAM, or it reads theirs."""
        return self.peer_endpoint is not None or bool(self.peers)

    @property
    def rdma_devices(self) -> str | None:
        """Network cards for peers, with ``,`` between, empty for all; None for TCP."""
        name, _, devices = self.peer_transport.partition(":")
        return devices if name == "rdma" else None

    def cpu_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the DRAM tier in blocks of ``block_bytes`` (over all ranks)."""
        return _capacity("cpu_cache_gb", self.num_cpu_blocks, self.cpu_cache_gb, block_bytes)

    def ssd_blocks_for(self, block_bytes: int) -> int:
        """Capacity of the SSD tier in blocks of ``block_bytes``; 0 without that tier."""
        if not self.has_ssd_tier:
            return 0
        return _capacity("ssd_cache_gb", self.num_ssd_blocks, self.ssd_cache_gb, block_bytes)

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
                sources.require_known(layer, known, sources.REMOVED)
            return cls(**sources.merge(*layers))


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
    name = config.eviction_policy
    if name not in EVICTION_POLICIES and ":" not in name:
        allowed = f"must be {', '.join(EVICTION_POLICIES)}, or the path of a class, MODULE:CLASS"
        raise reject("eviction_policy", name, allowed)
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
    if config.has_peers:
        name = "peers" if config.peers else "peer_endpoint"
        hint = "peers read from DRAM to DRAM: set num_cpu_blocks above 0, or cpu_cache_gb"
        raise reject(name, getattr(config, name), hint)
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
    _check_peers(config)
    token = config.http_token
    if token is not None and not (token and all("!" <= character <= "~" for character in token)):
        allowed = "must be visible ASCII characters, no spaces; one at least"
        raise reject("http_token", "...", allowed)
    if config.http_endpoint is not None:
        check_http_endpoint(config.http_endpoint, has_token=token is not None)
    replay = config.kv_events_replay_endpoint
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(config, name)
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise reject(name, address, "must be tcp://HOST:PORT or ipc://PATH")
    if replay is not None and config.kv_events_endpoint is None:
        hint = "set kv_events_endpoint, whose events it replays"
        raise reject("kv_events_replay_endpoint", replay, hint)


def _check_peers(config: CacheConfig) -> None:
    """Raise `ConfigError` for addresses of peers that cannot or must not be used."""
    if config.peer_endpoint is not None:
        try:
            host, port = split_tcp(config.peer_endpoint)
        except ValueError as error:
            raise reject("peer_endpoint", config.peer_endpoint, str(error)) from None
        if port == MAX_PORT:
            raise reject("peer_endpoint", config.peer_endpoint, "the next port is used too")
        if config.curve_keys is None and not is_loopback(host):
            raise reject("peer_endpoint", config.peer_endpoint, _NEEDS_KEYS)
    for peer in config.peers:
        host, _ = split_tcp("tcp://" + peer.partition("://")[2])
        if config.curve_keys is None and not is_loopback(host):
            raise reject("peers", peer, _NEEDS_KEYS)


_NEEDS_KEYS = "beyond loopback curve_keys must be set, the same on all hosts"
_IDLE_EXIT_S = 15.0
_IdleExit = Annotated[float, Meta(ge=0)] | None


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server process: its cache and, unless the first engine decides it, the model.

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
        idle_exit_s = parse("idle_exit_s", self.idle_exit_s, _IdleExit)
        object.__setattr__(self, "idle_exit_s", idle_exit_s)
        if not self.cache.has_cpu_tier:
            raise reject("cpu_cache_gb", None, "a server needs cpu_cache_gb or num_cpu_blocks")
        if self.cache.endpoint is None:
            raise reject("endpoint", None, "a server needs an endpoint")

    @classmethod
    def for_engines(cls, config: CacheConfig, endpoint: str) -> ServerConfig:
        """Make the config of a server that engines start for themselves and that ends with them."""
        return cls(cache=replace(config, endpoint=endpoint), idle_exit_s=_IDLE_EXIT_S)

    @classmethod
    def load(
        cls,
        path: str | None,
        environ: Mapping[str, str] | None = None,
        *,
        default_endpoint: str,
        **overrides: Any,
    ) -> ServerConfig:
        """Read a file, then ``FLEXCACHE_*`` variables, then ``overrides``; later ones win.

        The file has the fields of `CacheConfig`, optionally ``idle_exit_s``, and a table ``model``
        with the fields of `ModelConfig`.
        """
        file, variables = sources.read_layers(environ, path)
        given = sources.Layer(overrides, "an argument")
        return cls.from_layers({"endpoint": default_endpoint}, file, variables, given)

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> ServerConfig:
        """Make a config from tables of settings, of which later ones win; inverts `to_dict`."""
        names = sources.SERVER_ONLY
        own = {k: v for layer in layers for k, v in layer.items() if k in names}
        others = [sources.without(layer, names) for layer in layers]
        model = own.get("model")
        with sources.naming_origins(layers):
            return cls(
                cache=CacheConfig.from_layers(*others),
                model=None if model is None else ModelConfig.from_table(model),
                idle_exit_s=own.get("idle_exit_s"),
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, to be sent to another process."""
        content = {k: v for k, v in asdict(self.cache).items() if v is not None}
        if self.model is not None:
            dtype = str(self.model.dtype).removeprefix("torch.")
            content["model"] = asdict(self.model) | {"dtype": dtype}
        if self.idle_exit_s is not None:
            content["idle_exit_s"] = self.idle_exit_s
        return content
