"""What a proxy process is configured with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexcache.errors import ConfigError

MAX_CONNECTIONS = 10_000


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
    body_timeout_s: float = 60.0
    client_idle_s: float = 60.0
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
