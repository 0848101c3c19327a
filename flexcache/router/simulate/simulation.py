"""Runs a workload through simulated engines behind a dispatcher."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from flexcache.router.dispatcher import DRAM, GPU, Prompt
from flexcache.router.load import FloatArray, Work
from flexcache.router.policy import Pick
from flexcache.router.simulate.engine import Engine, EngineSpec
from flexcache.router.simulate.requests import SimRequest, Workload


class Chooses(Protocol):
    """What the simulation needs of `Dispatcher`."""

    def choose(self, request_id: str, prompt: Prompt, now: float) -> tuple[Pick, Work]: ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str, now: float) -> None: ...


class View(Protocol):
    """What the router knows of the engines' caches."""

    def match(self, request: SimRequest) -> FloatArray:
        """Return the tokens that each tier supplies; shape (3, engines)."""
        ...

    def placed(self, request: SimRequest, worker: int) -> None:
        """Note where a request was sent."""
        ...

    def ended(self, request: SimRequest, cached_tokens: int) -> None:
        """Note that a request ended, and what the engine reported."""
        ...


class ExactView:
    """Knows what the engines hold at every moment."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def match(self, request: SimRequest) -> FloatArray:
        matched = np.zeros((3, len(self._engines)))
        for i, engine in enumerate(self._engines):
            matched[GPU, i], matched[DRAM, i] = engine.match(request)
        return matched

    def placed(self, request: SimRequest, worker: int) -> None:
        """The engine will tell."""

    def ended(self, request: SimRequest, cached_tokens: int) -> None:
        """The engine has told."""


@dataclass(slots=True)
class Outcome:
    """What became of the requests, in the order of their ends.

    Attributes:
        ttft_s: Time from arrival to the first token.
        e2e_s: Time from arrival to the last token.
        prompt_tokens: Of all requests; ``cached_tokens`` those that engines found in their caches.
        requests_of: Requests by engine.
        num_refused: Requests that do not fit into an engine's memory. They are left out.
    """

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests_of: list[int] = field(default_factory=list)
    num_refused: int = 0


class Simulation:
    """One run, in order of time. The router learns first tokens and ends at once.

    Args:
        make_view: Returns what the router knows of the engines' caches; by default all.
    """

    def __init__(
        self,
        dispatcher: Chooses,
        specs: Sequence[EngineSpec],
        workload: Workload,
        make_view: Callable[[Sequence[Engine]], View] = ExactView,
    ) -> None:
        self._dispatcher = dispatcher
        self._workload = workload
        self._engines = [Engine(spec, workload.block_tokens) for spec in specs]
        self._view = make_view(self._engines)
        self._outcome = Outcome(requests_of=[0] * len(specs))
        self._arrivals: list[tuple[float, int, SimRequest]] = []
        self._numbers = count()
        self._last_worker: dict[object, int] = {}
        self._first_token_s: dict[str, float] = {}

    def run(self, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run until all requests have ended.

        Args:
            progress: Called now and then with the number of requests that have arrived.
        """
        for request in self._workload.first():
            self._expect(request)
        steps: list[tuple[float, int]] = []  # ends of engines' steps; outdated ones stay
        num_arrived = 0
        while self._arrivals or steps:
            if steps and (not self._arrivals or steps[0][0] <= self._arrivals[0][0]):
                now, worker = heapq.heappop(steps)
                if self._engines[worker].next_end_s != now:
                    continue
                self._end_step(worker, now)
            else:
                now, _, request = heapq.heappop(self._arrivals)
                num_arrived += 1
                if progress is not None and num_arrived % 100 == 0:
                    progress(num_arrived)
                if not self._engines[0].fits(request):
                    self._outcome.num_refused += 1
                    continue
                worker = self._send(request, now)
            if self._engines[worker].next_end_s < math.inf:
                heapq.heappush(steps, (self._engines[worker].next_end_s, worker))
        return self._outcome

    def check(self) -> None:
        """Verify the engines.

        Raises:
            InternalError: One does not hold together.
        """
        for engine in self._engines:
            engine.check()

    def _expect(self, request: SimRequest) -> None:
        heapq.heappush(self._arrivals, (request.time_s, next(self._numbers), request))

    def _send(self, request: SimRequest, now: float) -> int:
        prompt = Prompt(
            num_tokens=request.num_tokens,
            matched=self._view.match(request),
            last_worker=self._last_worker.get(request.session) if request.session else None,
            keys=request.keys,
            block_tokens=self._workload.block_tokens,
        )
        worker = self._dispatcher.choose(request.request_id, prompt, now)[0].worker
        self._view.placed(request, worker)
        if request.session:
            self._last_worker[request.session] = worker
        self._outcome.requests_of[worker] += 1
        self._engines[worker].add(request, now)
        return worker

    def _end_step(self, worker: int, now: float) -> None:
        engine, outcome = self._engines[worker], self._outcome
        started, ended = engine.advance()
        for request in started:
            self._dispatcher.first_token(request.request_id, now)
            self._first_token_s[request.request_id] = now
        for request in ended:
            self._dispatcher.ended(request.request_id, now)
            outcome.ttft_s.append(self._first_token_s.pop(request.request_id) - request.time_s)
            outcome.e2e_s.append(now - request.time_s)
            outcome.prompt_tokens += request.num_tokens
            cached_tokens = engine.hits.pop(request.request_id)
            outcome.cached_tokens += cached_tokens
            self._view.ended(request, cached_tokens)
            following = self._workload.after(request, now)
            if following is not None:
                self._expect(following)
