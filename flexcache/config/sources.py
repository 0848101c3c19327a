"""Sources of settings: a file and the environment, merged layer by layer, and what they come to.

This is the only module that reads ``FLEXCACHE_*`` variables.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flexcache.config.values import read_path, reject
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event

ENV_PREFIX = "FLEXCACHE_"
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG"
ROUTER_PREFIX = ENV_PREFIX + "ROUTER_"
"""Variables of `flexcache router`, whose settings are apart from a cache's."""
SERVER_ONLY = ("model", "idle_exit_s")
"""Settings of `ServerConfig` itself. A server and its engines may share one file."""
_TWO_FORMS = (("num_cpu_blocks", "cpu_cache_gb"), ("num_ssd_blocks", "ssd_cache_gb"))

REMOVED: Mapping[str, str] = {
    "direct_io": "I/O bypasses the page cache where the directory allows it",
    "kv_events_buffer": "10,000 batches are kept for replay, within 256 MiB",
    "kv_events_format": "events are maps, as vLLM has them since 0.24",
    "kv_events_queue": "10,000 batches may wait",
    "max_open_tasks": "an engine may have 4,096 open tasks",
    "priority_step_s": "a step of priority counts as an hour; ttl_s takes any other time",
    "remote_absent_ttl_s": "what the store did not have is looked up again after 5 s",
    "remote_concurrency": "16 requests of an op run at once",
    "remote_index_blocks": "262,144 blocks of the store are remembered, in 55 to 280 MB",
    "ssd_queue_depth": "32 block I/Os are in flight at the SSD tier",
    "trace_files": "the last 4 files of a trace are kept; trace_file_mb sets their size",
    "write_back_max_dirty": "half of DRAM may wait to be written back",
    "write_min_sightings": "selective writes a block when it is seen a second time",
}
"""Settings of earlier versions, and what holds instead."""
REMOVED_OF_ROUTER: Mapping[str, str] = {
    "connect_timeout_s": "connecting to an engine may take 2 s",
    "health_interval_s": "engines' health is read every 2 s",
    "health_timeout_s": "an engine has 2 s to answer a health check",
    "idle_timeout_s": "a client's connection may idle for 75 s, and a body may take as long",
    "max_retries": "a request is sent to two other engines at most",
    "metrics_interval_s": "engines' models and metrics are read every 15 s",
    "temperature": "choices are never sampled",
}

_SERVICE = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

logger = logging.getLogger(__name__)


class Layer(dict[str, Any]):
    """Settings of one source.

    Args:
        origin: Where they come from, for errors; ``{}`` stands for a setting in capitals.
    """

    def __init__(self, settings: Mapping[str, Any], origin: str) -> None:
        super().__init__(settings)
        self.origin = origin


def without(layer: Mapping[str, Any], names: Collection[str]) -> Layer:
    """Return the layer's other settings."""
    rest = {name: value for name, value in layer.items() if name not in names}
    return Layer(rest, getattr(layer, "origin", ""))


def _origin(layer: Mapping[str, Any], name: str) -> str:
    """Return words to follow what is said of a setting."""
    origin = getattr(layer, "origin", "").replace("{}", name.upper())
    return f" (from {origin})" if origin else ""


@contextmanager
def naming_origins(layers: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Add to an error where the value of its setting came from: the last layer that has it."""
    try:
        yield
    except ConfigError as error:
        having = [layer for layer in layers if error.setting in layer]
        origin = _origin(having[-1], error.setting) if having else ""
        if not origin:
            raise
        raise ConfigError(f"{error}{origin}") from None


def read_layers(
    environ: Mapping[str, str] | None = None, path: str | None = None, prefix: str = ENV_PREFIX
) -> tuple[Layer, Layer]:
    """Read the settings file and the environment, in this order of precedence.

    Args:
        environ: The process's own if None.
        path: The file; if None, the one that the variable ``<prefix>CONFIG`` names, if any.
        prefix: Beginning of the variables.

    Raises:
        ConfigError: The file cannot be read.
    """
    env = os.environ if environ is None else environ
    name = "settings file" if path else prefix + "CONFIG"
    path = path or file_of(env, prefix)
    file = Layer(read_file(path, name) if path else {}, f"file {path}")
    return file, read_environment(env, prefix)


def file_of(env: Mapping[str, str], prefix: str = ENV_PREFIX) -> str | None:
    """Return the settings file that the variable ``<prefix>CONFIG`` names, if any.

    Raises:
        ConfigError: It is no absolute path.
    """
    variable = prefix + "CONFIG"
    return read_path(variable, env[variable]) if env.get(variable) else None


def read_environment(env: Mapping[str, str], prefix: str = ENV_PREFIX) -> Layer:
    """Return the variables with the prefix that are not empty, by setting, known or not.

    Kubernetes sets variables for each Service of a namespace. Those of one that is called
    ``flexcache``, or begins so, are not meant as settings, though some have the name of one.
    """
    found, ignored = Layer({}, prefix + "{}"), []
    for variable, text in env.items():
        if variable.startswith(ROUTER_PREFIX) and prefix != ROUTER_PREFIX:
            continue
        if not variable.startswith(prefix) or variable == prefix + "CONFIG" or not text:
            continue
        is_address = variable.endswith("_PORT") and _SERVICE_ADDRESS.match(text)
        if is_address or _SERVICE.search(variable):
            ignored.append(variable)
        else:
            found[variable.removeprefix(prefix).lower()] = text
    if ignored:
        _log_ignored(tuple(sorted(ignored)))
    return found


@cache
def _log_ignored(variables: tuple[str, ...]) -> None:
    """Log it once, however often the environment is read."""
    log_event(
        logger, logging.WARNING, "service_variables_ignored", variables=", ".join(variables),
        reason="Kubernetes sets them for a Service; they are no settings",
        remedy="enableServiceLinks: false in the pod's spec leaves them out",
    )  # fmt: skip


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


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers; later ones win. A size in one form replaces an earlier one in the other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for forms in _TWO_FORMS:
            if any(layer.get(name) is not None for name in forms):
                for name in forms:
                    merged.pop(name, None)
        merged.update(layer)
    return merged


def refuse_removed(settings: Iterable[str], removed: Mapping[str, str], origin: str = "") -> None:
    """
    Raises:
        ConfigError: A name is one of an earlier version's settings; says what holds instead.
    """
    for name in settings:
        if name in removed:
            raise ConfigError(f"{name}: no longer a setting{origin}; {removed[name]}")


def require_known(
    layer: Mapping[str, Any], known: Collection[str], removed: Mapping[str, str]
) -> None:
    """
    Raises:
        ConfigError: A name is no setting; gives the closest ones.
    """
    for name in layer:
        refuse_removed((name,), removed, _origin(layer, name))
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{name}: no such setting{_origin(layer, name)}; {hint}")


def require_block_size(owner: str, block_size: int, *layers: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: A layer sets another ``tokens_per_block`` than the engine, its ``owner``, has.
    """
    with naming_origins(layers):
        chosen = merge(*layers).get("tokens_per_block")
        if chosen is not None and str(chosen) != str(block_size):
            hint = f"must be {owner}, {block_size}; leave it unset"
            raise reject("tokens_per_block", chosen, hint)


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
