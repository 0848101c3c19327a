"""The engine that started a server, as seen by the server."""

from __future__ import annotations

import select


class Starter:
    """Notices when the engine no longer needs the server that it started.

    Args:
        held_fd: This end of the pipe that the engine's `ServerLauncher` made.
    """

    def __init__(self, held_fd: int) -> None:
        self._poller = select.poll()
        self._poller.register(held_fd, 0)

    def has_left(self) -> bool:
        """Whether the engine has ended, or found another server."""
        return bool(self._poller.poll(0))
