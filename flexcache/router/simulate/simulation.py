"""Runs a workload through simulated engines behind a dispatcher."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from flexcache.router.dispatcher import DRAM, GPU, Dispatcher, Prompt
from flexcache.router.simulate.engine import Engine, EngineSpec
from flexcache.router.simulate.requests import SimRequest, Workload


@dataclass(slots=True)
class Outcome:
    """What became of the requests, in the order of their ends.

    Attributes:
        ttft_s: Time from arrival to the first token.
        e2e_s: Time from arrival to the last token.
        prompt_tokens: Of all requests; ``cached_tokens`` likewise.
        requests_of: Requests by engine.
    """

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests_of: list[int] = field(default_factory=list)


class Simulation:
    """One run. The router sees what engines hold, first tokens and ends at once."""

    def __init__(
        self, dispatcher: Dispatcher, specs: Sequence[EngineSpec], workload: Workload
    ) -> None:
        self._dispatcher = dispatcher
        self._workload = workload
        self._engines = [Engine(spec, workload.block_tokens) for spec in specs]
        self._outcome = Outcome(requests_of=[0] * len(specs))
        self._arrivals: list[tuple[float, int, SimRequest]] = []
        self._numbers = count()
        self._last_worker: dict[object, int] = {}
        self._firsts: dict[str, float] = {}

    def run(self, progress: Callable[[int], None] = lambda done: None, until_s: float = 1e18) -> Outcome:
        arrivals = self._arrivals
        for request in self._workload.first():
            arrivals.append((request.time_s, next(self._numbers), request))
        heapq.heapify(arrivals)
        ends: list[tuple[float, int]] = []
        engines = self._engines
        while arrivals or ends:
            if ends and (not arrivals or ends[0][0] <= arrivals[0][0]):
                now, i = heapq.heappop(ends)
                engine = engines[i]
                if engine.next_end_s != now:
                    continue
                self._step(i, engine, now)
            else:
                now, _, request = heapq.heappop(arrivals)
                if now > until_s:
                    break
                i = self._arrive(request, now)
            if engines[i].next_end_s < 1e300:
                heapq.heappush(ends, (engines[i].next_end_s, i))
        return self._outcome

    def _arrive(self, request: SimRequest, now: float) -> int:
        hits = [engine.match(request) for engine in self._engines]
        matched = np.zeros((3, len(hits)))
        for i, hit in enumerate(hits):
            matched[GPU, i] = hit.gpu_tokens
            matched[DRAM, i] = hit.dram_tokens
        last = self._last_worker.get(request.session) if request.session is not None else None
        prompt = Prompt(request.num_tokens, matched, last, request.keys, self._workload.block_tokens)
        pick, _ = self._dispatcher.choose(request.request_id, prompt, now)
        if request.session is not None:
            self._last_worker[request.session] = pick.worker
        self._engines[pick.worker].add(request, now)
        self._outcome.requests_of[pick.worker] += 1
        return pick.worker

    def _step(self, i: int, engine: Engine, now: float) -> None:
        started, ended = engine.advance()
        outcome = self._outcome
        for request in started:
            self._dispatcher.first_token(request.request_id, now)
            self._firsts[request.request_id] = now
        for request in ended:
            self._dispatcher.ended(request.request_id, now)
            hit = engine.hits.pop(request.request_id)
            outcome.ttft_s.append(self._firsts.pop(request.request_id) - request.time_s)
            outcome.e2e_s.append(now - request.time_s)
            outcome.prompt_tokens += request.num_tokens
            outcome.cached_tokens += hit.gpu_tokens + hit.dram_tokens
            following = self._workload.after(request, now)
            if following is not None:
                heapq.heappush(
                    self._arrivals, (following.time_s, next(self._numbers), following)
                )
