"""Chooses a worker for each request and follows the request to its end.

Joins load, service time and policy; what the workers' caches hold is handed in, so that the router
and the simulator run the same code. Workers are numbers. Pure: no clock, seeded randomness.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from flexcache.router.load import FloatArray, Load, Work
from flexcache.router.policy import Candidates, Pick, Policy
from flexcache.router.service_time import ServiceTime

GPU, DRAM, DISK = range(3)
"""Rows of ``matched``."""


class Prompt(NamedTuple):
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


class Dispatcher:
    """Requests in flight, and the choice for the next one.

    Attributes:
        load: Requests in flight; those of other deciders are added to it directly.
        service_time: What is known of the workers' speed.
    """

    def __init__(
        self, policy: Policy, load: Load, service_time: ServiceTime, *, seed: int = 0
    ) -> None:
        self.load = load
        self.service_time = service_time
        self._policy = policy
        self._rng = random.Random(seed)

    def resize(self, num_workers: int) -> None:
        """Make room for workers ``0 .. num_workers - 1``."""
        self.load.resize(num_workers)
        self.service_time.resize(num_workers)

    def forget_worker(self, worker: int, now: float) -> int:
        """Forget a worker that is gone; returns how many requests it had."""
        self.service_time.forget_worker(worker)
        return self.load.forget_worker(worker, now)

    def score(self, prompt: Prompt, now: float, eligible: np.ndarray | None = None) -> Pick:
        """Choose a worker and change nothing.

        Args:
            eligible: Workers that may be chosen, at least one; None: all.
        """
        return self._policy.choose(self._candidates(prompt, now, eligible), self._rng)

    def choose(
        self, request_id: str, prompt: Prompt, now: float, eligible: np.ndarray | None = None
    ) -> tuple[Pick, Work]:
        """Choose a worker; the request counts as its load from now on."""
        candidates = self._candidates(prompt, now, eligible)
        pick = self._policy.choose(candidates, self._rng)
        work = self.work_on(pick.worker, prompt)
        self.ended(request_id, now)
        self.load.add(request_id, pick.worker, now, work)
        self._policy.placed(request_id, pick.worker, candidates)
        return pick, work

    def work_on(self, worker: int, prompt: Prompt) -> Work:
        """Return what a prompt would cost a worker."""
        gpu, dram, disk = (int(each) for each in prompt.matched[:, worker])
        new = prompt.num_tokens - gpu - dram - disk
        service_s = self.service_time.predict_one(worker, prompt.num_tokens, new, dram, disk)
        return Work(prompt.num_tokens, new, dram, disk, service_s)

    def first_token(self, request_id: str, now: float) -> None:
        """Note the first token of a request, and learn from the time it took."""
        served = self.load.first_token(request_id, now)
        if served is not None:
            self.service_time.learn(served)

    def ended(self, request_id: str, now: float) -> None:
        """Note that a request ended, for whatever reason; unknown ones are ignored."""
        if self.load.end(request_id, now):
            self._policy.ended(request_id)

    def expire(self, now: float) -> list[str]:
        """Forget requests whose lease is over; returns their ids."""
        expired = self.load.expire(now)
        for request_id in expired:
            self._policy.ended(request_id)
        return expired

    def check(self) -> None:
        """Verify what it keeps.

        Raises:
            InternalError: It does not hold together.
        """
        self.load.check()
        self.service_time.check()

    def _candidates(self, prompt: Prompt, now: float, eligible: np.ndarray | None) -> Candidates:
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
