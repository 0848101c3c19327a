"""`flexcache trace` and `flexcache replay`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from flexcache.errors import ConfigError, TraceError
from flexcache.terminal import user_errors

if TYPE_CHECKING:
    from flexcache.replay.history import Summary
    from flexcache.replay.replay import ReplayReport
    from flexcache.replay.traces import Trace


TracePaths = Annotated[
    list[Path], typer.Argument(help="Files of one trace, or the directory that contains them.")
]


def open_trace(paths: Sequence[Path]) -> Trace:
    """Open FlexCache's own trace, or one of requests in the formats of others."""
    from flexcache.replay.traces import MooncakeTrace, RecordedTrace, is_mooncake

    if len(paths) == 1 and is_mooncake(paths[0]):
        return MooncakeTrace(paths[0])
    return RecordedTrace(paths)


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file.

    Raises:
        TraceError: The file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(content))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


app = typer.Typer(no_args_is_help=True)
_console = Console()


@app.callback()
def _main() -> None:
    """Examine a trace (see the setting `trace_dir`)."""


@app.command()
def chrome(
    trace: TracePaths, out: Annotated[Path, typer.Argument(help="The file to write.")]
) -> None:
    """Write a trace's tasks and ops for chrome://tracing or Perfetto."""
    from flexcache.replay.history import chrome_trace

    with user_errors(_console):
        if out.suffix == ".jsonl":
            raise TraceError(
                f"{out}: this looks like a trace; the last argument is the output file"
            )
        events = chrome_trace(open_trace(trace))
        write_json(out, events)
        _console.print(f"{escape(str(out))}: {len(events['traceEvents']):,} events")


@app.command()
def story(
    trace: TracePaths,
    wanted: Annotated[
        str, typer.Argument(metavar="ID", help="A task id, or the engine's request id.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show everything that happened to a request, in order."""
    from flexcache.replay.history import tell

    with user_errors(Console(stderr=as_json)):
        chapters = tell(open_trace(trace), wanted)
        if not chapters:
            raise TraceError(
                f"{', '.join(map(str, trace))}: no records for request or task {wanted}"
            )
    if as_json:
        print(msgspec.json.encode([chapter.report() for chapter in chapters]).decode())
        return
    for task in dict.fromkeys(chapter.task for chapter in chapters):
        _console.print(f"task {task}", style="bold", highlight=False)
        for chapter in chapters:
            if chapter.task == task:
                _console.print(
                    f"  {chapter.after_s * 1e3:12.3f} ms  {escape(chapter.text)}",
                    soft_wrap=True, highlight=False,
                )  # fmt: skip


_LATE_S = 0.01


def replay(
    trace: TracePaths,
    config: Annotated[
        Path | None, typer.Option(help="Settings of the cache (.toml, .json, .yaml).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Override a setting; `none` removes it."),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(min=0, help="1: the trace's pace, 2: twice that, 0: as fast as possible."),
    ] = 0.0,
    block_bytes: Annotated[
        int | None, typer.Option(min=1, help="Block size in bytes. Default: as in the trace.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
    trace_dir: Annotated[
        Path | None, typer.Option(help="Keep the trace of the replay itself in this directory.")
    ] = None,
) -> None:
    """Repeat the calls of a trace on a cache of any size and policy.

    The default is the configuration that was traced. Traces of requests work too (Mooncake,
    Bailian, AIPerf, kv-cache-tester); they need `--set num_cpu_blocks=...`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it removes its directories
    with user_errors(_console):
        from flexcache.replay.replay import replay as run
        from flexcache.replay.replay import replay_config

        opened = open_trace(trace)
        size = block_bytes or opened.header.block_bytes
        wanted = replay_config(opened.header, config, _pairs(settings or []), size)
        with _progress() as progress:
            report = run(opened, wanted, size, speed=speed, trace_dir=trace_dir, progress=progress)
        _show(report)
        if json_file is not None:
            write_json(json_file, report.report())


def _pairs(settings: Sequence[str]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--set {name}: must be NAME=VALUE")
    return {name: value for name, _, value in pairs}


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(report: ReplayReport) -> None:
    summaries = {"replay": report.now}
    if report.then is not None:
        summaries = {"trace": report.then, **summaries}
    table = Table("", *summaries)
    for row in _rows(list(summaries.values())):
        table.add_row(*map(escape, row))  # reasons and tiers come from the trace unchecked
    _console.print(table)
    evicted = ", ".join(f"{t} {n['evicted_blocks']:,}" for t, n in report.tiers.items())
    _console.print(f"evicted blocks in the replay: {evicted}", highlight=False)
    if report.then is not None:
        _console.print(
            f"gets that found different blocks than in the trace: {len(report.differences):,} of "
            f"{report.now.calls['get']:,}",
            highlight=False,
        )
    if report.latest_s > _LATE_S:
        _console.print(f"the replay was up to {report.latest_s:.2f} s behind the pace")
    for note in report.notes:
        _console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)


def _rows(summaries: Sequence[Summary]) -> Iterator[list[str]]:
    """Yield rows with a name and a value per summary."""

    def row(name: str, show: Callable[[Summary], str]) -> list[str]:
        return [name, *map(show, summaries)]

    def rows(
        name: str,
        counts: Callable[[Summary], Mapping[str, Any]],
        show: Callable[[Summary, str], str],
    ) -> Iterator[list[str]]:
        for key in dict.fromkeys(key for summary in summaries for key in counts(summary)):
            yield [name.format(key), *(show(summary, key) for summary in summaries)]

    yield row("requested by gets, blocks", lambda s: f"{s.asked_blocks:,}")
    yield from rows("hits in {}, blocks", lambda s: s.hit_blocks, _hits)
    yield row("hits, tokens", lambda s: f"{s.hit_blocks.total() * s.tokens_per_block:,}")
    yield row("misses, blocks", lambda s: f"{s.missed_blocks:,}")
    yield row("stored by puts, blocks", lambda s: f"{s.stored_blocks:,}")
    yield from rows(
        "not stored: {}", lambda s: s.dropped_blocks, lambda s, k: f"{s.dropped_blocks[k]:,}"
    )
    yield from rows(
        "not loaded: {}", lambda s: s.skipped_blocks, lambda s, k: f"{s.skipped_blocks[k]:,}"
    )
    yield from rows("{}, p50 / p99", lambda s: s.latencies_s, _times)
    yield from rows("{}, GB", lambda s: s.moved_bytes, lambda s, k: f"{s.moved_bytes[k] / 1e9:.3f}")
    yield row("ops that lost blocks", lambda s: f"{s.failed_ops:,}")
    yield row("wall time", lambda s: f"{s.wall_s:.2f} s")


def _hits(summary: Summary, tier: str) -> str:
    blocks = summary.hit_blocks[tier]
    return f"{blocks:,} ({blocks / max(1, summary.asked_blocks):.2%})"


def _times(summary: Summary, kind: str) -> str:
    half, most = summary.quantile_s(kind, 0.5), summary.quantile_s(kind, 0.99)
    return "" if half is None or most is None else f"{half * 1e3:.2f} / {most * 1e3:.2f} ms"
