"""`flexcache trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.cli.trace_files import TracePaths, open_trace, write_json
from flexcache.errors import TraceError
from flexcache.terminal import user_errors

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
    from flexcache.replay.chrome import chrome_trace

    with user_errors(_console):
        if out.suffix == ".jsonl":
            raise TraceError(
                f"{out}: this looks like a trace; the last argument is the output file"
            )
        events = chrome_trace(open_trace(trace))
        write_json(out, events)
        _console.print(f"{escape(str(out))}: {len(events['traceEvents']):,} events")


@app.command()
def overlap(trace: TracePaths) -> None:
    """Show how long DRAM copies ran while the SSD was read or written."""
    from flexcache.replay import overlap as ops

    with user_errors(_console):
        opened = open_trace(trace)
        table = Table("DRAM copies", "beside", "for", "both at once", "of the shorter")
        for name, kinds in (("SSD reads", ops.SSD_READS), ("SSD writes", ops.SSD_WRITES)):
            seen = ops.overlap(opened, ops.DRAM_COPIES, kinds)
            shorter = min(seen.first_s, seen.second_s)
            table.add_row(
                f"{seen.first_s:.3f} s", name, f"{seen.second_s:.3f} s", f"{seen.both_s:.3f} s",
                f"{seen.both_s / shorter:.0%}" if shorter else "",
            )  # fmt: skip
        _console.print(table)


@app.command()
def story(
    trace: TracePaths,
    wanted: Annotated[
        str, typer.Argument(metavar="ID", help="A task id, or the engine's request id.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show everything that happened to a request, in order."""
    from flexcache.replay.story import tell

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
