"""When a server that engines started by themselves ends: some time after its last client.

Pure: the time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

_FIRST_CLIENT_PATIENCE_S = 60.0
_UNNEEDED_PATIENCE_S = 2.0  # other engines may be asking for the server already


class IdleExit:
    """Decides whether an idle server should end.

    Args:
        patience_s: How long a server outlives a last client that died.
        is_needed: Whether a server that has had no client yet may still get one.
    """

    def __init__(self, patience_s: float, is_needed: Callable[[], bool], now: float) -> None:
        self._patience_s = patience_s
        self._is_needed = is_needed
        self._started_s = now
        self._idle_since: float | None = None
        self._had_client = False

    def is_due(self, has_clients: bool, last_left_orderly: bool, now: float) -> bool:
        """Whether the server should end now; it does at once if the last client said Goodbye."""
        if has_clients:
            self._idle_since, self._had_client = None, True
            return False
        if not self._had_client:
            patience_s = max(self._patience_s, _FIRST_CLIENT_PATIENCE_S)
            if not self._is_needed():
                patience_s = _UNNEEDED_PATIENCE_S
            return now - self._started_s > patience_s
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= (0.0 if last_left_orderly else self._patience_s)
