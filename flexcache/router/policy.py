"""Policies: ours chooses the worker that answers soonest, in predicted seconds; others to compare.

    cost = wait + own + 0.1 * requests on the worker * own + spread

``wait`` is the worker's backlog and ``own`` the predicted service time of this request there; the
third term is what its prefill costs the requests that the worker is decoding. The lowest cost wins.

    spread = 0.4 * usual own * (recent requests of the worker - the fewest of any) / (1 + mean)^3

While the workers are idle, the one that has a popular prefix would get all of its requests for
ever. ``spread`` grows with each until it exceeds what the prefix saves, and another worker gets a
copy. ``usual own`` is the geometric mean of recent requests' lowest ``own``, ``mean`` the number of
requests per worker: under load the term vanishes.

The costs of other routers are from their sources. Pure: the caller passes the random numbers.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flexcache.errors import ConfigError
from flexcache.router.load import FloatArray

CROWDING = 0.1
"""Share of a request's prefill that it costs each other request on the worker. From 0.02 to 1 it
trades the time to the first token against the time to the last; 0.1 is near best for both."""
_SPREAD = 0.4
_BUSY = 8.0
"""Requests per worker from which on the spread is left out: it would be a thousandth."""
_USUAL_GAIN = 0.02
_LOADED = 0.1
"""What a token below the GPU costs, of one that is computed, while times are unknown. On an H200
16,000 tokens were loaded from DRAM in 6 % of the time to compute them (docs/benchmarks.md)."""
EQUAL_SHARE = 0.05
EQUAL_S = 0.002
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
    arXiv 2603.15202), and a little for tokens to load: else a conversation would leave the GPU that
    has it for any engine that shares its DRAM.
    """

    def __init__(self) -> None:
        self._log_usual: float | None = None

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        """Choose the worker with the lowest cost; among equals the session's last, or any."""
        own = candidates.own_s
        if own is None:
            usual = candidates.own_new_tokens.min()
            costs = token_product(candidates) + _LOADED * candidates.matched[1:].sum(axis=0)
        else:
            usual = own.min() if self._log_usual is None else math.exp(self._log_usual)
            costs = candidates.num_requests * CROWDING
            costs += 1.0
            costs *= own
            costs += candidates.wait_s
        if candidates.mean_requests < _BUSY:
            usual *= _SPREAD / (1.0 + candidates.mean_requests) ** 3
            costs += (candidates.recent - candidates.recent.min()) * usual
        return self._among_equals(pick_lowest(costs, candidates, rng), candidates, rng)

    def placed(self, request_id: str, worker: int, candidates: Candidates) -> None:
        """Average what requests usually cost."""
        if candidates.own_s is not None:
            lowest = math.log(max(float(candidates.own_s.min()), EQUAL_S))
            before = lowest if self._log_usual is None else self._log_usual
            self._log_usual = before + _USUAL_GAIN * (lowest - before)

    def ended(self, request_id: str) -> None:
        """Remember nothing of it."""

    @staticmethod
    def _among_equals(lowest: Pick, candidates: Candidates, rng: random.Random) -> Pick:
        costs = lowest.costs
        equals = (costs <= costs[lowest.worker] * (1.0 + EQUAL_SHARE) + EQUAL_S).nonzero()[0]
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


def _eligible(costs: FloatArray, candidates: Candidates) -> FloatArray:
    if candidates.eligible is None:
        return costs
    return np.where(candidates.eligible, costs, math.inf)


_STICKY_MATCH = 0.8
_STICKY_LEAD_S = 1.0
_STICKY_TOKENS_PER_S = 15_928.0
"""llm-d's default for its peakPrefillThroughput."""
_TUNED_SCALE = 8.0
_DEFAULT_BLOCK = 16
_TIER_CREDIT = np.array([1.0, 0.75, 0.25])
"""What Dynamo deducts for a block on GPU, in DRAM, on disk."""


class RoundRobin(Stateless):
    """The eligible workers in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        turns = (np.arange(candidates.num_workers) - self._next) % candidates.num_workers
        pick = pick_lowest(turns.astype(np.float64), candidates, rng)
        self._next = pick.worker + 1
        return pick


class Random(Stateless):
    """Any eligible worker."""

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        return pick_lowest(np.zeros(candidates.num_workers), candidates, rng)


class LeastRequests(Stateless):
    """The worker with the fewest requests in flight."""

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        return pick_lowest(candidates.num_requests, candidates, rng)


class LMetric(Stateless):
    """Tokens to compute times requests (arXiv 2603.15202), as in SGLang's gateway and llm-d."""

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        return pick_lowest(token_product(candidates), candidates, rng)


class Sticky(Stateless):
    """llm-d's stack of 2026: workers that have most of the prompt, unless they are far behind.

    Workers with at least 80 % of the prompt are preferred, unless the least loaded of them has a
    queue that is over a second longer than that of the least loaded worker; among the preferred,
    or all, the one with the fewest tokens to compute.
    """

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        allowed = candidates.eligible
        if allowed is None:
            allowed = np.ones(candidates.num_workers, dtype=bool)
        matched = candidates.matched.sum(axis=0)
        holders = allowed & (matched >= _STICKY_MATCH * candidates.num_tokens)
        queue_s = candidates.new_tokens / _STICKY_TOKENS_PER_S
        costs = candidates.new_tokens + candidates.own_new_tokens
        if holders.any() and queue_s[holders].min() <= queue_s[allowed].min() + _STICKY_LEAD_S:
            costs = np.where(holders, costs, costs + costs.max() + 1.0)
        return pick_lowest(costs, candidates, rng)


class Dynamo:
    """NVIDIA Dynamo's cost in blocks: prefill to come, own included, and blocks in use.

    Args:
        prefill_load_scale: Weight of the prefill.
    """

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        self._scale = prefill_load_scale
        self._in_use: dict[int, Counter[Hashable]] = {}
        self._placed: dict[str, tuple[int, Sequence[Hashable]]] = {}

    def choose(self, candidates: Candidates, rng: random.Random) -> Pick:
        blocks = candidates.block_tokens or _DEFAULT_BLOCK
        credit = _TIER_CREDIT @ candidates.matched
        prefill = candidates.new_tokens + np.maximum(candidates.num_tokens - credit, 0.0)
        costs = self._scale / blocks * prefill + self._decode_blocks(candidates)
        return pick_lowest(costs, candidates, rng)

    def _decode_blocks(self, candidates: Candidates) -> FloatArray:
        """Return how many blocks would be in use on each worker, different ones if known."""
        if not candidates.keys:
            blocks_held: FloatArray = candidates.held_tokens + candidates.num_tokens
            return blocks_held / (candidates.block_tokens or _DEFAULT_BLOCK)
        own = set(_whole_blocks(candidates))
        blocks = np.full(candidates.num_workers, float(len(own)))
        for worker, in_use in self._in_use.items():
            blocks[worker] = len(in_use) + sum(key not in in_use for key in own)
        return blocks

    def placed(self, request_id: str, worker: int, candidates: Candidates) -> None:
        """Count the prompt's blocks as in use."""
        keys = _whole_blocks(candidates)
        self._placed[request_id] = worker, keys
        self._in_use.setdefault(worker, Counter()).update(keys)

    def ended(self, request_id: str) -> None:
        """Count the prompt's blocks no longer."""
        worker, keys = self._placed.pop(request_id, (0, ()))
        in_use = self._in_use.get(worker, Counter())
        for key in keys:
            in_use[key] -= 1
            if not in_use[key]:
                del in_use[key]


def _whole_blocks(candidates: Candidates) -> Sequence[Hashable]:
    return candidates.keys[: candidates.num_tokens // (candidates.block_tokens or _DEFAULT_BLOCK)]


POLICIES: dict[str, Callable[[], Policy]] = {
    "ours": ShortestTime,
    "dynamo": Dynamo,
    "dynamo_tuned": lambda: Dynamo(_TUNED_SCALE),
    "lmetric": LMetric,
    "sticky": Sticky,
    "least": LeastRequests,
    "round_robin": RoundRobin,
    "random": Random,
}


def make_policy(name: str) -> Policy:
    """Return a new policy by its name.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy = {name!r}: must be one of {', '.join(POLICIES)}")
    return POLICIES[name]()
