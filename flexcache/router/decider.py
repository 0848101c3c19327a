"""Decider: reads tokens, waits for room, chooses a worker, follows the request to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import urlsplit

from flexcache.config.values import is_address
from flexcache.errors import InternalError
from flexcache.logs import log_event
from flexcache.router.chooser import (
    UNKNOWN,
    Arrival,
    Choice,
    Decided,
    Decision,
    NotRouted,
    Outcome,
    RequestEnded,
    RouteRequest,
    RouterEvent,
    Skipped,
    Source,
    Usage,
    WorkerAddress,
)
from flexcache.router.fleet import WorkerSpec, listed_name
from flexcache.router.load import Running
from flexcache.router.messages import (
    Began,
    End,
    FirstToken,
    Life,
    RunningRequest,
    told,
)
from flexcache.router.roster import Roster
from flexcache.router.router import KVRouter, prefill_id
from flexcache.router.stats import LineStats
from flexcache.router.stored import StoredIds
from flexcache.router.tokens.body import may_be_divided, named_model
from flexcache.router.waiting import is_set_within

T = TypeVar("T")

_SHORTEST_RETRY_S = 1.0  # ``Retry-After`` has whole seconds


@dataclass(eq=False, slots=True)
class _Turn:
    kind: Hashable
    since: float
    service_s: float
    event: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingLine:
    """A bounded queue. Whenever `wake` is called, the first of each kind tries, in the order of
    arrival; those behind it wait for it. Requests of other kinds do not, since other workers than
    the busy ones may serve them.

    A request that leaves, because its client did or its time is over, holds nothing: whatever an
    attempt reserves is returned at once.

    Args:
        size: Requests that may wait.
        timeout_s: How long each may wait.

    Attributes:
        counts: Of requests that waited or were refused.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.counts = LineStats(capacity=size)
        self._timeout_s = timeout_s
        self._turns: dict[Hashable, OrderedDict[_Turn, None]] = {}
        """By kind."""

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    @property
    def service_s(self) -> float:
        """Predicted seconds of prefill of all that wait."""
        return sum(turn.service_s for turns in self._turns.values() for turn in turns)

    async def place(
        self,
        attempt: Callable[[], T | None],
        kind: Hashable = None,
        weigh: Callable[[], float] = lambda: 0.0,
    ) -> T:
        """Wait for the turn and for an attempt that succeeds.

        Args:
            attempt: Returns None while every worker is busy.
            kind: Of two requests of one kind, the attempts of both succeed, or of neither.
            weigh: Returns the predicted seconds of prefill; called if it has to wait.

        Returns:
            What the attempt returned.

        Raises:
            NotRouted: With 429: too many wait, or the wait was too long. What the attempt raises.
        """
        if kind not in self._turns and (result := attempt()) is not None:
            return result
        loop = asyncio.get_running_loop()
        if len(self) >= self.counts.capacity:
            self.counts.refused["full"] += 1
            raise NotRouted(429, "too many requests wait for a worker", self._retry_after_s(kind))
        turn = _Turn(kind, loop.time(), weigh())
        turns = self._turns.setdefault(kind, OrderedDict())
        turns[turn] = None
        deadline = loop.call_later(self._timeout_s, turn.event.set)
        try:
            while True:
                await turn.event.wait()
                turn.event.clear()
                if next(iter(turns)) is turn and (result := attempt()) is not None:
                    return result
                if loop.time() >= deadline.when():
                    self.counts.refused["expired"] += 1
                    message = f"every worker was busy for {self._timeout_s:g} s"
                    raise NotRouted(429, message, self._retry_after_s(kind))
        finally:
            deadline.cancel()
            del turns[turn]
            if not turns:
                del self._turns[kind]
            self.wake()

    def wake(self) -> None:
        """Let the first of each kind try: a worker may have room."""
        heads = [next(iter(turns)) for turns in self._turns.values()]
        for turn in sorted(heads, key=lambda turn: turn.since):
            turn.event.set()

    def _retry_after_s(self, kind: Hashable) -> float:
        """Return how long the first of its kind has waited: what a new request would wait."""
        head = next(iter(self._turns.get(kind, ())), None)
        waited_s = 0.0 if head is None else asyncio.get_running_loop().time() - head.since
        return max(_SHORTEST_RETRY_S, waited_s)

    def check(self) -> None:
        """
        Raises:
            InternalError: More wait than may, or not in the order of arrival.
        """
        for kind, turns in self._turns.items():
            since = [turn.since for turn in turns]
            if not since or since != sorted(since):
                raise InternalError(f"line of {kind}: {since}")
        if len(self) > self.counts.capacity:
            raise InternalError(f"line of {len(self)} of {self.counts.capacity}")


_KEPT = 1000
_QUIET_S = 10.0


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[RouterEvent] = deque()
        self.num_skipped = 0
        self.has_events = asyncio.Event()


class Watchers:
    """Hands every event to all that watch; one that reads too slowly is skipped over events.

    Args:
        kept: Events kept for one that is slow.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._watchers: set[_Watcher] = set()

    def __len__(self) -> int:
        return len(self._watchers)

    def publish(self, event: RouterEvent) -> None:
        for watcher in self._watchers:
            if len(watcher.events) >= self._kept:
                watcher.num_skipped += 1
                continue
            watcher.events.append(event)
            watcher.has_events.set()

    async def watch(self) -> AsyncGenerator[RouterEvent | None, None]:
        """Yield the events from now on, until the caller stops; None if it was quiet for long."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while True:
                await is_set_within(watcher.has_events, _QUIET_S)
                watcher.has_events.clear()
                if not watcher.events:
                    yield None
                while watcher.events:
                    event = watcher.events.popleft()
                    yield event
                    if watcher.num_skipped and not watcher.events:
                        count, watcher.num_skipped = watcher.num_skipped, 0
                        yield Skipped(time=event.time, count=count)
        finally:
            self._watchers.discard(watcher)


logger = logging.getLogger(__name__)

RANK_HEADER = "X-data-parallel-rank"
_RETRY_S = 2.0
_BYTES_PER_TOKEN = 4
_LEAST_WAIT_S, _PATIENCE = 1.0, 2.0
"""How long an engine waits for what another computes: so many times what is predicted, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a choice is bound to, besides the request.

    Attributes:
        tried: Names of the workers that were tried already; they come last.
        only: ``HOST:PORT`` of the engines that may be chosen; None: all.
        owner: Who will report the end; empty: this process.
        lease_s: The request is given up after this long; None: only if its end is never reported.
        attempt: How often it was sent to a worker before.
        may_divide: See `Arrival`.
    """

    tried: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    owner: str = ""
    lease_s: float | None = None
    attempt: int = 0
    may_divide: bool = False


class Decider:
    """Implements `Chooser`. For one event loop.

    Args:
        routing: Knows caches and load.
        roster: Knows which workers take requests.
        read: Finds tokens. Whatever it raises, the request goes by load.
        line: Where requests wait while every worker is busy.
        engine_headers: Added to every request to an engine, its key for example.
        clock: Monotonic, in seconds.

    Attributes:
        tell: Called with the life of requests, for other routers.
        on_answer: Called at the end of each complete answer to a prompt whose tokens are known,
            with the cached tokens that the engine reported.
        on_decision: Called with each decision; must return at once.
        on_models_changed: Called when engines may serve other models than before.
    """

    def __init__(
        self,
        routing: KVRouter,
        roster: Roster,
        read: Callable[[Arrival], Awaitable[RouteRequest]],
        line: WaitingLine,
        *,
        engine_headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routing = routing
        self.roster = roster
        self.line = line
        self.watchers = Watchers()
        self.running = routing.running
        self.stored_ids = StoredIds()
        self.num_ended = dict.fromkeys(Outcome, 0)
        self.clock = clock
        self._read = read
        self._engine_headers = dict(engine_headers or {})
        self.tell: Callable[[Life], None] = lambda life: None
        self.on_answer: Callable[[Running, int | None], None] = lambda running, cached: None
        self.on_decision: Callable[[Decision], None] = lambda decision: None
        self.on_models_changed: Callable[[], None] = lambda: None
        self._is_reading = True

    # -- the contract ------------------------------------------------------------------------------

    async def choose(self, arrival: Arrival, *, owner: str = "") -> Choice:
        """Choose a worker; waits while all are busy.

        Args:
            owner: Process that will report the end.

        Raises:
            NotRouted: There is none, or none that has what the request names.
            ValueError: A request with this id is running.
        """
        only = arrival.only
        if only is None:
            url = await self.stored_ids.find(arrival, self.roster.urls)
            only = None if url is None else (urlsplit(url).netloc,)
        request = await self.read(arrival)
        may_divide = arrival.may_divide and only is None and self.routing.fleet.has_stages
        terms = Terms(
            tried=arrival.tried, only=only, owner=owner, attempt=len(arrival.tried),
            may_divide=may_divide and may_be_divided(arrival.method, arrival.path, arrival.body),
        )  # fmt: skip
        decision = await self.decide(request, terms)
        matched = None if request.token_ids is None else decision.matched_tokens
        choice = self._choice(decision, matched)
        if (first := decision.prefill) is None:
            return choice
        prefill = self._choice(first, first.matched_tokens)
        request_id = prefill_id(request.request_id, terms.attempt)
        wait_s = _LEAST_WAIT_S + _PATIENCE * (first.ttft_s or 0.0)
        return replace(choice, prefill=replace(prefill, request_id=request_id), wait_s=wait_s)

    def _choice(self, decision: Decision, matched_tokens: int | None) -> Choice:
        spec = self.roster.spec(decision.worker)
        others = [self.roster.spec(name).url for name in decision.others if name in self.roster]
        peer = decision.richer_peer
        return Choice(
            worker=decision.worker,
            url=spec.url,
            headers=self._headers_for(spec),
            matched_tokens=matched_tokens,
            others=tuple(dict.fromkeys(others)),
            fetch_from=None if peer is None else self._source(peer),
        )

    def _source(self, worker: str) -> Source | None:
        """Return where a worker's KV can be fetched."""
        if worker not in self.roster:
            return None
        spec = self.roster.spec(worker)
        host = urlsplit(spec.url).hostname
        if host is None:
            return None
        # FlexCache asks addresses only: to look a name up would hold its other peers up.
        is_usable = spec.transfer != "flexcache" or is_address(host)
        return Source(spec.transfer, host, spec.peer_port if is_usable else None)

    async def read(self, arrival: Arrival) -> RouteRequest:
        """Return what decides where a request goes; without tokens if they cannot be found."""
        try:
            request = await self._read(arrival)
        except Exception as error:  # a fault in a tokenizer must not stop routing
            if self._is_reading:
                log_event(
                    logger, logging.ERROR, "tokens_failed", error=repr(error),
                    effect="requests go by load", exc_info=True,
                )  # fmt: skip
            self._is_reading = False
            num_tokens = len(arrival.body) // _BYTES_PER_TOKEN
            return RouteRequest(
                request_id=arrival.request_id,
                num_tokens=num_tokens,
                model=named_model(arrival),
            )
        self._is_reading = True
        return request

    async def decide(self, request: RouteRequest, terms: Terms) -> Decision:
        """Choose a worker for a request that was read; see `choose`.

        Returns:
            The worker, why, and what is expected there.
        """
        arrived_s = self.clock()
        model = request.model and listed_name(request.model, self.routing.fleet.models)
        kind = (model, terms.tried, terms.only)
        decision = await self.line.place(
            lambda: self._try(request, terms), kind, lambda: self.routing.least_service_s(request)
        )
        queued_s = self.running[request.request_id].since_s - arrived_s
        self.line.counts.waits_s.observe(queued_s)
        if (first := decision.prefill) is not None:
            named = replace(request, request_id=prefill_id(request.request_id, terms.attempt))
            self._begun(named, first, terms, queued_s)
        self._begun(request, decision, terms, queued_s)
        return decision

    def _begun(
        self, request: RouteRequest, decision: Decision, terms: Terms, queued_s: float
    ) -> None:
        running = self.running[request.request_id]
        running.owner = terms.owner
        if terms.lease_s is not None:
            running.expires_s = running.since_s + terms.lease_s
        self.tell(Began(told(running)))
        with _logged("on_decision"):
            self.on_decision(decision)
        if self.watchers:
            self.watchers.publish(_decided(request, decision, queued_s, terms.attempt))

    def _try(self, request: RouteRequest, terms: Terms) -> Decision | None:
        """Choose and reserve; None while every worker is busy."""
        if request.request_id in self.running:
            raise ValueError(f"request {request.request_id!r} is running")
        named = None if terms.only is None else self.roster.at(terms.only)
        decision = self.routing.choose(
            request, self.clock(), tried=terms.tried, only=named, may_divide=terms.may_divide
        )
        if decision is not None:
            return decision
        fleet = self.routing.fleet
        if fleet.eligible(None) is None:
            why = "no worker is up"
        elif fleet.eligible(None, only=named) is None:
            why = "none of the workers that may be chosen is up"
        elif fleet.eligible(request.model, only=named) is None:
            why = f"no worker that serves {request.model!r} is up"
        else:
            return None
        self.line.counts.refused["no_worker"] += 1
        raise NotRouted(503, why, _RETRY_S)

    def _headers_for(self, spec: WorkerSpec) -> dict[str, str]:
        if spec.data_parallel_rank is None:
            return dict(self._engine_headers)
        return {**self._engine_headers, RANK_HEADER: str(spec.data_parallel_rank)}

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        """Note the first byte of an answer's body; see `Chooser`."""
        running = self.running.get(request_id)
        if running is None or running.was_served:
            return
        with _logged("first_token"):
            self.routing.first_token(request_id, self.clock(), tells_time=tells_time)
        if tells_time:  # otherwise its end follows at once, and says the same
            self.tell(FirstToken(request_id))
            self.line.wake()

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        """Note that a request ended at its worker; an unknown one is ignored."""
        running = self.running.get(request_id)
        if running is None:
            return
        with _logged("ended"):
            self.routing.ended(request_id, self.clock(), cached_tokens=usage.cached_tokens)
        self._report_end(running, outcome, usage)

    def _report_end(self, running: Running, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        now = self.clock()
        self.num_ended[outcome] += 1
        self.roster.ended(running.worker, outcome, now)
        self.tell(End(running.request_id))
        self.line.wake()
        if outcome is Outcome.DONE and running.predicted_tokens is not None:
            self.on_answer(running, usage.cached_tokens)
        if self.watchers:
            first_s = running.first_token_s
            event = RequestEnded(
                time=time.time(), request_id=running.request_id, worker=running.worker,
                outcome=outcome.value, predicted_tokens=running.predicted_tokens,
                predicted_ttft_s=running.ttft_s,
                ttft_s=None if first_s is None else first_s - running.since_s,
                total_s=now - running.since_s, **usage._asdict(),
            )  # fmt: skip
            self.watchers.publish(event)

    # -- requests of proxies -----------------------------------------------------------------------

    def adopt(self, request: RunningRequest, owner: str) -> None:
        """Count a request that was sent to a worker without this decider."""
        self.tell(Began(told(self.routing.follow(request, self.clock(), owner=owner))))
        self.line.wake()

    def models(self) -> set[str]:
        """Return the names of the models that workers serve, or served before they went."""
        return self.routing.fleet.models

    def cards(self) -> dict[str, bytes]:
        """See `Chooser`."""
        return self.roster.cards()

    def stored(self, url: str, ids: Iterable[str]) -> None:
        """See `Chooser`."""
        self.stored_ids.note(url, ids)

    def models_changed(self) -> None:
        """See `Chooser`."""
        self.on_models_changed()

    def addresses(self) -> list[WorkerAddress]:
        """Return the workers that take requests."""
        return [
            WorkerAddress(
                spec.name,
                spec.url,
                self._headers_for(spec),
                self.roster.engine(spec.name).models,
                spec.role,
            )
            for spec in self.roster.up
        ]

    def end_all(self, owner: str) -> int:
        """End the requests of a process that is gone; returns their number."""
        theirs = [name for name, running in self.running.items() if running.owner == owner]
        for name in theirs:
            self.ended(name, Outcome.ABORTED)
        return len(theirs)

    def expire(self) -> None:
        """End requests whose lease is over, and let the first in line try: waits have shortened."""
        for running in self.routing.expire(self.clock()):
            if not running.is_peers:
                self._report_end(running, Outcome.ABORTED)
        self.line.wake()

    def check(self) -> None:
        """
        Raises:
            InternalError: Its parts do not fit together.
        """
        self.routing.check()
        self.roster.check()
        self.line.check()


@contextmanager
def _logged(call: str) -> Iterator[None]:
    """Log a fault in what learns from an answer: the answer itself must not suffer."""
    try:
        yield
    except Exception:
        log_event(logger, logging.ERROR, "routing_failed", call=call, exc_info=True)


def _decided(request: RouteRequest, decision: Decision, queued_s: float, attempt: int) -> Decided:
    matched = {tier.value: tokens for tier, tokens in decision.matched.items()}
    return Decided(
        time=time.time(), request_id=request.request_id, worker=decision.worker,
        reason=decision.reason, num_tokens=decision.num_tokens,
        matched=None if request.token_ids is None else matched, ttft_s=decision.ttft_s,
        queued_s=queued_s, attempt=attempt,
    )  # fmt: skip
