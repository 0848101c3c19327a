"""Routing decisions in simulated engines: FlexCache's policy beside those of other routers.

    python benchmarks/router/bench_decisions.py --conversation FILE --claude-code FILE
    python benchmarks/router/bench_decisions.py --only spread --json out.json

The engines and the policies are those of `flexcache router simulate`. Sections:

* *policies*: all arms on traces and generated agents; ratios of ours to Dynamo's default and to the
  best of the tuned Dynamo, llm-d's and LMetric.
* *reference*: the arms on the conversation trace beside an independent simulator's figures.
* *slow*: two of eight engines take twice as long.
* *learning*: service times learned from a prior that is 4 times off, beside known constants.
* *approximate*: no events, with the engines' capacity known and guessed 3 times too large.
* *deciders*: four routers that tell each other after 20 ms, or never, beside one.
* *spread*: paced requests with one system prompt on idle engines.
* *time*: of one decision among 1,000 workers, without the index.

Sections of a trace that is not given are left out. All runs have fixed seeds.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import router_path  # noqa: F401
import typer
from decision_parts import Deciders, GuessedView, KnownTime
from rich.console import Console
from rich.table import Table

from flexcache.router.dispatcher import Dispatcher, MatchedPrompt
from flexcache.router.policy import make_policy
from flexcache.router.service_time import ServiceTime
from flexcache.router.simulate.comparison import (
    Chooses,
    Simulated,
    Simulation,
    busiest_of,
    figures_of,
)
from flexcache.router.simulate.engine import EngineSpec
from flexcache.router.simulate.workload import (
    Agents,
    AgentSpec,
    Recorded,
    SimRequest,
    Workload,
    read_trace,
    tool_agents,
)

ARMS = ("ours", "dynamo", "dynamo_tuned", "sticky", "lmetric")
TUNED_PEERS = ("dynamo_tuned", "sticky", "lmetric")
ENGINES = 8
SEEDS = (1, 2, 3)
SKIPPED = 500
REFERENCE = {
    "dynamo": (2.42, 20.5),
    "dynamo_tuned": (1.98, 19.3),
    "sticky": (1.87, 19.0),
    "lmetric": (1.94, 17.4),
    "ours": (1.81, 16.5),
}
"""Mean times to the first and the last token of another implementation of the same model."""
BLOCK = 512

console = Console(width=120)


@dataclass
class Target:
    """A figure that must not exceed a bound; None: there is no bound."""

    name: str
    value: float
    bound: float | None = None

    @property
    def is_reached(self) -> bool | None:
        return None if self.bound is None else self.value <= self.bound


@dataclass
class Results:
    """What is written as JSON."""

    figures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def add(self, section: str, arm: str, **figures: float) -> None:
        self.figures.setdefault(section, {})[arm] = figures


@dataclass(frozen=True)
class Case:
    """A workload and its engines.

    Attributes:
        bounds: Of the mean TTFT against Dynamo's default, and against the best of the other peers.
    """

    name: str
    workloads: Sequence[Workload]
    spec: EngineSpec = field(default_factory=EngineSpec)
    bounds: tuple[float | None, float | None] = (None, None)


def dispatcher(
    policy: str, seed: int, times: ServiceTime | None = None, engines: int = ENGINES
) -> Dispatcher:
    return Dispatcher(make_policy(policy), engines, service_time=times, seed=seed)


def run(chooses: Chooses, workload: Workload, specs: Sequence[EngineSpec]) -> Simulated:
    return Simulation(chooses, specs, workload).run()


def mean_figures(outcomes: Sequence[Simulated]) -> dict[str, float]:
    """Return the means over several seeds."""
    rows = [
        {
            **{
                name: getattr(figures_of(each), name) for name in figures_of(each).__struct_fields__
            },
            "requests": float(len(each.ttft_s)),
            "busiest": busiest_of(each),
        }
        for each in outcomes
    ]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def measure_policies(results: Results, cases: Sequence[Case]) -> None:
    best_ratios = []
    for case in cases:
        means = {}
        for arm in ARMS:
            outcomes = [
                run(dispatcher(arm, seed), workload, [case.spec] * ENGINES)
                for seed, workload in enumerate(case.workloads)
            ]
            means[arm] = mean_figures(outcomes)
            results.add(case.name, arm, **means[arm])
        ttft = {arm: each["ttft_mean_s"] for arm, each in means.items()}
        best_ratios.append(ttft["ours"] / min(ttft[arm] for arm in TUNED_PEERS))
        p50, p99 = (
            means["ours"][name] / means["dynamo"][name] for name in ("ttft_p50_s", "ttft_p99_s")
        )
        is_bound = case.bounds[0] is not None
        results.targets += [
            Target(f"{case.name}: TTFT to Dynamo", ttft["ours"] / ttft["dynamo"], case.bounds[0]),
            Target(f"{case.name}: TTFT to the best peer", best_ratios[-1], case.bounds[1]),
            Target(f"{case.name}: TTFT p50 to Dynamo", p50, 0.6 if is_bound else None),
            Target(f"{case.name}: TTFT p99 to Dynamo", p99, 1.05 if is_bound else None),
        ]
    results.targets.append(
        Target("mean of TTFT to the best peer", float(np.mean(best_ratios)), 0.96)
    )


def measure_reference(results: Results, workload: Workload) -> None:
    for arm, (ttft_s, e2e_s) in REFERENCE.items():
        figures = mean_figures([run(dispatcher(arm, 0), workload, [EngineSpec()] * ENGINES)])
        results.add("reference", arm, **figures)
        off = max(abs(figures["ttft_mean_s"] / ttft_s - 1), abs(figures["e2e_mean_s"] / e2e_s - 1))
        results.targets.append(Target(f"reference, {arm}: relative difference", off, 0.05))


def measure_slow(results: Results, workload: Workload) -> None:
    specs = [EngineSpec(slowdown=2.0)] * 2 + [EngineSpec()] * (ENGINES - 2)
    for arm in ARMS:
        results.add("2 of 8 slow", arm, **mean_figures([run(dispatcher(arm, 0), workload, specs)]))
    known = run(dispatcher("ours", 0, KnownTime(ENGINES)), workload, specs)
    results.add("2 of 8 slow", "ours, equal constants", **mean_figures([known]))
    ttft = {arm: each["ttft_mean_s"] for arm, each in results.figures["2 of 8 slow"].items()}
    ratio = ttft["ours"] / min(ttft[arm] for arm in ARMS[1:])
    results.targets.append(Target("2 of 8 slow: TTFT to the best peer", ratio, 1.0))


def measure_learning(results: Results, workload: Workload, spec: EngineSpec, name: str) -> None:
    def later_mean_s(make_times: Callable[[], ServiceTime]) -> float:
        outcomes = [
            run(dispatcher("ours", seed, make_times()), workload, [spec] * ENGINES)
            for seed in SEEDS
        ]
        return float(np.mean([np.mean(each.ttft_s[SKIPPED:]) for each in outcomes]))

    section = f"learning, {name}"
    known_s = later_mean_s(lambda: KnownTime(ENGINES))
    results.add(section, "known constants", ttft_mean_s=known_s)
    for prior in (0.125, 0.5, 2.0):  # the built-in one is about twice the engines' constants
        factor = f"prior {2 * prior:g} times the truth"
        mean_s = later_mean_s(lambda prior=prior: ServiceTime(ENGINES, prior=prior))  # type: ignore[misc]
        results.add(section, factor, ttft_mean_s=mean_s)
        results.targets.append(Target(f"{section}, {factor}: TTFT", mean_s / known_s, 1.05))


def measure_approximate(results: Results, workload: Workload, name: str) -> None:
    section = f"approximate, {name}"
    spec = EngineSpec()
    exact = mean_figures([run(dispatcher("ours", 0), workload, [spec] * ENGINES)])
    results.add(section, "events", **exact)
    for factor, bound in ((1, 1.05), (3, None)):
        simulation = Simulation(
            dispatcher("ours", 0), [spec] * ENGINES, workload,
            lambda engines, factor=factor: GuessedView(  # type: ignore[misc]
                engines, workload.block_tokens, factor * spec.gpu_blocks
            ),
        )  # fmt: skip
        figures = mean_figures([simulation.run()])
        title = "capacity known" if factor == 1 else f"capacity guessed {factor} times too large"
        results.add(section, title, **figures)
        ratio = figures["ttft_mean_s"] / exact["ttft_mean_s"]
        results.targets.append(Target(f"{section}, {title}: TTFT", ratio, bound))


def spread_out(recorded: Recorded, seed: int) -> Recorded:
    """Spread requests of one recorded time until the next: the conversation trace has times of 3 s,
    and no delay is short enough to tell of requests at the same moment."""
    times = sorted({request.time_s for request in recorded.requests})
    following = dict(zip(times, [*times[1:], times[-1] + 1.0], strict=True))
    rng = random.Random(seed)
    requests = [
        replace(each, time_s=rng.uniform(each.time_s, following[each.time_s]))
        for each in recorded.requests
    ]
    requests.sort(key=lambda request: request.time_s)
    return Recorded(requests, recorded.block_tokens)


def measure_deciders(results: Results, recorded: Recorded, name: str) -> None:
    workloads = [spread_out(recorded, seed) for seed in SEEDS]
    section = f"deciders, {name}"

    def ttft_s(count: int, delay_s: float | None) -> float:
        figures = mean_figures(
            [
                run(Deciders(count, ENGINES, delay_s), workload, [EngineSpec()] * ENGINES)
                for workload in workloads
            ]
        )
        title = f"{count}, {'unsynced' if delay_s is None else f'{delay_s * 1e3:g} ms'}"
        results.add(section, title, **figures)
        return figures["ttft_mean_s"]

    one_s = ttft_s(1, 0.0)
    results.targets += [
        Target(f"{section}: 4 with 20 ms to 1: TTFT", ttft_s(4, 0.02) / one_s, 1.03),
        Target(f"{section}: 4 unsynced to 1: TTFT", ttft_s(4, None) / one_s),
    ]


def paced(system_tokens: int, count: int = 400) -> Recorded:
    """Return requests a second apart with one system prompt."""
    rng = random.Random(5)
    shared = system_tokens // BLOCK
    requests = []
    for i in range(count):
        num_tokens = system_tokens + rng.randint(100, 1000)
        blocks = range(-(-num_tokens // BLOCK))
        keys = [(0 if at < shared else i + 1, at) for at in blocks]
        requests.append(SimRequest(f"{i}", float(i), num_tokens, 50, keys))
    return Recorded(requests, BLOCK)


def measure_spread(results: Results) -> None:
    for tokens, bound in ((1024, 1.3), (2048, 1.3), (8192, 1.3), (32_768, None)):
        for arm in ARMS:
            outcome = run(dispatcher(arm, 0), paced(tokens), [EngineSpec()] * ENGINES)
            results.add(f"system prompt of {tokens}", arm, **mean_figures([outcome]))
            if arm == "ours":
                name = f"system prompt of {tokens}, idle: most requests to the mean"
                results.targets.append(Target(name, busiest_of(outcome), bound))


def measure_time(results: Results, workers: int = 1000, rounds: int = 3000) -> None:
    router = dispatcher("ours", 0, KnownTime(workers), workers)
    rng = np.random.default_rng(0)
    matched = np.zeros((3, workers))
    matched[0, rng.integers(0, workers, 3)] = 100_000
    spent = []
    for i in range(rounds):
        prompt = MatchedPrompt(131_072, matched)
        started = time.perf_counter()
        router.choose(f"{i}", prompt, i * 1e-3)
        spent.append(time.perf_counter() - started)
        if i >= 8 * workers // 10:
            router.first_token(f"{i - 800}", i * 1e-3)
            router.ended(f"{i - 800}", i * 1e-3)
    p50, p99 = np.percentile(spent, [50, 99]) * 1e6
    results.add("time", f"{workers} workers, us", p50=float(p50), p99=float(p99))


def show(results: Results) -> None:
    for section, arms in results.figures.items():
        names = list(dict.fromkeys(name for figures in arms.values() for name in figures))
        table = Table("", *(name.removesuffix("_s") for name in names), title=section)
        for arm, figures in arms.items():
            table.add_row(
                arm, *(f"{figures[name]:.3f}" if name in figures else "" for name in names)
            )
        console.print(table)
    table = Table("target", "value", "bound", "", title="targets")
    for target in results.targets:
        mark = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[target.is_reached]
        bound = "" if target.bound is None else f"{target.bound:.2f}"
        table.add_row(target.name, f"{target.value:.3f}", bound, mark)
    console.print(table)


def main(
    conversation: Annotated[
        Path | None, typer.Option(help="Mooncake's conversation trace.", show_default=False)
    ] = None,
    claude_code: Annotated[
        Path | None, typer.Option(help="The trace claude_code_a.", show_default=False)
    ] = None,
    claude_code_load: Annotated[float, typer.Option(help="Factor of its rate.")] = 0.15,
    only: Annotated[str, typer.Option(help="Only sections whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
) -> None:
    """Simulate routing decisions; exits with status 1 if a target is missed."""
    results = Results()
    agents = Case("70 agents", [Agents(AgentSpec(num_sessions=70), seed) for seed in SEEDS],
                  bounds=(0.5, 1.0))  # fmt: skip
    cases = [
        replace(agents, name="120 agents",
                workloads=[Agents(AgentSpec(), seed) for seed in SEEDS]),
        agents,
        Case("tool agents", [tool_agents(seed=seed) for seed in SEEDS], bounds=(None, 1.0)),
    ]  # fmt: skip
    chat: Recorded | None = None
    if conversation is not None:
        chat = read_trace([conversation], num_requests=6000)
        dram = EngineSpec(dram_blocks=6000)
        cases += [Case("conversation", [chat], bounds=(0.78, 1.0)),
                  Case("conversation, DRAM", [chat], dram, bounds=(0.74, 1.0))]  # fmt: skip
    if claude_code is not None:
        code = read_trace([claude_code], load=claude_code_load, num_requests=6000)
        cases.append(Case("claude_code_a", [code], bounds=(None, 1.0)))
    sections: dict[str, Callable[[], None]] = {
        "policies": lambda: measure_policies(results, cases),
        "spread": lambda: measure_spread(results),
        "time": lambda: measure_time(results),
    }
    known = chat if chat is not None else tool_agents()
    name = "tool agents" if chat is None else "conversation"
    sections |= {
        "slow": lambda: measure_slow(results, known),
        "learning": lambda: measure_learning(results, known, EngineSpec(), name),
        "approximate": lambda: measure_approximate(results, known, name),
        "deciders": lambda: measure_deciders(results, known, name),
    }
    if chat is not None:
        reference = chat
        sections["reference"] = lambda: measure_reference(results, reference)
    for title, measure in sections.items():
        if only in title:
            with console.status(title):
                measure()
    show(results)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(results), indent=1))
    if any(target.is_reached is False for target in results.targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
