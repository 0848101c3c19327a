"""Subject of the checks: settings, vLLM's options and the machine; findings about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from flexcache.client.link import read_status
from flexcache.config import CacheConfig, ModelConfig, ServerConfig
from flexcache.config.sources import CONFIG_FILE_ENV, read_environment
from flexcache.errors import ConfigError, FlexCacheError
from flexcache.protocol.endpoints import is_served, private_endpoint
from flexcache.stats import Stats, from_plain
from flexcache.storage.machine import read_text
from flexcache.storage.shards import Shards


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. An error is a fault that was not repaired.

    Attributes:
        remedy: What to do.
        details: Lines of text to show as they are.
    """

    level: Level
    text: str
    remedy: str = ""
    details: str = ""


def ok(text: str, details: str = "") -> Finding:
    return Finding(Level.OK, text, details=details)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def error(text: str, remedy: str = "") -> Finding:
    return Finding(Level.ERROR, text, remedy)


def in_gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


CONNECTOR = "FlexCacheConnectorV1"
SECONDARY_TIER = "FlexCacheSecondaryTier"
_ANSWER_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class VllmOptions:
    """The vLLM options that the user passed to the doctor.

    Args:
        block_size: ``--block-size``.
        transfer: ``--kv-transfer-config``.
        hash_algo: ``--prefix-caching-hash-algo``.
    """

    block_size: int | None = None
    transfer: Mapping[str, Any] | None = None
    hash_algo: str = "sha256"

    @property
    def connector(self) -> Mapping[str, Any]:
        """The config of FlexCache's connector: ``transfer``, or its entry there if that is
        MultiConnector's."""
        given = self.transfer or {}
        if given.get("kv_connector") == "MultiConnector":
            for child in _extra_config(given).get("connectors", ()):
                if isinstance(child, Mapping) and child.get("kv_connector") == CONNECTOR:
                    return child
        return given

    @property
    def secondary_tier(self) -> Mapping[str, Any] | None:
        """The config of FlexCache's tier, if ``transfer`` is OffloadingConnector's and has it."""
        for tier in _extra_config(self.transfer or {}).get("secondary_tiers", ()):
            if isinstance(tier, Mapping) and tier.get("type") == SECONDARY_TIER:
                return tier
        return None

    @property
    def extra_config(self) -> dict[str, Any]:
        """FlexCache's settings."""
        tier = self.secondary_tier
        if tier is None:
            return _extra_config(self.connector)
        return {name: tier[name] for name in tier.keys() - {"type", "module_path"}}


def _extra_config(transfer: Mapping[str, Any]) -> dict[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return dict(extra) if isinstance(extra, Mapping) else {}


@dataclass(frozen=True)
class Subject:
    """The settings and the machine that checks examine.

    Args:
        config_file: Settings, besides those in ``environ``.
        named_directories: Directories of the SSD tier given on the command line.
        root: Root of the system's own files.
    """

    config_file: Path | None = None
    named_directories: Sequence[Path] = ()
    vllm: VllmOptions = VllmOptions()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")

    @property
    def _settings(self) -> dict[str, str]:
        named = (
            {} if self.config_file is None else {CONFIG_FILE_ENV: str(self.config_file.absolute())}
        )
        return {**self.environ, **named}

    @property
    def has_settings(self) -> bool:
        file = self._settings.get(CONFIG_FILE_ENV)
        return bool(file or read_environment(self._settings) or self.vllm.extra_config)

    def read_config(self) -> CacheConfig:
        """Read the settings.

        Raises:
            FlexCacheError: The settings are wrong, or their file needs a package.
        """
        return CacheConfig.from_env(
            self._settings, {}, "kv_connector_extra_config", **self.vllm.extra_config
        )

    @cached_property
    def config(self) -> CacheConfig | None:
        """The settings; None if there are none, or they are wrong."""
        try:
            return self.read_config() if self.has_settings else None
        except FlexCacheError:
            return None

    @cached_property
    def model(self) -> ModelConfig | None:
        """The model in a server's settings."""
        try:
            return self.read_model()
        except FlexCacheError:
            return None

    def read_model(self) -> ModelConfig | None:
        """Read the model in a server's settings.

        Raises:
            FlexCacheError: The settings are wrong, or their file needs a package.
        """
        if self.config_file is None or not self.read_config().has_cpu_tier:
            return None
        endpoint = private_endpoint("server")
        return ServerConfig.load(
            str(self.config_file), self.environ, default_endpoint=endpoint
        ).model

    @property
    def slot_bytes(self) -> int | None:
        """Stored size of one block, if the model is known and tells it."""
        if self.config is None or self.model is None:
            return None
        if self.model.sized_by_ranks:
            return None
        model = self.model.in_shards(self.config.store_shards)
        return Shards.of_model(model, self.config.tokens_per_block).stored_bytes

    @property
    def pool_bytes(self) -> int | None:
        """Size of the DRAM tier, if known."""
        config = self.config
        if config is None or not config.has_cpu_tier:
            return None
        return self._tier_bytes(config.cpu_cache_gb, config.cpu_blocks_for)

    @property
    def ssd_bytes(self) -> int | None:
        """Size of the SSD tier, if known."""
        config = self.config
        if config is None or not config.has_ssd_tier:
            return None
        return self._tier_bytes(config.ssd_cache_gb, config.ssd_blocks_for)

    def _tier_bytes(self, size_gb: float | None, blocks_for: Callable[[int], int]) -> int | None:
        if size_gb is not None:
            return int(size_gb * 1e9)
        slot_bytes = self.slot_bytes
        return None if slot_bytes is None else blocks_for(slot_bytes) * slot_bytes

    @property
    def directories(self) -> Sequence[Path]:
        """The directories given on the command line, else the configured ones that exist."""
        return self.named_directories or [path for path in self.configured if path.exists()]

    @property
    def configured(self) -> Sequence[Path]:
        return [] if self.config is None else [Path(path) for path in self.config.ssd_cache_dirs]

    @cached_property
    def endpoint(self) -> str:
        """Endpoint of a server with these settings.

        Raises:
            ConfigError: The user's private directory is not usable.
        """
        configured = None if self.config is None else self.config.endpoint
        return configured or private_endpoint("server")

    @cached_property
    def is_served(self) -> bool:
        """Whether a server on this host holds the endpoint."""
        try:
            return is_served(self.endpoint)
        except ConfigError:
            return False

    @cached_property
    def server(self) -> Stats | None:
        """Statistics of the server at the endpoint; None if no server answers there."""
        if not self.is_served and not self.endpoint.startswith("tcp://"):
            return None
        keys = None if self.config is None else self.config.curve_keys
        try:
            return from_plain(read_status(self.endpoint, keys, _ANSWER_TIMEOUT_S))
        except FlexCacheError:
            return None

    def read(self, path: str) -> str:
        """Return the content of a system file; "" if it cannot be read."""
        return read_text(self.root / path.lstrip("/"))
