"""`flexcache config`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.terminal import user_errors, wide_console

if TYPE_CHECKING:
    from flexcache.config.settings import EffectiveSettings


def config(
    file: Annotated[
        Path | None,
        typer.Option("--config", help="Settings file, instead of the one in FLEXCACHE_CONFIG."),
    ] = None,
    describe: Annotated[
        bool, typer.Option("--describe", help="Add each setting's variable and meaning.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="[chat|agents|batch]",
            help="Print a settings file to begin with for this traffic, with reasons.",
        ),
    ] = None,
) -> None:
    """Show the settings in effect and where each comes from. Secrets are masked.

    With --profile, suggest settings instead; it takes no other options.

    Exits with status 1 if a setting is unknown or invalid. Settings given to vLLM in
    kv_connector_extra_config override these; this command does not see them.
    """
    from flexcache.config.settings import read_effective_settings

    if profile is not None:
        if file is not None or as_json or describe:
            raise typer.BadParameter("takes no other options", param_hint="--profile")
        _print_profile(profile)
        return
    console = Console()
    with user_errors(console):
        found = read_effective_settings(path=None if file is None else str(file))
    if found.error is None:
        found = replace(found, error=_endpoint_error(found) or _server_error(found, file))
    if as_json:
        typer.echo(json.dumps(_as_table(found, describe), indent=1, default=str))
    else:
        _show(wide_console(console), found, describe)
    if found.error is not None:
        raise typer.Exit(1)


def _print_profile(name: str) -> None:
    from flexcache.config.settings import read_profiles

    profiles = read_profiles()
    if name not in profiles:
        known = ", ".join(sorted(profiles))
        raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="--profile")
    typer.echo(profiles[name], nl=False)


def _endpoint_error(found: EffectiveSettings) -> str | None:
    """Why the endpoint could not be used; layers above the settings know its rules."""
    from flexcache.errors import ConfigError
    from flexcache.protocol.endpoints import check_endpoint

    values = {setting.name: setting.value for setting in found.settings}
    if values["endpoint"] is None:
        return None
    try:
        check_endpoint(values["endpoint"], has_keys=values["curve_keys"] is not None)
    except ConfigError as problem:
        return str(problem)
    return None


def _server_error(found: EffectiveSettings, file: Path | None) -> str | None:
    """Why a server would refuse its own settings in the file; None if it would not."""
    from flexcache.config import ServerConfig
    from flexcache.config.sources import SERVER_ONLY
    from flexcache.errors import ConfigError

    if not any(setting.name in SERVER_ONLY for setting in found.settings):
        return None
    try:
        ServerConfig.load(None if file is None else str(file), default_endpoint="ipc:///unused")
    except ConfigError as problem:
        return str(problem)
    return None


def _show(console: Console, found: EffectiveSettings, describe: bool) -> None:
    from flexcache.config.settings import DEFAULT

    columns = ("environment", "meaning") if describe else ()
    table = Table("setting", "value", "unit", "source", *columns)
    for setting in found.settings:
        row = setting.described
        more = (row.environment, row.meaning) if describe and row is not None else ()
        unit = "" if row is None else row.unit
        cells = (setting.name, _text(setting.value), unit, setting.source, *more)
        style = None if setting.source == DEFAULT else "bold"
        table.add_row(*map(escape, cells), style=style)
    console.print(table)
    for name in found.unknown:
        hint = f"; did you mean {' or '.join(name.closest)}?" if name.closest else ""
        text = f"{name.name}: no such setting ({name.source}){hint}"
        console.print(f"[red]{escape(text)}[/]", soft_wrap=True, highlight=False)
    if found.error is not None and not found.unknown:
        console.print(f"[red]{escape(found.error)}[/]", soft_wrap=True, highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ":".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_table(found: EffectiveSettings, describe: bool) -> dict[str, Any]:
    settings = {}
    for setting in found.settings:
        settings[setting.name] = {"value": setting.value, "source": setting.source}
        if describe and (row := setting.described) is not None:
            settings[setting.name] |= {
                "unit": row.unit, "environment": row.environment, "meaning": row.meaning,
            }  # fmt: skip
    return {
        "settings": settings,
        "unknown": [asdict(name) for name in found.unknown],
        "error": found.error,
    }
