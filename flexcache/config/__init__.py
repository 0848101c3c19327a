"""Settings: what the model's KV looks like, how much of it is kept where, and how it moves.

The classes are frozen and validated at construction; a bad value is a `ConfigError` that
names the field, the value and what is allowed. Only `sources` reads the environment. The classes
are imported on first use, because worker processes read URLs and addresses without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexcache.config.cache import CacheConfig, ServerConfig
    from flexcache.config.model import KVGroup, ModelConfig
    from flexcache.config.router import RouterConfig

_HOMES = {
    "CacheConfig": "flexcache.config.cache",
    "KVGroup": "flexcache.config.model",
    "ModelConfig": "flexcache.config.model",
    "RouterConfig": "flexcache.config.router",
    "ServerConfig": "flexcache.config.cache",
}

__all__ = ["CacheConfig", "KVGroup", "ModelConfig", "RouterConfig", "ServerConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
