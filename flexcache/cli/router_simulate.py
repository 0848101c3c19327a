"""`flexcache router simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from flexcache.cli.trace import write_json
from flexcache.errors import TraceError
from flexcache.terminal import user_errors

if TYPE_CHECKING:
    from flexcache.router.simulate.comparison import Comparison
    from flexcache.router.simulate.comparison import Progress as Report
    from flexcache.router.simulate.requests import Workload

_console = Console()
_AGENTS, _TOOLS = "agents", "toolagent"
_BAD_TRACE = 2


def simulate(
    trace: Annotated[
        list[Path],
        typer.Argument(
            help="Trace in Mooncake's or Bailian's format, plain or gzipped, or files of one that "
            f"FlexCache wrote. `{_AGENTS}` and `{_TOOLS}` are generated ones."
        ),
    ],
    engines: Annotated[int, typer.Option(min=1, max=10_000, help="Number of engines.")] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to try. Repeat for several; ratios are to the first. Default: all.",
            show_default=False,
        ),
    ] = None,
    load: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Factor of the rate of requests.")
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first ones.", show_default=False)
    ] = None,
    gpu_blocks: Annotated[
        int, typer.Option(min=1, help="KV cache of an engine's GPUs, in blocks of 512 tokens.")
    ] = 900,
    dram_blocks: Annotated[
        int, typer.Option(min=0, help="The same for its DRAM. 6000: 3 million tokens.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of ties and generated requests.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Plot them to this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Compare routing policies on a trace, with simulated engines.

    An engine is about a 70B model on four H100: 18 ms a step, 12,000 tokens of prefill per second.
    The policies are the router's own code, which learns the engines' speed as it would in
    production. Exits with status 2 if the trace cannot be read.
    """
    from flexcache.router.peer_policies import POLICIES
    from flexcache.router.simulate.comparison import compare, spec_for
    from flexcache.router.simulate.engine import EngineSpec
    from flexcache.router.simulate.plot import check_plot, write_plot

    with user_errors(_console):
        if plot_file is not None:
            check_plot(plot_file)
        workload = _workload(trace, load, requests, engines, seed)
        spec = EngineSpec(gpu_blocks=gpu_blocks, dram_blocks=dram_blocks)
        specs = [spec_for(spec, workload.block_tokens)] * engines
        names = list(dict.fromkeys(policy or POLICIES))
        with _progress() as progress:
            result = compare(workload, names, specs, seed=seed, progress=progress)
        title = f"{', '.join(each.name for each in trace)}: {engines} engines, load {load:g}"
        _show(result, title)
        if json_file is not None:
            write_json(json_file, {"policies": result.policies})
        if plot_file is not None:
            write_plot(result, title, plot_file)


def _workload(
    trace: list[Path], load: float, requests: int | None, engines: int, seed: int
) -> Workload:
    """Read or generate the requests; exits if the trace is malformed."""
    from flexcache.router.simulate.agents import Agents, AgentSpec
    from flexcache.router.simulate.generated import tool_agents
    from flexcache.router.simulate.traces import read_trace

    name = str(trace[0]) if len(trace) == 1 and not trace[0].exists() else ""
    if name == _AGENTS:
        num_sessions = max(1, round(15 * engines * load))
        return Agents(AgentSpec(num_sessions=num_sessions, max_requests=requests), seed)
    if name == _TOOLS:
        return tool_agents(requests or 12_000, load=load, seed=seed)
    try:
        return read_trace(trace, load=load, num_requests=requests)
    except TraceError as error:
        _console.print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(_BAD_TRACE) from None


@contextmanager
def _progress() -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield report


def _show(result: Comparison, title: str) -> None:
    first = next(iter(result.policies.values()))
    table = Table("policy", "TTFT mean", "", "p50", "p99", "to the end", "", "hits", "busiest",
                  title=escape(title), caption="TTFT and time to the last token in seconds; "
                  f"ratios to {next(iter(result.policies))}; busiest engine's requests over the "
                  "mean")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, each in result.policies.items():
        table.add_row(
            name,
            f"{each.ttft_mean_s:.3f}",
            f"{each.ttft_mean_s / first.ttft_mean_s:.2f}",
            f"{each.ttft_p50_s:.3f}",
            f"{each.ttft_p99_s:.2f}",
            f"{each.e2e_mean_s:.2f}",
            f"{each.e2e_mean_s / first.e2e_mean_s:.2f}",
            f"{each.hit_rate:.1%}",
            f"{result.busiest[name]:.2f}",
        )
    _console.print(table)
    if result.num_refused:
        _console.print(
            f"[yellow]note[/] {result.num_refused:,} requests are longer than an engine's cache "
            "and were left out; see --gpu-blocks"
        )
