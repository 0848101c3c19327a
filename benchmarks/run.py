"""Measure the parts of FlexCache that its developers tune, each beside a bound.

    python benchmarks/run.py control plan --only "131,072 tokens" --json before.json

The options and the report are those of `flexcache bench`, which measures what a machine can do.
"""

from __future__ import annotations

from typing import Annotated

import search_path  # noqa: F401
import typer

from flexcache.bench.suite import Settings, choose_sections
from flexcache.cli.bench import (
    Directory,
    JsonFile,
    Only,
    PlotFile,
    Seed,
    Strict,
    Thorough,
    run_and_report,
)
from flexcache.terminal import user_errors

SECTIONS = {
    **{
        name: f"bench_{name}"
        for name in ("control", "plan", "index", "server", "overlap", "past_dram", "gpu_ops")
    },
    "disk": "disk_workers",
}
"""Sections and their modules."""


def main(
    sections: Annotated[
        list[str] | None,
        typer.Argument(help=f"Any of {', '.join(SECTIONS)}. Default: all.", show_default=False),
    ] = None,
    only: Only = "",
    thorough: Thorough = False,
    strict: Strict = False,
    directory: Directory = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    seed: Seed = 0,
) -> None:
    """Measure parts of FlexCache, each beside a bound measured in the same run."""
    with user_errors():
        chosen = choose_sections(sections or (), SECTIONS)
        settings = Settings(chosen, only, thorough, directory, seed)
    run_and_report(settings, strict=strict, json_file=json_file, plot_file=plot_file)


if __name__ == "__main__":
    typer.run(main)
