"""`flexcache router`: serve, and compare policies by simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from flexcache.router.simulate.workload import Workload


app = typer.Typer(help="Route requests to the engine that will answer them soonest.")
_console = Console()
_AGENTS, _TOOLS = "agents", "toolagent"
_BAD_TRACE = 2


@app.command()
def simulate(
    trace: Annotated[
        list[Path],
        typer.Argument(
            help="Trace in the format of Mooncake, Bailian, AIPerf or kv-cache-tester, plain or "
            "gzipped, or files of one that FlexCache wrote. "
            f"`{_AGENTS}` and `{_TOOLS}` are generated ones."
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
    from flexcache.router.policy import POLICIES
    from flexcache.router.simulate.comparison import check_plot, compare, spec_for, write_plot
    from flexcache.router.simulate.engine import EngineSpec

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
    from flexcache.router.simulate.workload import Agents, AgentSpec, read_trace, tool_agents

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


@app.callback(invoke_without_command=True)
def router(
    context: typer.Context,
    worker: Annotated[
        list[str] | None, typer.Option(help="URL of an engine. Repeat for each engine.")
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            help="URL=ENDPOINT[,REPLAY] of an engine's KV events; * as URL for a shared cache."
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="URL=CACHE_URL, FlexCache's HTTP API; * as URL for a shared cache."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings (.toml, .json, .yaml).")] = None,
    host: Annotated[str | None, typer.Option(help="Address that clients connect to.")] = None,
    port: Annotated[int | None, typer.Option(help="Port that clients connect to.")] = None,
    control_host: Annotated[str | None, typer.Option(help="Address of the control API.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Port of the control API.")] = None,
    gateway_host: Annotated[str | None, typer.Option(help="Address of the picker.")] = None,
    gateway_port: Annotated[
        int | None, typer.Option(help="Port of the endpoint picker for Envoy (ext_proc).")
    ] = None,
    proxies: Annotated[int | None, typer.Option(help="Proxy processes; 0: one process.")] = None,
    policy: Annotated[str | None, typer.Option(help="How an engine is chosen.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory or name of the model's tokenizer.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="Keys that clients must present, one per line.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Private key (PEM).")] = None,
    sync_endpoint: Annotated[
        str | None, typer.Option(help="ENDPOINT,REPLAY where other routers follow this one.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="ENDPOINT,REPLAY of another router. Repeat for each.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API in front of engines, until stopped.

    Each request goes to the engine that will answer it soonest: what it holds of the prompt, on GPU
    and below, is known from KV events. All other settings are in docs/operate/configuration.md;
    options override FLEXCACHE_ROUTER_* variables, which override the file.
    """
    if context.invoked_subcommand is not None:
        return
    given: dict[str, Any] = {
        "workers": worker, "events": events, "caches": cache, "host": host, "port": port,
        "control_host": control_host, "control_port": control_port, "proxies": proxies,
        "gateway_host": gateway_host, "gateway_port": gateway_port,
        "policy": policy, "tokenizer": tokenizer, "api_key_file": api_key_file,
        "tls_cert": tls_cert, "tls_key": tls_key, "sync_endpoint": sync_endpoint, "peers": peer,
    }  # fmt: skip
    with user_errors():
        from flexcache.config import RouterConfig
        from flexcache.logs import set_up_logging

        chosen = {name: value for name, value in given.items() if value not in (None, [])}
        for name in ("api_key_file", "tls_cert", "tls_key", "tokenizer"):
            # A setting must be absolute; who types an option means his own directory.
            if os.path.exists(chosen.get(name, "")):
                chosen[name] = os.path.abspath(chosen[name])
        settings = RouterConfig.load(None if config is None else str(config), **chosen)
        set_up_logging(settings.log_level, settings.log_format)
        _run(settings)


def _run(settings: Any) -> None:
    from flexcache.errors import MissingDependencyError

    try:
        from flexcache.router.process import run_router
    except ImportError as error:
        raise MissingDependencyError(
            f"a router needs the package {error.name}: pip install '.[router]'"
        ) from None
    run_router(settings)
