"""`flexcache doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from flexcache.doctor.subject import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(help="SSD cache directories; name all directories of a pool."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings of a server or an engine (.toml, .json, .yaml).")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="vLLM's --block-size, if set.")
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(help="vLLM's --kv-transfer-config, as JSON; its extra config is settings."),
    ] = None,
    prefix_caching_hash_algo: Annotated[
        str, typer.Option(help="vLLM's --prefix-caching-hash-algo.")
    ] = "sha256",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every block and compare its checksum.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Erase torn records and, with --verify, those of bad blocks."
        ),
    ] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Empty FlexCache's files in these directories.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this machine and the settings, and suggest how to fix problems.

    Settings are read as an engine reads them: from FLEXCACHE_* and a file. Directories given as
    arguments are examined, by default the configured ones. Exits with status 1 if an error was
    found and not repaired.
    """
    from flexcache.doctor.checks import examine
    from flexcache.doctor.directories import PoolDoctor
    from flexcache.doctor.subject import Level, Subject, VllmOptions, error

    console = Console(stderr=as_json)
    vllm = VllmOptions(block_size, _transfer_table(kv_transfer_config), prefix_caching_hash_algo)
    subject = Subject(config, directories or (), vllm)

    def progress(slots: Sequence[int]) -> Iterable[int]:
        from rich.progress import track

        return track(slots, "verifying", console=console, transient=True)

    def findings() -> Iterator[tuple[str, Finding]]:
        yield from examine(subject)
        if (verify or repair or clear) and not subject.directories:
            remedy = "name all directories of the pool, or set ssd_cache_dirs"
            yield "pool", error("no directory to verify, repair or clear", remedy)
        pools = PoolDoctor(verify=verify, repair=repair, clear=clear, progress=progress)
        for finding in pools.examine(subject.directories):
            yield "pool", finding

    reported = []
    for check, finding in findings():
        reported.append({"check": check, **asdict(finding)})
        if not as_json:
            _show(console, finding)
    if as_json:
        typer.echo(json.dumps({"findings": reported}, indent=1))
    if any(each["level"] is Level.ERROR for each in reported):
        raise typer.Exit(1)


def _transfer_table(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        table = json.loads(text)
    except ValueError as problem:
        raise typer.BadParameter(f"--kv-transfer-config is not JSON: {problem}") from None
    if not isinstance(table, dict):
        raise typer.BadParameter("--kv-transfer-config must be a JSON object")
    return table


def _show(console: Console, finding: Finding) -> None:
    level = finding.level.value
    label = f"[{_COLOURS[level]}]{level:8}[/]"
    console.print(label + escape(finding.text), soft_wrap=True, highlight=False)
    if finding.remedy:
        console.print(f"{'':8}-> {escape(finding.remedy)}", soft_wrap=True, highlight=False)
    if finding.details:
        console.print(f"\n{escape(finding.details)}\n", soft_wrap=True, highlight=False)
