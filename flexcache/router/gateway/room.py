"""Memory for the bodies of requests that wait for their choice."""

from __future__ import annotations

from flexcache.errors import InternalError


class Room:
    """Limits of a picker's memory.

    Args:
        max_body_bytes: Of one body.
        max_held_bytes: Of all of them.

    Attributes:
        held_bytes: In use.
    """

    def __init__(self, max_body_bytes: int, max_held_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._max_held_bytes = max_held_bytes

    @property
    def is_full(self) -> bool:
        return self.held_bytes > self._max_held_bytes

    def take(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def check(self, *, is_idle: bool) -> None:
        """
        Args:
            is_idle: There is no request.

        Raises:
            InternalError: Bytes are held by no request.
        """
        if self.held_bytes < 0 or (is_idle and self.held_bytes):
            raise InternalError(f"{self.held_bytes} bytes held, is_idle={is_idle}")
