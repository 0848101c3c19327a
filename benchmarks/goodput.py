"""Goodput: the most requests a second that an engine answers in time, with and without a cache.

    python benchmarks/goodput.py [--model mid] [--traffic chat] [--users 4 --users 8]
        [--slo-scale 5] [--venvs DIRECTORY] [--json FILE] [--plot FILE]

A closed loop on real vLLM engines on the CPU: users ask the turns of a conversation, each a while
after the last answer. A level of load is a number of users; all systems see the same conversations,
new ones at each level. A request is in time if its TTFT, from the moment the user asked, and its
time per token are below the limits: multiples (the SLO scale of AlpaServe, OSDI 2023, and of
DistServe, OSDI 2024) of what an idle engine takes for a first prompt of which it knows nothing,
measured before anything else, on the first of the systems. So they fit the machine and its day.
The goodput is the highest rate of a level at which 95 % are in time. The conversations under way
at the higher levels need several times the GPU's blocks.

* chat: a shared system prompt, then short questions, some seconds apart.
* agents: long shared instructions, then long tool outputs and short answers, hardly a pause.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import bench_ttft
import search_path  # noqa: F401
import typer
from driven_engine import DidNotRun, DrivenEngine
from reporting import Say
from rich.console import Console
from rich.table import Table
from users import Answer, Turn

from flexcache.bench.suite import Unsupported

NONE = "no cache below the GPU's"
SYSTEMS = (NONE, bench_ttft.OURS, bench_ttft.PEER, bench_ttft.LMCACHE)
COLORS = dict(zip(SYSTEMS, ("#8a8a8a", "#2a7fb8", "#d1495b", "#e09f3e"), strict=True))
IN_TIME = 0.95
SESSIONS_PER_USER = 2
NUM_UNLOADED = 5
MAX_LENGTH = 4096  # all turns of a conversation fit
# A longest conversation and a spare block in fp32.
GPU_BYTES = {"tiny": 17 << 20, "mid": 97 << 20, "smollm2": 182 << 20}


@dataclass(frozen=True)
class Traffic:
    """Lengths in tokens, and numbers of users."""

    num_shared: int
    num_first: int
    num_next: int
    num_turns: int
    num_answer: int
    think_s: float
    users: Sequence[int]


TRAFFIC = {
    "chat": Traffic(256, 200, 120, 6, 24, 2.0, (3, 5, 7, 10)),
    "agents": Traffic(768, 300, 350, 6, 12, 0.2, (1, 2, 3, 4)),
}


def sessions_of(traffic: Traffic, num_sessions: int, seed: int) -> list[list[Turn]]:
    """Return conversations that share nothing but their first tokens."""
    shared = random.Random(f"shared {traffic.num_shared}")
    first = [shared.randrange(3, 500) for _ in range(traffic.num_shared)]
    source = random.Random(f"conversations {seed}")

    def turn(number: int) -> Turn:
        mean = traffic.num_next if number else traffic.num_first
        length = source.randint(mean // 2, mean + mean // 2)
        added = [source.randrange(3, 500) for _ in range(length)]
        return added if number else first + added, traffic.num_answer

    return [[turn(number) for number in range(traffic.num_turns)] for _ in range(num_sessions)]


@dataclass(frozen=True)
class Limits:
    ttft_s: float
    tpot_s: float

    @classmethod
    def scaled(cls, unloaded: Sequence[Answer], scale: float) -> Limits:
        """Return multiples of the median times of an idle engine's answers."""
        return cls(
            scale * statistics.median(answer.ttft_s for answer in unloaded),
            scale * statistics.median(answer.tpot_s for answer in unloaded),
        )

    def share_in_time(self, answers: Sequence[Answer]) -> float:
        in_time = [a.ttft_s <= self.ttft_s and a.tpot_s <= self.tpot_s for a in answers]
        return sum(in_time) / len(in_time)


@dataclass(frozen=True)
class Level:
    """What one system did with one number of users."""

    num_users: int
    rate: float
    in_time: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p95_s: float
    cached: float

    @property
    def in_time_per_s(self) -> float:
        """Requests a second that were answered in time."""
        return self.rate * self.in_time

    @classmethod
    def of(cls, num_users: int, answers: Sequence[Answer], took_s: float, limits: Limits) -> Level:
        ttft = [answer.ttft_s for answer in answers]
        return cls(
            num_users,
            len(answers) / took_s,
            limits.share_in_time(answers),
            statistics.median(ttft),
            percentile(ttft, 0.95),
            percentile([answer.tpot_s for answer in answers], 0.95),
            sum(a.num_cached for a in answers) / sum(a.num_prompt for a in answers),
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def goodput(levels: Sequence[Level]) -> float:
    """Return requests a second; 0 if no level was in time."""
    return max((level.rate for level in levels if level.in_time >= IN_TIME), default=0.0)


@contextmanager
def engine_of(
    name: str, model: str, dram_gb: float, directory: Path, venvs: Path | None
) -> Iterator[DrivenEngine]:
    engine = {"kv_cache_memory_bytes": GPU_BYTES[model], "max_num_seqs": 16,
              "max_model_len": MAX_LENGTH}  # fmt: skip
    changes: dict[str, Any] = {"model": model, "dram_gb": dram_gb, "engine": engine}
    system = bench_ttft.ALONE if name == NONE else name
    with bench_ttft.engine(system, directory, venvs, **changes) as made:
        yield made


def unloaded_answers(engine: DrivenEngine, traffic: Traffic) -> list[Answer]:
    """Let an idle engine answer first prompts of the traffic's length, none of which it knows."""
    source, length = random.Random(-2), traffic.num_shared + traffic.num_first
    turns = [
        (source.choices(range(3, 500), k=length), traffic.num_answer) for _ in range(NUM_UNLOADED)
    ]
    answers, _ = engine.converse([[turn] for turn in turns], 1, 0.0)
    return answers


def measure(
    engines: Mapping[str, DrivenEngine], traffic: Traffic, users: Sequence[int], limits: Limits,
    say: Say,
) -> dict[str, list[Level]]:  # fmt: skip
    """Raise the load, for each engine until two levels in a row are not in time.

    The engines take turns at each level, so that a machine that becomes slower does so for all.
    """
    found: dict[str, list[Level]] = {name: [] for name in engines}
    for number, num_users in enumerate(users):
        sessions = sessions_of(traffic, num_users * SESSIONS_PER_USER, seed=num_users)
        for name in list(engines)[:: -1 if number % 2 else 1]:
            if [level.in_time < IN_TIME for level in found[name][-2:]] == [True, True]:
                continue
            say(f"level {number + 1} of {len(users)}, {num_users} users: {name}")
            answers, took_s = engines[name].converse(sessions, num_users, traffic.think_s)
            found[name].append(Level.of(num_users, answers, took_s, limits))
    return found


def show(console: Console, title: str, found: Mapping[str, Sequence[Level]]) -> None:
    console.print(f"\n[b]{title}")
    table = Table()
    for heading in ("", "users", "req/s", "in time", "TTFT p50", "p95", "token p95",
                    "cached"):  # fmt: skip
        table.add_column(heading, justify="right" if heading else "left")
    for name, levels in found.items():
        console.print(f"{name}: goodput {goodput(levels):.2f} requests/s")
        for level in levels:
            table.add_row(
                name, str(level.num_users), f"{level.rate:.2f}", f"{level.in_time:.0%}",
                f"{level.ttft_p50_s * 1e3:,.0f} ms", f"{level.ttft_p95_s * 1e3:,.0f} ms",
                f"{level.tpot_p95_s * 1e3:,.0f} ms", f"{level.cached:.0%}",
            )  # fmt: skip
    console.print(table)


def draw(path: Path, found: Mapping[str, Mapping[str, Sequence[Level]]]) -> None:
    """Draw what was answered in time over the load, one panel per traffic.

    A filled mark is a level that counts: 95 % of its requests were in time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (5 * len(found), 4.2)
    figure, panels = pyplot.subplots(
        1, len(found), figsize=size, squeeze=False, layout="constrained"
    )
    for panel, (traffic, systems) in zip(panels[0], found.items(), strict=True):
        for name, levels in systems.items():
            load, done = [lv.num_users for lv in levels], [lv.in_time_per_s for lv in levels]
            color, width = COLORS[name], 2.2 if name == bench_ttft.OURS else 1.4
            panel.plot(load, done, color=color, linewidth=width, label=name)
            for lv in levels:
                face = color if lv.in_time >= IN_TIME else "white"
                panel.plot(lv.num_users, lv.in_time_per_s, "o", color=color, markerfacecolor=face)
        users = sorted({level.num_users for levels in systems.values() for level in levels})
        panel.set(xlabel="users at once", ylabel="requests/s answered in time", ylim=(0, None))
        panel.set_xticks(users)
        panel.set_title(traffic, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def main(
    model: Annotated[str, typer.Option(help=", ".join(GPU_BYTES))] = "mid",
    traffic: Annotated[list[str], typer.Option(help="chat, agents.")] = list(TRAFFIC),  # noqa: B006
    system: Annotated[list[str], typer.Option(help="Of those in the table.")] = list(SYSTEMS),  # noqa: B006
    users: Annotated[list[int] | None, typer.Option(help="Levels; default: the traffic's.")] = None,
    slo_scale: Annotated[float, typer.Option(help="Limits, in times of an idle engine.")] = 5.0,
    dram_gb: Annotated[float, typer.Option(help="Of each system's DRAM tier.")] = 1.0,
    directory: Annotated[Path, typer.Option("--dir", help="For SSD tiers.")] = Path("."),
    venvs: Annotated[Path | None, typer.Option(help="Of peers; made where missing.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot")] = None,
) -> None:
    console = Console(width=110)
    report: dict[str, Any] = {}
    found: dict[str, dict[str, list[Level]]] = {}
    for kind in traffic:
        with tempfile.TemporaryDirectory(dir=directory) as work_dir, ExitStack() as stack:
            status = stack.enter_context(Console(stderr=True).status(kind, refresh_per_second=1))
            engines = {}
            for name in system:
                status.update(f"{kind}: starting {name}")
                try:
                    engines[name] = stack.enter_context(
                        engine_of(name, model, dram_gb, Path(work_dir), venvs)
                    )
                except (DidNotRun, Unsupported, RuntimeError) as error:
                    console.print(f"{name} did not run: {error}")
            if not engines:
                raise typer.Exit(1)
            status.update(f"{kind}: an idle engine")
            unloaded = [unloaded_answers(engine, TRAFFIC[kind]) for engine in engines.values()]
            for engine in engines.values():
                engine.converse(sessions_of(TRAFFIC[kind], 1, seed=-1), 1, 0.0)  # warm it up
            limit = Limits.scaled(unloaded[0], slo_scale)
            levels = users or TRAFFIC[kind].users
            found[kind] = measure(engines, TRAFFIC[kind], levels, limit, status.update)
        title = (
            f"{kind}, {model} model: TTFT below {limit.ttft_s * 1e3:,.0f} ms, "
            f"{limit.tpot_s * 1e3:,.0f} ms per token"
        )
        show(console, title, found[kind])
        if json_file is not None:
            systems = {
                name: [vars(level) for level in levels] for name, levels in found[kind].items()
            }
            report[kind] = {"limits": vars(limit), "systems": systems}
            json_file.write_text(json.dumps(report, indent=1))
    if plot_file is not None:
        draw(plot_file, found)


if __name__ == "__main__":
    typer.run(main)
