"""Settings of a router, as its parts take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexcache.config.router import RouterConfig
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.processes import raise_limit
from flexcache.router.listing import Listing, WorkerFile, bracketed, parse_options
from flexcache.router.router import KVRouter

MAX_CONNECTIONS = 10_000
IDLE_TIMEOUT_S = 75.0
"""Longer than the 60 s after which usual load balancers give an idle connection up: if the router
closed first, a request could meet its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Limits and credentials of a proxy.

    Attributes:
        api_keys: Keys of clients, sent as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``;
            empty: anyone may send requests.
        tls_cert: Certificate chain (PEM); None: plain HTTP.
        tls_key: Its private key.
        max_connections: One more takes the place of the one that is idle longest, if any is.
        max_headers: Number of header fields of a request.
        max_header_bytes: Size of all its header fields together.
        max_body_bytes: Size of a request's body.
        max_held_bytes: Size of the bodies of all requests in flight; beyond it requests with a body
            get a 503.
        body_timeout_s: A request's body has to arrive within this time.
        client_idle_s: How long a connection may take for a request's headers, be idle between
            requests, or leave an answer unread.
        connect_timeout_s: Time to connect to an engine.
        engine_idle_s: Longest silence of an engine before and during an answer; None: any.
        queue_timeout_s: How long a request waits for a connection while its engines have no room
            for one.
        max_retries: Further engines that a request is sent to.
        retry_ratio: Retries allowed per request, on average.
        retry_burst: Retries allowed at once.
        stop_deadline_s: Time that running answers have to end when the proxy stops.
        reuse_port: Share the port with other proxy processes.
    """

    api_keys: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_connections: int = MAX_CONNECTIONS
    max_headers: int = 100
    max_header_bytes: int = 32 << 10
    max_body_bytes: int = 64 << 20
    max_held_bytes: int = 1 << 30
    body_timeout_s: float = IDLE_TIMEOUT_S
    client_idle_s: float = IDLE_TIMEOUT_S
    connect_timeout_s: float = 2.0
    engine_idle_s: float | None = None
    queue_timeout_s: float = 30.0
    max_retries: int = 2
    retry_ratio: float = 0.2
    retry_burst: int = 10
    stop_deadline_s: float = 30.0
    reuse_port: bool = False

    def __post_init__(self) -> None:
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("tls_key without tls_cert: both are needed for TLS")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or " " in key or not key:
                raise ConfigError("api_keys: a key has characters that cannot be sent in a header")


def read_api_keys(path: Path) -> list[str]:
    """Return the keys of clients.

    Args:
        path: File with a key per line; empty lines and lines that start with ``#`` do not count.

    Raises:
        ConfigError: The file cannot be read, or has no key: it would let everyone in.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file = {str(path)!r}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file = {str(path)!r}: contains no key")
    return keys


_OTHER_DESCRIPTORS = 320
"""What a process has open besides: the control API, probes, KV events, peers."""


def address_of(config: RouterConfig) -> str:
    """Return where clients connect."""
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{bracketed(config.host)}:{config.port}"


def control_address_of(config: RouterConfig) -> str:
    """Return where the control API is."""
    return f"http://{bracketed(config.control_host)}:{config.control_port}"


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
        queue_timeout_s=config.queue_timeout_s,
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
        ConfigError: There is no such policy.
    """
    return KVRouter(
        policy=config.policy,
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
