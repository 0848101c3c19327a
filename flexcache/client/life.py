"""The life of an engine's client at a shared server: one session after another.

    CONNECTING --welcomed--> SERVING --+
      ^                                | ended: Stop, or the server is lost or late
      +--------------------------------+
    any --refused for good--> REFUSED           any --close--> CLOSED

Tasks that were open when a session ended are its *orphans*. Their slots may be reused, so they are
answered, as soon as no rank can be copying for them: when none was launched, when the ranks have
let go of the fence (`protocol.fence`), or when the same server opens the next session, which it
does not before it has ended the tasks of the last. If a rank hangs they are answered all the same,
after a few seconds.

A state machine without sockets, threads or a clock: events and the time are handed in, and the
tasks to be answered are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from flexcache.client.tasks import ClientTask
from flexcache.errors import InternalError
from flexcache.ids import SessionId
from flexcache.tasks.ids import is_of_same_server

_ANSWER_WITHIN_S = 5.0  # since the server was last heard, whatever hangs
_LEAST_PATIENCE_S = 0.5


class SessionState(Enum):
    CONNECTING = "waiting for the server"
    SERVING = "serving"
    REFUSED = "refused"
    CLOSED = "closed"


class Settled(NamedTuple):
    """Orphans to be answered now, as failed for ``reason``.

    ``is_safe``: no rank can be copying from or to their slots.
    """

    tasks: Sequence[ClientTask]
    reason: str
    is_safe: bool


@dataclass(frozen=True, slots=True)
class _Orphans:
    tasks: Sequence[ClientTask]
    due_s: float


class SessionLife:
    """Not thread-safe: the shell holds a lock around each call."""

    def __init__(self) -> None:
        self.state = SessionState.CONNECTING
        self.session = SessionId(0)
        """The current session, or the last one."""
        self.error: str | None = None
        """Why there is no session; None while there is one."""
        self.missing = ["the server"]
        """What the engine still waits for."""
        self.problems: list[str] = []
        """Why ranks of the engine were refused."""
        self.num_losses = 0
        self._has_session = False
        self._orphans: _Orphans | None = None

    @property
    def is_over(self) -> bool:
        """Whether no session will begin any more."""
        return self.state in (SessionState.REFUSED, SessionState.CLOSED)

    @property
    def is_ready(self) -> bool:
        return self.state is SessionState.SERVING and not self.missing

    # -- events ----------------------------------------------------------------------------------

    def welcomed(self, session: SessionId, missing: Sequence[str]) -> Settled | None:
        """The server has opened a session."""
        settled = None
        if is_of_same_server(session, self.session):
            settled = self._settle(is_safe=True)
        self.session, self._has_session = session, True
        self.error = None
        self.missing = list(missing)
        if self.state is SessionState.CONNECTING:
            self.state = SessionState.SERVING
        return settled

    def informed(self, missing: Sequence[str], problems: Sequence[str]) -> None:
        """The server says what the engine still waits for, and which ranks were refused."""
        if self.state is SessionState.SERVING:
            self.missing, self.problems = list(missing), list(problems)
        elif self.state is SessionState.CONNECTING and missing:
            self.missing = list(missing)  # the server waits for them to open its cache

    def refused(self, reason: str, final: bool) -> bool:
        """The server will not have the engine, or not yet; whether that is news."""
        is_news = reason != self.error
        self.error = reason
        if final and self.state is not SessionState.CLOSED:
            self.state = SessionState.REFUSED
        return is_news

    def ended(
        self, reason: str | None, tasks: Sequence[ClientTask], heard_s: float, now: float
    ) -> Settled | None:
        """The conversation is over, and so is the session, if there was one.

        Args:
            reason: Why, where it was neither refused nor closed.
            tasks: The session's open tasks.
            heard_s: When the server was last heard.

        Returns:
            Orphans of an earlier session, which can wait no longer.
        """
        if reason is not None:
            self.error = reason
        if self.state is SessionState.CONNECTING:
            self.missing = ["the server"]
        if not self._has_session:
            return None
        self._has_session = False
        before = self._settle(is_safe=False)  # lost twice in a moment: rare
        self._orphans = _Orphans(tasks, answer_due_s(heard_s, now))
        if self.state is SessionState.SERVING:
            self.num_losses += 1
            self.missing, self.problems = ["the server"], []
            self.state = SessionState.CONNECTING
        return before

    def settle(self, now: float, slots_are_free: bool) -> Settled | None:
        """Answer the orphans if their slots can be reused, or if it takes too long.

        A client that is closing does not wait for slots.
        """
        orphans = self._orphans
        if orphans is None:
            return None
        is_safe = slots_are_free or not any(task.launched for task in orphans.tasks)
        if is_safe or self.state is SessionState.CLOSED or now >= orphans.due_s:
            return self._settle(is_safe)
        return None

    def close(self) -> None:
        """The engine leaves."""
        self.state = SessionState.CLOSED

    def _settle(self, is_safe: bool) -> Settled | None:
        orphans, self._orphans = self._orphans, None
        if orphans is None:
            return None
        return Settled(orphans.tasks, self.error or "the server was lost", is_safe)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        if self.state is SessionState.SERVING and not self._has_session:
            raise InternalError("serving without a session")
        if self.state is SessionState.CONNECTING and (
            self._has_session or self.problems or not self.missing
        ):
            raise InternalError("without a session nothing but the server is missing")


def answer_due_s(heard_s: float, now: float) -> float:
    """When tasks of a server that is lost now, and was last heard at ``heard_s``, are answered even
    if a rank does not let go of their slots."""
    return max(heard_s + _ANSWER_WITHIN_S, now + _LEAST_PATIENCE_S)
