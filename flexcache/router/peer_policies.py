"""Costs of other routers, from their sources, to compare with: `make_policy` has them by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from flexcache.errors import ConfigError
from flexcache.router.load import FloatArray
from flexcache.router.policy import (
    Candidates,
    Pick,
    Policy,
    ShortestTime,
    Stateless,
    pick_lowest,
    token_product,
)

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


def make_policy(name: str, temperature: float = 0.0) -> Policy:
    """Return a new policy by its name.

    Raises:
        ConfigError: There is none of this name, or it takes no temperature.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy = {name!r}: must be one of {', '.join(POLICIES)}")
    if name == "ours":
        return ShortestTime(temperature)
    if temperature:
        raise ConfigError(f"temperature = {temperature}: only the policy 'ours' has one")
    return POLICIES[name]()
