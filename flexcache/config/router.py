"""RouterConfig: the settings of `flexcache router`. Part of ``docs/operate/configuration.md``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from flexcache.config import sources
from flexcache.config.values import (
    Count,
    Megabytes,
    Seconds,
    is_loopback,
    parse,
    read_endpoint,
    read_fields,
    read_path,
    reject,
    setting,
    split_tcp,
)

Port = Annotated[int, Meta(ge=0, le=65_535)]
_ANY_ADDRESS = {"0.0.0.0", "::"}
_LISTING = ("workers", "shared_events", "shared_cache_url")
"""Keys of a file that list workers, in tables. They are read again when the file changes."""


def _texts(name: str, value: Any, *, is_secret: bool = False) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise reject(name, "..." if is_secret else value, "must be a list of texts")
    return tuple(value)


def _pair(name: str, value: Any) -> str:
    """Return an endpoint, and another that repeats what was missed."""
    pair: str = parse(name, value, str)
    endpoint, _, replay = pair.partition(",")
    for each in (endpoint, replay):
        try:
            _ = each.startswith("ipc://") or split_tcp(each)
        except ValueError:
            hint = "must be ENDPOINT,REPLAY, each tcp://HOST:PORT or ipc://PATH"
            raise reject(name, pair, hint) from None
    return f"{read_endpoint(name, endpoint)},{read_endpoint(name, replay)}"


def _pairs(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_pair(name, pair) for pair in _texts(name, value))


def _tokenizer(name: str, value: Any) -> str:
    """Return the name of a tokenizer, or the path of a directory."""
    text: str = parse(name, value, str)
    return read_path(name, text) if text.startswith(("/", "~", ".", "$")) else text


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Where a router listens, which engines it knows, and how it chooses among them.

    Every field is also the environment variable ``FLEXCACHE_ROUTER_<FIELD>``, where lists are
    separated by spaces.
    """

    host: str = setting("127.0.0.1", "Address that clients connect to.")
    port: Port = setting(8000, "Port that clients connect to.")
    workers: Sequence[str] = setting(
        (),
        "Engines: `http://HOST:PORT`, or `http+dns://NAME:PORT` and "
        "`http+k8s://SERVICE.NAMESPACE:PORT` for all addresses of a name or service; with "
        "`,data_parallel_size=N` each of N ranks, with `,role=prefill|decode` for one part of a "
        "request, with `,peer_port=N` and `,transfer=NAME` where others fetch its KV. In a file: "
        "tables `[[workers]]` with `url`, `data_parallel_size`, `role`, `peer_port`, `transfer`, "
        "`events`, `shared_events`, `cache_url`.",
        read=_texts,
    )
    events: Sequence[str] = setting(
        (),
        "Publishers of KV events: `URL=ENDPOINT[,REPLAY]` for an engine's, `*=ENDPOINT[,REPLAY]` "
        "for a cache that all engines share.",
        read=_texts,
    )
    caches: Sequence[str] = setting(
        (),
        "HTTP API of FlexCache, which the router asks to load a prompt's blocks from SSD or remote "
        "store as soon as it has chosen an engine, and without KV events for the sizes of its "
        "tiers: `URL=http://HOST:PORT` for an engine's, `*=http://HOST:PORT` for a cache "
        "that all engines share.",
        read=_texts,
    )
    cache_token: str | None = setting(
        None, "Bearer token of the caches (their `http_token`).", is_secret=True
    )
    worker_file: str | None = setting(
        None,
        "File with tables `[[workers]]`, `shared_events` and `shared_cache_url`, read again when "
        "it changes. Unset: the file of the settings, if it has them.",
        read=read_path,
    )
    allowed_workers: Sequence[str] = setting(
        (),
        "Regular expressions; `POST /workers` takes only URLs that one of them matches whole. "
        "Listed engines are always allowed.",
        read=_texts,
    )
    engine_key_file: str | None = setting(
        None,
        "File with the API key that the engines require. Unset: the client's key is passed on.",
        read=read_path,
    )
    policy: str = setting("ours", "How an engine is chosen; see `flexcache router simulate`.")
    approximate: Literal["auto", "always", "never"] = setting(
        "auto",
        "Assume that an engine holds the prompts that were sent to it. auto: for engines without "
        "KV events.",
    )
    max_blocks: Count = setting(
        10_000_000, "Blocks in the index at most, about 180 bytes each.", "blocks"
    )
    tokenizer: str | None = setting(
        None,
        "Directory or name of the model's tokenizer. Unset: as the engines report their model.",
        read=_tokenizer,
    )
    max_requests_per_worker: Count | None = setting(
        None, "An engine with this many requests is busy. Unset: no limit.", "requests"
    )
    max_wait_s: Seconds | None = setting(
        None, "An engine with a longer predicted wait is busy. Unset: no limit.", "s"
    )
    queue_size: Count = setting(
        1024, "Requests that wait while every engine is busy; others get 429.", "requests"
    )
    queue_timeout_s: Seconds = setting(30.0, "Longest wait for an engine, then 429.", "s")
    max_body_mb: Megabytes = setting(64.0, "Largest body of a request.", "1e6 bytes")
    drain_timeout_s: Seconds = setting(
        30.0, "How long running requests may take to end after SIGTERM.", "s"
    )
    api_keys: Sequence[str] = setting(
        (),
        "Keys, one of which clients must present. Unset, also the file: none.",
        is_secret=True,
        read=partial(_texts, is_secret=True),
    )
    api_key_file: str | None = setting(
        None, "File with further keys of clients, one per line.", read=read_path
    )
    tls_cert: str | None = setting(
        None, "Certificate chain (PEM). Unset: plain HTTP.", read=read_path
    )
    tls_key: str | None = setting(None, "Private key of the certificate (PEM).", read=read_path)
    proxies: Annotated[int, Meta(ge=0)] = setting(
        0, "Proxy processes beside the deciding one. 0: one process does both.", "processes"
    )
    control_host: str = setting(
        "127.0.0.1", "Address of the control API: workers, decisions, metrics, `/ui`."
    )
    control_port: Port = setting(8090, "Port of the control API.")
    control_token: str | None = setting(
        None, "Bearer token of the control API. Required beyond loopback.", is_secret=True
    )
    gateway_host: str = setting("127.0.0.1", "Address of the endpoint picker.")
    gateway_port: Port | None = setting(
        None, "Port of the endpoint picker for Envoy (ext_proc, gRPC). Unset: there is none."
    )
    sync_endpoint: str | None = setting(
        None,
        "`ENDPOINT,REPLAY` where other routers follow this one's requests, unencrypted.",
        read=_pair,
    )
    peers: Sequence[str] = setting(
        (),
        "`ENDPOINT,REPLAY` of each other router before the engines. At the start the index is "
        "taken over from one.",
        read=_pairs,
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting(
        "INFO", "Level of the `flexcache` logger."
    )
    log_format: Literal["text", "json"] = setting("text", "Format of the log.")

    def __new__(cls, **settings: Any) -> RouterConfig:
        """Refuse settings of earlier versions with what replaces them."""
        sources.refuse_removed(settings, sources.REMOVED_OF_ROUTER)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        read_fields(self, _hints())
        _check_patterns(self)
        _check_ports(self)
        _check_access(self)
        _check_sync(self)

    @classmethod
    def load(
        cls, path: str | None, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> RouterConfig:
        """Read a file, then ``FLEXCACHE_ROUTER_*`` variables, then ``overrides``; later ones win.

        Args:
            path: The file; if None, the one that ``FLEXCACHE_ROUTER_CONFIG`` names, if any. Its
                list of workers is left to `worker_file`.
        """
        env = os.environ if environ is None else environ
        file, variables = sources.read_layers(env, path, sources.ROUTER_PREFIX)
        listing = [file.pop(name, None) for name in _LISTING]
        if any(listing):
            own = path or sources.file_of(env, sources.ROUTER_PREFIX)
            file.setdefault("worker_file", os.path.abspath(str(own)))
        return cls.from_layers(file, variables, sources.Layer(overrides, "an argument"))

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> RouterConfig:
        """Make a config from tables of settings; later ones win."""
        known = [spec.name for spec in fields(cls)]
        with sources.naming_origins(layers):
            for layer in layers:
                sources.require_known(layer, known, sources.REMOVED_OF_ROUTER)
            return cls(**sources.merge(*layers))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, secrets included, to be sent to a process of this router."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {k: msgspec.to_builtins(v) for k, v in values.items() if v is not None}


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(RouterConfig, include_extras=True)


def _check_patterns(config: RouterConfig) -> None:
    for pattern in config.allowed_workers:
        try:
            re.compile(pattern)
        except re.error as error:
            raise reject("allowed_workers", pattern, f"is no regular expression: {error}") from None


def _check_ports(config: RouterConfig) -> None:
    hosts: dict[int, list[tuple[str, str]]] = {}
    for name in ("port", "control_port", "gateway_port"):
        port, host = getattr(config, name), getattr(config, name.removesuffix("port") + "host")
        if not port:  # unset, or any free one
            continue
        for other, taken in hosts.get(port, []):
            if host == taken or _ANY_ADDRESS & {host, taken}:
                raise reject(name, port, f"must differ from {other}")
        hosts.setdefault(port, []).append((name, host))


def _check_access(config: RouterConfig) -> None:
    for name in ("control_token", "cache_token"):
        token = getattr(config, name)
        if token is not None and not (token and all("!" <= each <= "~" for each in token)):
            allowed = "must be visible ASCII characters, no spaces; one at least"
            raise reject(name, "...", allowed)
    if config.control_token is None and not is_loopback(config.control_host):
        raise reject("control_host", config.control_host, "beyond loopback set control_token")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise reject("tls_cert", config.tls_cert, "set both tls_cert and tls_key, or neither")
    for name in ("worker_file", "api_key_file", "engine_key_file", "tls_cert", "tls_key"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise reject(name, path, "is not a file")


def _check_sync(config: RouterConfig) -> None:
    if config.peers and config.sync_endpoint is None:
        raise reject("sync_endpoint", None, "with peers, they must be able to follow this router")
