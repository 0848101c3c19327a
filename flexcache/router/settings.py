"""What the parts of a router take from its settings."""

from __future__ import annotations

from pathlib import Path

from flexcache.config.router import RouterConfig
from flexcache.config.values import reject
from flexcache.processes import raise_limit
from flexcache.router.discovery.file import WorkerFile
from flexcache.router.discovery.listing import Listing, parse_options
from flexcache.router.proxy.config import MAX_CONNECTIONS, ProxyConfig, read_api_keys
from flexcache.router.router import KVRouter

_OTHER_DESCRIPTORS = 320
"""What a process has open besides: the control API, probes, KV events, peers."""


def address_of(config: RouterConfig) -> str:
    """Return where clients connect."""
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{_bracketed(config.host)}:{config.port}"


def control_address_of(config: RouterConfig) -> str:
    """Return where the control API is."""
    return f"http://{_bracketed(config.control_host)}:{config.control_port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def proxy_config(config: RouterConfig) -> ProxyConfig:
    """Return the part of the settings that a proxy needs.

    Raises:
        ConfigError: The file of API keys cannot be used.
    """
    room = clients_of(raise_limit())
    file = config.api_key_file
    keys = [] if file is None else read_api_keys(Path(file))
    return ProxyConfig(
        api_keys=(*config.api_keys, *keys),
        tls_cert=None if config.tls_cert is None else Path(config.tls_cert),
        tls_key=None if config.tls_key is None else Path(config.tls_key),
        max_connections=min(room, MAX_CONNECTIONS),
        max_body_bytes=int(config.max_body_mb * 1e6),
        client_idle_s=config.idle_timeout_s,
        body_timeout_s=config.idle_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        queue_timeout_s=config.queue_timeout_s,
        max_retries=config.max_retries,
        stop_deadline_s=config.drain_timeout_s,
        reuse_port=config.proxies > 0,
    )


def clients_of(num_descriptors: int) -> int:
    """Return how many clients a process has descriptors for: each takes one, one more for its
    engine, and its engine's connection before that may be in the pool still."""
    return max(1, (num_descriptors - min(_OTHER_DESCRIPTORS, num_descriptors // 2)) // 3)


def listing_of(config: RouterConfig) -> tuple[Listing, WorkerFile | None]:
    """Return the workers that options list, and the file that lists others.

    Raises:
        ConfigError: One is wrong, or there is none and none could be added.
    """
    if not (config.workers or config.worker_file or config.allowed_workers):
        hint = "name an engine with --worker or in a file, or allow some to be added"
        raise reject("workers", (), hint)
    file = None if config.worker_file is None else WorkerFile(config.worker_file)
    return parse_options(config.workers, config.events, config.caches), file


def routing_of(config: RouterConfig) -> KVRouter:
    """Return a router that knows no workers yet.

    Raises:
        ConfigError: There is no such policy, or it has no temperature.
    """
    return KVRouter(
        policy=config.policy,
        temperature=config.temperature,
        max_blocks=config.max_blocks,
        approximate=config.approximate,
        max_requests=config.max_requests_per_worker,
        max_wait_s=config.max_wait_s,
    )


def cache_headers(config: RouterConfig) -> dict[str, str]:
    """Return the header with the caches' token, if they have one."""
    token = config.cache_token
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def engine_headers(config: RouterConfig) -> dict[str, str]:
    """Return the header with the engines' key, if they have one.

    Raises:
        ConfigError: The file cannot be read, or has no usable key.
    """
    file = config.engine_key_file
    if file is None:
        return {}
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise reject("engine_key_file", file, str(error)) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise reject("engine_key_file", file, "must contain one key of visible characters")
    return {"Authorization": f"Bearer {key}"}
