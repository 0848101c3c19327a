"""RequestSessions: which session each of SGLang's requests belongs to, and which ones close."""

from __future__ import annotations

from typing import Any

from flexcache.cache.prompt import check_session_id
from flexcache.integration.adapter import safely
from flexcache.manager import KVManager


class RequestSessions:
    """The sessions of one rank's requests."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager
        self._of: dict[str, str] = {}

    def arrived(self, request: Any) -> None:
        """Note the session of a request: its ``session_id``, or the one that it is part of."""
        session = getattr(request, "session", None)
        if session is not None:
            request.session_id = session.session_id  # SGLang passes it on with what it offloads
        session_id = valid_session_id(request.session_id)
        if session_id is not None:
            self._of[request.rid] = session_id

    def of(self, rid: str) -> str | None:
        return self._of.get(rid)

    def ended(self, rid: str) -> None:
        """Forget a request."""
        self._of.pop(rid, None)

    def closed(self, session_id: object) -> None:
        """Let a session's blocks go first: SGLang has closed it."""
        if (name := valid_session_id(session_id)) is not None:
            safely(self._manager.session_hint, name, over=True)


def valid_session_id(session_id: object) -> str | None:
    """Return a session's name if it can be one: it comes from the sender of the request."""
    try:
        check_session_id(session_id)
    except ValueError:
        return None
    return str(session_id)
