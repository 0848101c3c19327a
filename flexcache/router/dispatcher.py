"""Dispatcher: chooses a worker for each request, and keeps the records of those that run.

Joins load, service time and policy; what the workers' caches hold is handed in, so that the router
and the simulator run the same code. Workers are numbers. Pure: no clock, seeded randomness.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from flexcache.router.load import GONE, FloatArray, Running, Work, WorkerLoad
from flexcache.router.policy import CROWDING, EQUAL_S, EQUAL_SHARE, Candidates, Pick, Policy
from flexcache.router.service_time import ServiceTime

GPU, DRAM, DISK = range(3)
"""Rows of ``matched``."""
LEASE_S = 3600.0
"""A request runs for this long at most, unless its owner says otherwise: an end that is never
reported must not be load for ever."""


class MatchedPrompt(NamedTuple):
    """What decides where a request goes.

    Attributes:
        num_tokens: Length of the prompt.
        matched: Tokens that each tier of each worker supplies; shape (3, workers). A token counts
            for the fastest tier that has it.
        last_worker: Worker of the session's last request, a hint for ties.
        keys: Keys of its blocks, which only some of the compared policies need.
        block_tokens: Tokens of such a block.
    """

    num_tokens: int
    matched: FloatArray
    last_worker: int | None = None
    keys: Sequence[Hashable] = ()
    block_tokens: int = 0


class Stages(NamedTuple):
    """Where a request's prompt is computed, and where it is decoded.

    Attributes:
        matched: What each worker need not compute once that is done; as of a prompt.
        prefill_s: Predicted time until it is done.
        ttft_s: Predicted.
    """

    prefill: int
    decode: int
    matched: FloatArray
    prefill_s: float
    ttft_s: float


class Dispatcher:
    """Requests that run, and the choice for the next one.

    Args:
        service_time: What is known of the workers' speed; None: nothing yet.
        seed: Of the choice among equals.

    Attributes:
        running: Every request that runs, by its id, the earliest first.
        load: What the workers are busy with.
        service_time: What is known of the workers' speed.
    """

    def __init__(
        self,
        policy: Policy,
        num_workers: int = 0,
        *,
        service_time: ServiceTime | None = None,
        seed: int = 0,
    ) -> None:
        self.running: dict[str, Running] = {}
        self.load = WorkerLoad(num_workers)
        self.service_time = service_time or ServiceTime(num_workers)
        self._policy = policy
        self._rng = random.Random(seed)

    def resize(self, num_workers: int) -> None:
        """Make room for workers ``0 .. num_workers - 1``."""
        self.load.resize(num_workers)
        self.service_time.resize(num_workers)

    def forget_worker(self, worker: int, now: float) -> None:
        """Forget a worker that is gone; its requests run on, and are no load any more."""
        self.service_time.forget_worker(worker)
        self.load.forget_worker(worker)
        for running in self.running.values():
            if running.number == worker:
                self.load.end(running, now)
                running.number = GONE

    def score(self, prompt: MatchedPrompt, now: float, eligible: np.ndarray | None = None) -> Pick:
        """Choose a worker and change nothing.

        Args:
            eligible: Workers that may be chosen, at least one; None: all.
        """
        return self._policy.choose(self._candidates(prompt, now, eligible), self._rng)

    def choose(
        self, request_id: str, prompt: MatchedPrompt, now: float, eligible: np.ndarray | None = None
    ) -> tuple[Pick, Running]:
        """Choose a worker; the request counts as its load from now on."""
        candidates = self._candidates(prompt, now, eligible)
        pick = self._policy.choose(candidates, self._rng)
        running = self._begin(request_id, prompt, pick.worker, now)
        self._policy.placed(request_id, pick.worker, candidates)
        return pick, running

    def divide(
        self, prompt: MatchedPrompt, now: float, eligible: np.ndarray, prefilling: np.ndarray,
        like: Callable[[int], np.ndarray],
    ) -> Stages | None:  # fmt: skip
        """Choose between which workers to divide a request; None: one alone is sooner.

            alone = wait + own
            divided = max(wait, alone of the worker that computes) + own of one that loads it all

        ``own`` counts what it costs other requests there, as in the policy. KV that is handed over
        counts as loaded from below DRAM.

        Args:
            eligible: Workers that can serve all of it.
            prefilling: Those that can compute it for another.
            like: Returns which can take KV from one of these.
        """
        times, num_tokens = self.service_time, prompt.num_tokens
        wait_s = self.load.wait_s(now)
        crowding = 1.0 + CROWDING * self.load.num_requests
        alone_s = wait_s + crowding * times.predict(num_tokens, prompt.matched)
        prefill = int(np.where(prefilling, alone_s, np.inf).argmin())
        matched = prompt.matched.copy()
        matched[DISK] += np.maximum(num_tokens - 1 - matched.sum(axis=0), 0)
        divided_s = np.maximum(wait_s, alone_s[prefill])
        divided_s += crowding * times.predict(num_tokens, matched)
        divided_s = np.where(eligible & like(prefill), divided_s, np.inf)
        decode = int(divided_s.argmin())
        least_s = np.where(eligible, alone_s, np.inf).min()
        if divided_s[decode] >= least_s / (1.0 + EQUAL_SHARE) - EQUAL_S:
            return None  # predictions are no better than that
        prefill_s, ttft_s = float(alone_s[prefill]), float(divided_s[decode])
        return Stages(prefill, decode, matched, prefill_s, ttft_s)

    def begin_stages(
        self, ids: tuple[str, str], prompt: MatchedPrompt, stages: Stages, now: float
    ) -> tuple[Running, Running]:
        """Count both parts of a divided request, by these ids, as load from now on."""
        loaded = prompt._replace(matched=stages.matched)
        first = self._begin(ids[0], prompt, stages.prefill, now)
        return first, self._begin(ids[1], loaded, stages.decode, now, is_handed_over=True)

    def _begin(
        self, request_id: str, prompt: MatchedPrompt, worker: int, now: float,
        is_handed_over: bool = False,
    ) -> Running:  # fmt: skip
        gpu, dram, disk = (int(each) for each in prompt.matched[:, worker])
        new = prompt.num_tokens - gpu - dram - disk
        service_s = self.service_time.predict_one(worker, prompt.num_tokens, new, dram, disk)
        work = Work(prompt.num_tokens, new, dram, disk, service_s)
        running = Running(
            request_id, worker, work, now, now + LEASE_S, is_handed_over=is_handed_over
        )
        self.add(running, now)
        return running

    def add(self, running: Running, now: float) -> None:
        """Take a request in. One of its id that runs is replaced, as by a retry."""
        self.ended(running.request_id, now)
        self.running[running.request_id] = running
        if running.number != GONE:
            self.load.add(running, now)
            if running.is_handed_over:
                self.load.first_token(running, now)

    def first_token(self, request_id: str, now: float, *, learns: bool = True) -> None:
        """Note the first token of a request, and learn from the time it took.

        Args:
            learns: Whether that is known, and it does.
        """
        running = self.running.get(request_id)
        if running is None or running.first_token_s is not None:
            return
        running.first_token_s = now
        if running.number != GONE:
            served = self.load.first_token(running, now)
            if served is not None and learns:
                self.service_time.learn(served)

    def ended(self, request_id: str, now: float) -> Running | None:
        """Note that a request ended, for whatever reason; None: it is unknown."""
        running = self.running.pop(request_id, None)
        if running is not None:
            if running.number != GONE:
                self.load.end(running, now)
            self._policy.ended(request_id)
        return running

    def check(self) -> None:
        """Verify what it keeps.

        Raises:
            InternalError: It does not hold together.
        """
        self.load.check(each for each in self.running.values() if each.number != GONE)
        self.service_time.check()

    def _candidates(
        self, prompt: MatchedPrompt, now: float, eligible: np.ndarray | None
    ) -> Candidates:
        load, times = self.load, self.service_time
        return Candidates(
            num_tokens=prompt.num_tokens,
            matched=prompt.matched,
            own_s=times.predict(prompt.num_tokens, prompt.matched) if times.is_known else None,
            wait_s=load.wait_s(now),
            num_requests=load.num_requests,
            new_tokens=load.new_tokens,
            held_tokens=load.held_tokens,
            recent=load.recent(),
            mean_requests=load.mean_requests,
            eligible=eligible,
            last_worker=prompt.last_worker,
            keys=prompt.keys,
            block_tokens=prompt.block_tokens,
        )
