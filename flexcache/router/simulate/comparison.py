"""Compares policies on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from flexcache.errors import TraceError
from flexcache.router.dispatcher import Dispatcher
from flexcache.router.load import Load
from flexcache.router.peer_policies import make_policy
from flexcache.router.service_time import ServiceTime
from flexcache.router.simulate.engine import EngineSpec
from flexcache.router.simulate.requests import Workload
from flexcache.router.simulate.simulation import Outcome, Simulation

REFERENCE_BLOCK_TOKENS = 512
"""Sizes of caches are given in blocks of this many tokens, whatever the trace's blocks are."""

Progress = Callable[[str, int, int | None], None]
"""Called with the policy, the requests that have arrived, and how many there are."""


class Figures(msgspec.Struct, frozen=True):
    """How a policy did.

    Attributes:
        ttft_mean_s: Time from arrival to the first token.
        e2e_mean_s: Time from arrival to the last token.
        hit_rate: Share of all prompt tokens that were found on the chosen engine.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results by policy.

    Attributes:
        num_requests: Requests that ended, by policy.
        num_refused: Requests that were left out as no engine has room for them.
        busiest: Requests of the busiest engine over the mean, by policy.
    """

    policies: dict[str, Figures]
    num_requests: dict[str, int]
    busiest: dict[str, float]
    num_refused: int


def compare(
    workload: Workload,
    policies: Sequence[str],
    specs: Sequence[EngineSpec],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Run each policy on the same workload.

    Args:
        specs: Engines, with their caches in blocks of the workload.

    Raises:
        ConfigError: A policy does not exist.
        TraceError: No request fits into an engine.
    """
    made = {name: make_policy(name) for name in policies}
    outcomes: dict[str, Outcome] = {}
    for name, policy in made.items():
        dispatcher = Dispatcher(policy, Load(len(specs)), ServiceTime(len(specs)), seed=seed)
        simulation = Simulation(dispatcher, specs, workload)

        def say(done: int, name: str = name) -> None:
            if progress is not None:
                progress(name, done, workload.num_requests)

        outcomes[name] = simulation.run(say)
    return Comparison(
        policies={name: figures_of(outcome) for name, outcome in outcomes.items()},
        num_requests={name: len(outcome.ttft_s) for name, outcome in outcomes.items()},
        busiest={name: busiest_of(outcome) for name, outcome in outcomes.items()},
        num_refused=max(outcome.num_refused for outcome in outcomes.values()),
    )


def figures_of(outcome: Outcome) -> Figures:
    """Sum up a run.

    Raises:
        TraceError: No request fitted into an engine.
    """
    if not outcome.ttft_s:
        raise TraceError(f"no engine has room for any of the {outcome.num_refused:,} requests")
    ttft_s = np.array(outcome.ttft_s)
    return Figures(
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        e2e_mean_s=float(np.mean(outcome.e2e_s)),
        hit_rate=outcome.cached_tokens / outcome.prompt_tokens,
    )


def busiest_of(outcome: Outcome) -> float:
    """Return the requests of the busiest engine over the mean of all."""
    return max(outcome.requests_of) * len(outcome.requests_of) / sum(outcome.requests_of)


def spec_for(spec: EngineSpec, block_tokens: int) -> EngineSpec:
    """Convert an engine's caches from blocks of 512 tokens to those of a workload."""
    scale = REFERENCE_BLOCK_TOKENS / block_tokens
    return replace(
        spec,
        gpu_blocks=int(spec.gpu_blocks * scale),
        dram_blocks=int(spec.dram_blocks * scale),
    )
