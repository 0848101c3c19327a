"""Reports to the chooser how the choices for one request end."""

from __future__ import annotations

from flexcache.router.chooser import UNKNOWN, Choice, Chooser, Outcome, Usage


class RequestLife:
    """A request's choices, of which one at most is open. Leaving the context ends an open one: the
    client left, or the choice was not used."""

    __slots__ = ("_chooser", "choice", "request_id")

    def __init__(self, chooser: Chooser, request_id: str) -> None:
        self._chooser = chooser
        self.request_id = request_id
        self.choice: Choice | None = None

    def begin(self, choice: Choice) -> None:
        assert self.choice is None
        self.choice = choice

    def first_byte(self, *, tells_time: bool) -> None:
        self._chooser.first_token(self.request_id, tells_time=tells_time)

    def end(self, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        self.choice = None
        self._chooser.ended(self.request_id, outcome, usage)

    def __enter__(self) -> RequestLife:
        return self

    def __exit__(self, *_: object) -> None:
        if self.choice is not None:
            self.end(Outcome.ABORTED)
