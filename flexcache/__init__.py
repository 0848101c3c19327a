"""FlexCache: a KV-cache memory hierarchy for LLM serving.

The names are imported when first used: worker processes that need no torch start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexcache.config import CacheConfig, ModelConfig
    from flexcache.ids import KVStatus
    from flexcache.manager import KVManager, KVResponse
    from flexcache.server.tp_client import KVTPClient

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "flexcache.config",
    "KVManager": "flexcache.manager",
    "KVResponse": "flexcache.manager",
    "KVStatus": "flexcache.ids",
    "KVTPClient": "flexcache.server.tp_client",
    "ModelConfig": "flexcache.config",
}

__all__ = [
    "CacheConfig",
    "KVManager",
    "KVResponse",
    "KVStatus",
    "KVTPClient",
    "ModelConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
