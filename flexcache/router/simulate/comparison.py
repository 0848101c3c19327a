"""Comparison of policies on simulated engines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from flexcache.errors import ConfigError, MissingDependencyError, TraceError
from flexcache.router.dispatcher import DRAM, GPU, Dispatcher, MatchedPrompt
from flexcache.router.load import FloatArray, Running
from flexcache.router.policy import Pick, make_policy
from flexcache.router.simulate.engine import Engine, EngineSpec
from flexcache.router.simulate.workload import SimRequest, Workload


class Chooses(Protocol):
    """What the simulation needs of `Dispatcher`."""

    def choose(
        self, request_id: str, prompt: MatchedPrompt, now: float
    ) -> tuple[Pick, Running]: ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str, now: float) -> object: ...


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
class Simulated:
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
        self._outcome = Simulated(requests_of=[0] * len(specs))
        self._arrivals: list[tuple[float, int, SimRequest]] = []
        self._numbers = count()
        self._last_worker: dict[object, int] = {}
        self._first_token_s: dict[str, float] = {}

    def run(self, progress: Callable[[int], None] | None = None) -> Simulated:
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
        prompt = MatchedPrompt(
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
    outcomes: dict[str, Simulated] = {}
    for name, policy in made.items():
        dispatcher = Dispatcher(policy, len(specs), seed=seed)
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


def figures_of(outcome: Simulated) -> Figures:
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


def busiest_of(outcome: Simulated) -> float:
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


_FORMATS = (".png", ".svg", ".pdf")
_PANELS = {
    "time to first token, mean (s)": "ttft_mean_s",
    "p99 (s)": "ttft_p99_s",
    "time to last token, mean (s)": "e2e_mean_s",
    "prompt tokens found cached": "hit_rate",
}
_COLOUR, _FIRST_COLOUR = "#8d99ae", "#2a9d5c"


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work is done.

    Raises:
        ConfigError: The format is unknown.
        MissingDependencyError: matplotlib is missing.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: a plot ends with one of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("a plot needs matplotlib: pip install '.[bench]'")


def write_plot(comparison: Comparison, title: str, path: Path) -> None:
    """Draw a bar per policy and figure.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    names = list(comparison.policies)
    figure = Figure(figsize=(12, 1.6 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for axis, (label, figure_name) in zip(axes, _PANELS.items(), strict=True):
        values = [getattr(comparison.policies[name], figure_name) for name in names]
        colours = [_FIRST_COLOUR, *[_COLOUR] * (len(names) - 1)]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
