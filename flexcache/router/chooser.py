"""The contract between those that receive requests (proxies, endpoint picker, HTTP API) and the
decider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class Outcome(str, Enum):
    """How a request ended, from the router's point of view."""

    DONE = "done"
    ABORTED = "aborted"
    """The client left."""
    REFUSED = "refused"
    """The engine did not take it: connection refused or closed, or 429, 502, 503, before any
    byte of the answer."""
    BROKEN = "broken"
    """The connection to the engine broke, before or during the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it came in.

    Attributes:
        request_id: Unique among the requests in flight; the same for its retries.
        path: Path with its query string.
        headers: Names in lower case: those that matter for routing, at least ``x-session-id``.
        body: Raw body; empty for methods without one.
        tried: Names of the workers that were tried already; they come last.
        only: ``HOST:PORT`` of the engines that may be chosen, as in their URLs; None: all. If none
            of them takes requests, the request is not routed (503).
    """

    request_id: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    tried: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where to send a request.

    Attributes:
        worker: Name of the worker.
        url: Its base URL.
        headers: To be added to the request: the rank, the engine's key.
        matched_tokens: Predicted cached tokens; None if the prompt's tokens are unknown.
        others: URLs of the next best workers, best first.
    """

    worker: str
    url: str
    headers: Mapping[str, str]
    matched_tokens: int | None
    others: tuple[str, ...] = ()


class NotRouted(Exception):
    """No worker can take the request.

    Args:
        status: 429 if the queue is full or the wait was too long, 503 if no worker is up.
        retry_after_s: When to try again; None: unknown.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Usage(NamedTuple):
    """Token counts of a request; None where the engine reported none."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


UNKNOWN = Usage()


class Chooser(Protocol):
    """Chooses workers and follows the life of requests.

    For every `choose` that returns, exactly one `ended` follows; until then the request counts as
    load of its worker.
    """

    async def choose(self, arrival: Arrival) -> Choice:
        """Choose a worker; waits while all are busy.

        Raises:
            NotRouted: There is none.
        """
        ...

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        """Note that the first byte of the answer's body came.

        Args:
            tells_time: False: it came after all tokens had been generated, because the answer is
                not a stream, so nothing can be learned from when it came.
        """
        ...

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        """Note that a request ended at its worker, also if it is going to be retried.

        Args:
            usage: What the engine reported.
        """
        ...

    def stored(self, url: str, ids: Iterable[str]) -> None:
        """Note that the engine at a URL keeps things under these ids, see `stored.StoredIds`."""
        ...
