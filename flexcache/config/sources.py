"""Where settings come from: a file and the environment, merged layer by layer.

This is the only module that reads ``FLEXCACHE_*`` variables.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flexcache.config.values import reject
from flexcache.errors import ConfigError, MissingDependencyError

ENV_PREFIX = "FLEXCACHE_"
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG"
ROUTER_PREFIX = ENV_PREFIX + "ROUTER_"
"""Variables of `flexcache router`, whose settings are apart from a cache's."""
SERVER_ONLY = ("model", "idle_exit_s")
"""Settings of `ServerConfig` itself. A server and its engines may share one file."""
LISTS = ("ssd_cache_dirs",)
_TWO_FORMS = (("num_cpu_blocks", "cpu_cache_gb"), ("num_ssd_blocks", "ssd_cache_gb"))

Layer = Mapping[str, Any]
"""Settings of one source."""


def read_layers(
    environ: Mapping[str, str] | None = None, path: str | None = None, prefix: str = ENV_PREFIX
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the settings file and the environment, in this order of precedence.

    Args:
        environ: The process's own if None.
        path: The file; if None, the one that the variable ``<prefix>CONFIG`` names, if any.
        prefix: Beginning of the variables.

    Raises:
        ConfigError: The file cannot be read.
    """
    env = os.environ if environ is None else environ
    variable = prefix + "CONFIG"
    if path:
        file = read_file(path, "settings file")
    else:
        file = read_file(env[variable], variable) if env.get(variable) else {}
    return file, read_environment(env, prefix)


def read_environment(env: Mapping[str, str], prefix: str = ENV_PREFIX) -> dict[str, Any]:
    """Return the variables with the prefix that are not empty, by setting, known or not."""
    found: dict[str, Any] = {}
    for variable, text in env.items():
        if variable.startswith(ROUTER_PREFIX) and prefix != ROUTER_PREFIX:
            continue
        if variable.startswith(prefix) and variable != prefix + "CONFIG" and text:
            name = variable.removeprefix(prefix).lower()
            found[name] = text.split(":") if name in LISTS else text
    return found


def read_file(path: str, name: str = CONFIG_FILE_ENV) -> dict[str, Any]:
    """Read a table of settings from a .json, .toml or .yaml file.

    Args:
        name: Of the setting that names the file, for the error.

    Raises:
        ConfigError: There is none, or it cannot be parsed.
        MissingDependencyError: Its format needs a package that is not installed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise reject(name, path, f"cannot be read: {error.strerror}") from None
    decoders: dict[str, Callable[[bytes], Any]] = {
        ".json": msgspec.json.decode,
        ".toml": _toml_decode,
        ".yaml": _yaml_decode,
    }
    suffix = Path(path).suffix.replace(".yml", ".yaml")
    if suffix not in decoders:
        raise reject(name, path, "must end in .json, .toml or .yaml")
    try:
        content = decoders[suffix](data)
    except (msgspec.DecodeError, ValueError) as error:
        raise reject(name, path, f"cannot be parsed: {error}") from None
    if not isinstance(content, dict):
        raise reject(name, path, "must hold a table of settings")
    return content


def merge(*layers: Layer) -> dict[str, Any]:
    """Merge layers; later ones win. A size in one form replaces an earlier one in the other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for forms in _TWO_FORMS:
            if any(layer.get(name) is not None for name in forms):
                for name in forms:
                    merged.pop(name, None)
        merged.update(layer)
    return merged


def require_known(layer: Layer, known: Collection[str]) -> None:
    """
    Raises:
        ConfigError: A name is no setting; gives the closest ones.
    """
    for name in layer:
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{name}: no such setting; {hint}")


def closest(name: str, known: Collection[str]) -> list[str]:
    """Return the known names most like ``name``, the closest first."""
    return difflib.get_close_matches(name, known, n=3)


def _toml_decode(data: bytes) -> Any:
    if sys.version_info < (3, 11):
        try:
            import tomli  # noqa: F401
        except ImportError:
            raise MissingDependencyError("a .toml config needs the package tomli here") from None
    return msgspec.toml.decode(data)


def _yaml_decode(data: bytes) -> Any:
    try:
        return msgspec.yaml.decode(data)
    except ImportError:
        raise MissingDependencyError("a .yaml config needs the package pyyaml") from None
