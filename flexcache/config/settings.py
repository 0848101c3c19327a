"""Settings as a user sees them: what there is, what is in effect, and where it comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from flexcache.config import sources
from flexcache.config.cache import CacheConfig
from flexcache.config.remote_url import presentable
from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError

DEFAULT = "default"
_MASK = "***"


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a config."""

    name: str
    environment: str
    default: Any
    unit: str
    meaning: str
    is_secret: bool

    @property
    def default_text(self) -> str:
        return "" if self.default in (None, ()) else str(self.default)


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A value in effect, fit to be shown, and its source: default, a file or a variable."""

    name: str
    value: Any
    source: str
    described: Setting | None = None
    """None for a setting that only a server's file has."""


@dataclass(frozen=True, slots=True)
class UnknownSetting:
    """A name in the environment or the file that is no setting, and what it may have meant."""

    name: str
    source: str
    closest: list[str]


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """What an engine or a server would start with.

    Attributes:
        error: Why it would refuse to start, if it would.
    """

    settings: list[EffectiveSetting]
    unknown: list[UnknownSetting]
    error: str | None


def read_profiles() -> dict[str, str]:
    """Return settings files to begin with, by kind of traffic, each setting with its reason.

    Figures are those of benchmarks/results/2026-11-figures.md. What depends on the machine or on
    rules of the house is suggested as a comment.
    """
    found = (files(__package__) / "profiles").iterdir()
    return {Path(each.name).stem: each.read_text() for each in found}


def describe_settings(config: type[CacheConfig | RouterConfig] = CacheConfig) -> list[Setting]:
    """List every setting of a cache, or of a router, in the order of the documentation."""
    prefix = sources.ENV_PREFIX if config is CacheConfig else sources.ROUTER_PREFIX
    return [
        Setting(
            spec.name,
            prefix + spec.name.upper(),
            spec.default,
            spec.metadata["unit"],
            spec.metadata["help"],
            spec.metadata["is_secret"],
        )
        for spec in fields(config)
    ]


def read_effective_settings(
    environ: Mapping[str, str] | None = None, path: str | None = None
) -> EffectiveSettings:
    """Read all sources and report what they come to. Secrets are masked.

    Args:
        environ: The process's own if None.
        path: The file; if None, the one that ``FLEXCACHE_CONFIG`` names, if any.

    Raises:
        ConfigError: The file cannot be read.
    """
    environ = os.environ if environ is None else environ
    file, variables = sources.read_layers(environ, path)
    where = file.origin
    known = {setting.name: setting for setting in describe_settings()}
    merged = sources.merge(_only(file, known), _only(variables, known))
    error, config = None, None
    try:
        with sources.naming_origins((file, variables)):
            config = CacheConfig(**merged)
    except ConfigError as problem:
        error = str(problem)

    def source_of(name: str) -> str:
        if name not in merged:
            return DEFAULT
        return f"environment {known[name].environment}" if name in variables else where

    effective = [
        EffectiveSetting(name, _shown(setting, merged, config), source_of(name), setting)
        for name, setting in known.items()
    ]
    effective += [
        EffectiveSetting(name, file[name], where) for name in sources.SERVER_ONLY if name in file
    ]
    unknown = [*_unknown_settings(file, variables, known)]
    if error is None and unknown:
        error = _refusal(unknown[0])
    return EffectiveSettings(effective, unknown, error)


def _unknown_settings(
    file: sources.Layer, variables: Mapping[str, Any], known: Mapping[str, Setting]
) -> Iterator[UnknownSetting]:
    for name in file:
        if name not in known and name not in sources.SERVER_ONLY:
            yield UnknownSetting(name, file.origin, sources.closest(name, known))
    variable_names = [setting.environment for setting in known.values()]
    for name in variables:
        if name not in known:
            variable = sources.ENV_PREFIX + name.upper()
            closest = sources.closest(variable, variable_names)
            yield UnknownSetting(variable, "environment", closest)


def _refusal(unknown: UnknownSetting) -> str:
    name = unknown.name.removeprefix(sources.ENV_PREFIX).lower()
    if name in sources.REMOVED:
        return f"{name}: no longer a setting; {sources.REMOVED[name]}"
    return f"{unknown.name}: no such setting (from {unknown.source})"


def _only(layer: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name in known}


def _shown(setting: Setting, merged: Mapping[str, Any], config: CacheConfig | None) -> Any:
    """Return the parsed value or, where the settings are refused, the one that was given."""
    if config is not None:
        value = getattr(config, setting.name)
    else:
        value = merged.get(setting.name, setting.default)
        if setting.name == "remote_url" and value is not None:
            return presentable(str(value))  # what was refused may hold a password
    return _MASK if setting.is_secret and value is not None else value
