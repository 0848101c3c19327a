"""CURVE keys: they authenticate a server and its clients to each other over TCP.

One directory, made by ``flexcache server --keygen DIR``, holds everything; copy it to clients
without ``server.key_secret``:

    DIR/server.key  server.key_secret      the server's pair
    DIR/client.key  client.key_secret      the pair that clients use; any other is rejected
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from flexcache.errors import ConfigError
from flexcache.storage.machine import make_directory


def make_keys(directory: Path) -> None:
    """Make both key pairs.

    Raises:
        ConfigError: The directory already holds keys, or cannot be written.
    """
    try:
        make_directory(directory)
        if any(directory.glob("*.key*")):
            raise ConfigError(f"{directory} already holds keys; choose another directory")
        for name in ("server", "client"):
            _, secret = zmq.auth.create_certificates(directory, name)
            Path(secret).chmod(0o600)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None


def secure_server(socket: zmq.Socket[bytes], directory: str) -> ThreadAuthenticator:
    """Accept only clients that have the client key. The caller must stop the authenticator."""
    socket.curve_publickey, socket.curve_secretkey = _load(directory, "server.key_secret")
    socket.curve_server = True
    allowed, _ = _load(directory, "client.key", needs_secret=False)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_Only(allowed))
    return authenticator


def check_client_keys(directory: object) -> None:
    """Raise `ConfigError` unless a client finds its keys in the directory."""
    if not isinstance(directory, (str, Path)):
        raise ConfigError(f"curve_keys = {directory!r}: must be a directory of CURVE keys")
    _load(str(directory), "server.key", needs_secret=False)
    _load(str(directory), "client.key_secret")


def secure_client(socket: zmq.Socket[bytes], directory: str) -> None:
    """Authenticate this process, and accept only the server as its peer."""
    socket.curve_serverkey, _ = _load(directory, "server.key", needs_secret=False)
    socket.curve_publickey, socket.curve_secretkey = _load(directory, "client.key_secret")


class _Only:
    """Accepts one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


def _load(directory: str, name: str, needs_secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(Path(directory) / name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"curve_keys = {directory!r}: {name}: {error}; "
            "`flexcache server --keygen DIR` makes keys"
        ) from None
    if needs_secret and secret is None:
        raise ConfigError(f"curve_keys = {directory!r}: {name} holds no secret key")
    return public, secret or b""
