"""Chooses the worker that answers a request soonest, in predicted seconds.

    cost = wait + own + 0.1 * requests on the worker * own + spread

``wait`` is the worker's backlog and ``own`` the predicted service time of this request there; the
third term is what its prefill costs the requests that the worker is decoding. The lowest cost wins,
or at a temperature above 0 a random one, by softmax.

    spread = 0.4 * usual own * (recent requests of the worker - the fewest of any) / (1 + mean)^3

While the workers are idle, the one that has a popular prefix would get all of its requests for
ever. ``spread`` grows with each until it exceeds what the prefix saves, and another worker gets a
copy. ``usual own`` is the geometric mean of recent requests' lowest ``own``, ``mean`` the number of
requests per worker: under load the term vanishes.

Pure: the caller passes the random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flexcache.router.load import FloatArray

_CROWDING = 0.1
"""Share of a request's prefill that it costs each other request on the worker. From 0.02 to 1 it
trades the time to the first token against the time to the last; 0.1 is near best for both."""
_SPREAD = 0.4
_BUSY = 8.0
"""Requests per worker from which on the spread is left out: it would be a thousandth."""
_USUAL_GAIN = 0.02
_EQUAL_SHARE = 0.05
_EQUAL_S = 0.002
"""Costs that differ by less are equal: predictions are no better than that."""


@dataclass(slots=True, kw_only=True)
class Candidates:
    """A request and the state of the workers, as arrays with an entry per worker.

    Attributes:
        num_tokens: Length of the prompt.
        matched: Tokens that each tier supplies, GPU, DRAM, disk; shape (3, workers). A token counts
            for the fastest tier that has it.
        own_s: Predicted service time; None while it is unknown.
        wait_s: Backlog.
        num_requests: Requests in flight.
        new_tokens: Tokens that the requests without a first token have to compute.
        held_tokens: Prompt tokens of all requests in flight.
        recent: How many requests each worker got of late, as a weight.
        mean_requests: Mean of ``num_requests``.
        eligible: Workers that may be chosen, at least one; None: all.
        last_worker: Worker of the session's last request.
        keys: Keys of the prompt's blocks, for policies that compare prompts in flight.
        block_tokens: Tokens of a key.
    """

    num_tokens: int
    matched: FloatArray
    own_s: FloatArray | None
    wait_s: FloatArray
    num_requests: FloatArray
    new_tokens: FloatArray
    held_tokens: FloatArray
    recent: FloatArray
    mean_requests: float
    eligible: np.ndarray | None = None
    last_worker: int | None = None
    keys: Sequence[Hashable] = ()
    block_tokens: int = 0

    @property
    def num_workers(self) -> int:
        return len(self.num_requests)

    @property
    def own_new_tokens(self) -> FloatArray:
        """Tokens that each worker would have to compute."""
        own: FloatArray = self.num_tokens - self.matched.sum(axis=0)
        return own


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen worker.

    Attributes:
        costs: The policy's cost of each worker, infinite for those that are not eligible.
        reason: ``cost``, ``tie``, ``only_one``, or the policy's own.
    """

    worker: int
    costs: FloatArray
    reason: str

    def next_best(self, count: int) -> list[int]:
        """Return the next best eligible workers, best first."""
        costs = self.costs.copy()
        costs[self.worker] = math.inf
        count = min(count, int(np.isfinite(costs).sum()))
        best = np.argpartition(costs, count)[:count] if count < len(costs) else np.arange(count)
        return [int(worker) for worker in best[np.argsort(costs[best], kind="stable")]]


class Policy(Protocol):
    """Chooses among workers. `placed` and `ended` frame every request that it chose for."""

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        """Choose a worker."""
        ...

    def placed(self, request_id: str, worker: int, candidates: Candidates) -> None:
        """Note where a request was sent."""
        ...

    def ended(self, request_id: str) -> None:
        """Note that a request ended."""
        ...


class Stateless:
    """Base of policies that remember nothing of the requests they placed."""

    def placed(self, request_id: str, worker: int, candidates: Candidates) -> None:
        """Remember nothing."""

    def ended(self, request_id: str) -> None:
        """Remember nothing."""


class ShortestTime:
    """The worker with the lowest predicted cost in seconds.

    While the service time is unknown: the product of tokens to compute and requests (LMetric,
    arXiv 2603.15202), which needs no constants.

    Args:
        temperature: Of the softmax over costs, in units of the spread between the lowest and the
            highest; 0: always the lowest.
    """

    def __init__(self, temperature: float = 0.0) -> None:
        self._temperature = temperature
        self._log_usual: float | None = None

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        """Choose the worker with the lowest cost; among equals the session's last, or any."""
        own = candidates.own_s
        if own is None:
            usual = candidates.own_new_tokens.min()
            costs = token_product(candidates)
        else:
            usual = own.min() if self._log_usual is None else math.exp(self._log_usual)
            costs = candidates.num_requests * _CROWDING
            costs += 1.0
            costs *= own
            costs += candidates.wait_s
        if candidates.mean_requests < _BUSY:
            usual *= _SPREAD / (1.0 + candidates.mean_requests) ** 3
            costs += (candidates.recent - candidates.recent.min()) * usual
        if self._temperature > 0:
            return sample(costs, candidates, rng, self._temperature)
        return self._among_equals(pick_lowest(costs, candidates, rng), candidates, rng)

    def placed(self, request_id: str, worker: int, candidates: Candidates) -> None:
        """Average what requests usually cost."""
        if candidates.own_s is not None:
            lowest = math.log(max(float(candidates.own_s.min()), _EQUAL_S))
            before = lowest if self._log_usual is None else self._log_usual
            self._log_usual = before + _USUAL_GAIN * (lowest - before)

    def ended(self, request_id: str) -> None:
        """Remember nothing of it."""

    @staticmethod
    def _among_equals(lowest: Pick, candidates: Candidates, rng: random.Random) -> Pick:
        costs = lowest.costs
        equals = (costs <= costs[lowest.worker] * (1.0 + _EQUAL_SHARE) + _EQUAL_S).nonzero()[0]
        if len(equals) == 1:
            return lowest
        if candidates.last_worker is not None and candidates.last_worker in equals:
            return Pick(candidates.last_worker, costs, "session")
        # Any of them: routers that decide at the same moment would all pick the same best one.
        return Pick(int(equals[rng.randrange(len(equals))]), costs, "tie")


def token_product(candidates: Candidates) -> FloatArray:
    """Return LMetric's cost: tokens to compute times requests, this one included in both."""
    tokens = candidates.own_new_tokens + candidates.new_tokens
    cost: FloatArray = tokens * (candidates.num_requests + 1.0)
    return cost


def pick_lowest(costs: FloatArray, candidates: Candidates, rng: random.Random) -> Pick:
    """Pick the eligible worker with the lowest cost; among equals any."""
    costs = _eligible(costs, candidates)
    best = int(costs.argmin())
    equals = (costs == costs[best]).nonzero()[0]
    if len(equals) > 1:
        return Pick(int(equals[rng.randrange(len(equals))]), costs, "tie")
    return Pick(best, costs, "only_one" if np.isfinite(costs).sum() == 1 else "cost")


def sample(
    costs: FloatArray, candidates: Candidates, rng: random.Random, temperature: float
) -> Pick:
    """Pick an eligible worker by softmax of the negative costs, scaled to the range 0 to 1."""
    costs = _eligible(costs, candidates)
    finite = np.isfinite(costs)
    low, high = costs[finite].min(), costs[finite].max()
    weights = np.exp((low - costs) / (max(high - low, 1e-12) * temperature))
    steps = weights.cumsum()
    worker = int(np.searchsorted(steps, rng.random() * steps[-1], side="right"))
    return Pick(worker, costs, "sampled")


def _eligible(costs: FloatArray, candidates: Candidates) -> FloatArray:
    if candidates.eligible is None:
        return costs
    return np.where(candidates.eligible, costs, math.inf)
