"""ServerConfig: what a server process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from flexcache.config import sources
from flexcache.config.cache import CacheConfig
from flexcache.config.model import ModelConfig
from flexcache.config.values import parse, reject

_IDLE_EXIT_S = 15.0
_IdleExit = Annotated[float, Meta(ge=0)] | None


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server process: its cache and, unless the first engine decides it, the model.

    Args:
        cache: Sizes, endpoint, timeouts.
        model: What is cached; None to take it, with the block size, from the first engine.
        idle_exit_s: Stop once the last client has left, or this long after it has died. None:
            serve until stopped.
    """

    cache: CacheConfig
    model: ModelConfig | None = None
    idle_exit_s: float | None = None

    def __post_init__(self) -> None:
        idle_exit_s = parse("idle_exit_s", self.idle_exit_s, _IdleExit)
        object.__setattr__(self, "idle_exit_s", idle_exit_s)
        if not self.cache.has_cpu_tier:
            raise reject("cpu_cache_gb", None, "a server needs cpu_cache_gb or num_cpu_blocks")
        if self.cache.endpoint is None:
            raise reject("endpoint", None, "a server needs an endpoint")

    @classmethod
    def for_engines(cls, config: CacheConfig, endpoint: str) -> ServerConfig:
        """Make the config of a server that engines start for themselves and that ends with them."""
        return cls(cache=replace(config, endpoint=endpoint), idle_exit_s=_IDLE_EXIT_S)

    @classmethod
    def load(
        cls,
        path: str | None,
        environ: Mapping[str, str] | None = None,
        *,
        default_endpoint: str,
        **overrides: Any,
    ) -> ServerConfig:
        """Read a file, then ``FLEXCACHE_*`` variables, then ``overrides``; later ones win.

        The file has the fields of `CacheConfig`, optionally ``idle_exit_s``, and a table ``model``
        with the fields of `ModelConfig`.
        """
        file, variables = sources.read_layers(environ, path)
        given = sources.Layer(overrides, "an argument")
        return cls.from_layers({"endpoint": default_endpoint}, file, variables, given)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ServerConfig:
        """Invert `to_dict`."""
        return cls.from_layers(content)

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> ServerConfig:
        """Make a config from tables of settings; later ones win."""
        names = sources.SERVER_ONLY
        own = {k: v for layer in layers for k, v in layer.items() if k in names}
        others = [sources.without(layer, names) for layer in layers]
        model = own.get("model")
        with sources.naming_origins(layers):
            return cls(
                cache=CacheConfig.from_layers(*others),
                model=None if model is None else ModelConfig.from_table(model),
                idle_exit_s=own.get("idle_exit_s"),
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, to be sent to another process."""
        content = {k: v for k, v in asdict(self.cache).items() if v is not None}
        if self.model is not None:
            dtype = str(self.model.dtype).removeprefix("torch.")
            content["model"] = asdict(self.model) | {"dtype": dtype}
        if self.idle_exit_s is not None:
            content["idle_exit_s"] = self.idle_exit_s
        return content
