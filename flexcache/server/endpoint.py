"""The address that a server serves at: locked, bound, and, where keys are given, encrypted."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from flexcache.errors import ConfigError
from flexcache.protocol.curve import secure_server
from flexcache.protocol.runtime import EndpointLock, listen_privately
from flexcache.server.router_socket import RouterSocket


class Endpoint:
    """Holds an address for one server.

    Args:
        address: A port of 0 takes a free one.
        curve_keys: Directory of the keys, if clients need one.

    Attributes:
        address: Where clients connect.
        socket: The clients' socket.
        context: For further sockets.

    Raises:
        ConfigError: Another process has the address, or it cannot be bound.
    """

    def __init__(self, address: str, curve_keys: str | None) -> None:
        self._lock = EndpointLock(address)
        self._authenticator: ThreadAuthenticator | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = RouterSocket(self.context)
        try:
            self.address = self._bind(address, curve_keys)
        except BaseException:
            self.close()
            self.unlock()
            raise

    def _bind(self, address: str, curve_keys: str | None) -> str:
        socket, is_local = self.socket.zmq_socket, address.startswith("ipc://")
        if curve_keys is not None:
            self._authenticator = secure_server(socket, curve_keys)
        try:
            if is_local:
                socket.setsockopt(zmq.USE_FD, listen_privately(address))
            self.socket.bind(address, only_own_user=not is_local and curve_keys is None)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"endpoint = {address!r}: {error.strerror or error}") from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def worker_address(self) -> str:
        """Where the server's own workers connect, apart from its clients."""
        return self._lock.worker_endpoint

    def close(self) -> None:
        """Close the sockets; other sockets of the context must be closed already. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self.socket.close()
        self.context.term()

    def unlock(self) -> None:
        """Let another server have the address. Idempotent."""
        self._lock.release()
