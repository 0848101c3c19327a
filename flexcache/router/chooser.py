"""Chooser: the contract between those that receive requests (proxies, endpoint picker, HTTP API)
and the decider. With its requests, choices and outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from flexcache.router.fleet import Role, Tier, Transfer

SESSION_HEADERS = (
    "x-session-id",
    "thread-id",  # Codex: the conversation; its sub-agents have their own
    "session-id",  # Codex: all of its threads
    "x-claude-code-session-id",
)
"""Header fields that name a conversation, in lower case; the first that a request has counts."""


class Turn(NamedTuple):
    """A beginning of a conversation, known by its text.

    Attributes:
        key: Hash of all that was said up to here.
        num_tokens: Estimated length.
    """

    key: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What decides where a request goes.

    Attributes:
        request_id: Unique among the requests in flight.
        num_tokens: Length of the prompt, an estimate if ``token_ids`` does not cover it all.
        token_ids: The prompt, up to the first token whose KV depends on more than the tokens, an
            image, say; None if unknown: the request goes by load.
        model: Name in the request, of a model or an adapter; None: it names none.
        adapter: Name of the LoRA adapter.
        cache_salt: vLLM's ``cache_salt``; prompts of different salts share nothing.
        session_id: Conversation that it belongs to, a hint for ties.
        turns: The conversation as text, for want of tokens: its beginnings, the shortest first.
    """

    request_id: str
    num_tokens: int
    token_ids: Sequence[int] | np.ndarray | None = None
    model: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    turns: Sequence[Turn] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and what is expected there.

    Attributes:
        worker: Name of the worker.
        others: The other eligible workers, best first.
        num_tokens: Length of the prompt.
        matched: Tokens that each tier supplies; a token counts for the fastest tier that has it.
        ttft_s: Predicted time to the first token; None before the service time is known.
        reason: Why: ``cost``, ``tie``, ``only_one``, ``load`` (tokens unknown), ``conversation``
            (likewise, and it went there before), ``divided`` (another computes the prompt), or a
            policy's own.
        disk_block: What the worker's cache calls the last block that it has on SSD or remote store
            only; None if that is unknown, or too little is there.
        richer_peer: Another worker, from which this one can fetch clearly more of the prompt than
            it has; None: there is none.
        prefill: Where the prompt is computed, if not there; ``ttft_s`` counts that too.
    """

    worker: str
    others: tuple[str, ...]
    num_tokens: int
    matched: Mapping[Tier, int]
    ttft_s: float | None
    reason: str
    disk_block: int | None = None
    richer_peer: str | None = None
    prefill: Decision | None = None

    @property
    def matched_tokens(self) -> int:
        """Tokens that the worker need not compute, over all tiers."""
        return sum(self.matched.values())


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="decided"):
    """A request was sent to a worker. Nothing in it comes from the prompt.

    Attributes:
        time: UNIX time in seconds, as in the others.
        matched: Predicted cached tokens by tier; None if the tokens are unknown.
        ttft_s: Predicted; None before the service time is known.
        queued_s: How long it waited for a worker.
        attempt: 0, or how often it was sent to others before.
    """

    time: float
    request_id: str
    worker: str
    reason: str
    num_tokens: int
    matched: dict[str, int] | None
    ttft_s: float | None
    queued_s: float
    attempt: int


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """A request ended at its worker.

    Attributes:
        outcome: An `Outcome`.
        predicted_tokens: Predicted cached tokens; None if they were unknown.
        cached_tokens: Reported by the engine; None if it did not.
        ttft_s: Measured; None if no token came. ``predicted_ttft_s`` likewise predicted.
        total_s: From the choice to the end.
    """

    time: float
    request_id: str
    worker: str
    outcome: str
    predicted_tokens: int | None
    cached_tokens: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    predicted_ttft_s: float | None
    ttft_s: float | None
    total_s: float


class Skipped(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="skipped"):
    """Events that a watcher did not read in time, and that it does not get."""

    time: float
    count: int


RouterEvent = Decided | RequestEnded | Skipped


def to_server_sent(event: RouterEvent) -> bytes:
    """Encode for ``GET /decisions``, ``text/event-stream``: an unnamed event with JSON as data."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class Outcome(str, Enum):
    """How a request ended, from the router's point of view."""

    DONE = "done"
    ABORTED = "aborted"
    """The client left, the choice was not used, or its end was never reported."""
    REFUSED = "refused"
    """It was not taken: no room for a connection, connection refused or closed, or 429, 502, 503,
    before any byte of the answer."""
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
        may_divide: Whether the caller can have one engine compute the prompt, another the answer.
    """

    request_id: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    tried: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    may_divide: bool = False


class Source(NamedTuple):
    """Where an engine can fetch KV.

    Attributes:
        port: None: it is known to the engine's cache.
    """

    transfer: Transfer
    host: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where to send a request.

    Attributes:
        worker: Name of the worker.
        url: Its base URL.
        headers: To be added to the request: the rank, the engine's key.
        matched_tokens: Predicted cached tokens; None if the prompt's tokens are unknown.
        others: URLs of the next best workers, best first.
        fetch_from: From where the engine is to fetch blocks; None: nowhere.
        prefill: What another engine is to compute of it; its end is to be reported too, by its own
            ``request_id``. ``fetch_from`` says where it will be.
        wait_s: How long the engine may wait for that.
        request_id: By which it is known; empty: as it arrived.
    """

    worker: str
    url: str
    headers: Mapping[str, str]
    matched_tokens: int | None
    others: tuple[str, ...] = ()
    fetch_from: Source | None = None
    prefill: Choice | None = None
    wait_s: float = 0.0
    request_id: str = ""


class WorkerAddress(msgspec.Struct, frozen=True):
    """A worker as a proxy needs it while the decider is away.

    Attributes:
        models: Names of the models and adapters that it serves; empty: unknown.
        role: See `WorkerSpec`.
    """

    name: str
    url: str
    headers: dict[str, str]
    models: frozenset[str]
    role: Role = "both"


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
    """Chooses workers and follows the life of requests; knows what the workers serve.

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
        """Note that the first of what the engine generates came (`answers.OutputWatch`).

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

    def addresses(self) -> list[WorkerAddress]:
        """Return the workers that take requests."""
        ...

    def cards(self) -> dict[str, bytes]:
        """Return what they say of each model that they serve, as JSON."""
        ...

    def models_changed(self) -> None:
        """Have the workers' lists of models read again."""
        ...
