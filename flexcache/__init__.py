"""FlexCache: a KV-cache memory hierarchy for LLM serving.

The names are imported when first used: worker processes that need no torch start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexcache.version import __version__

if TYPE_CHECKING:
    from flexcache.client.rank import KVTPClient
    from flexcache.config import CacheConfig, ModelConfig
    from flexcache.ids import KVStatus
    from flexcache.manager import KVManager, KVResponse

_HOMES = {
    "CacheConfig": "flexcache.config",
    "KVManager": "flexcache.manager",
    "KVResponse": "flexcache.manager",
    "KVStatus": "flexcache.ids",
    "KVTPClient": "flexcache.client.rank",
    "ModelConfig": "flexcache.config",
}

__all__ = [
    "CacheConfig",
    "KVManager",
    "KVResponse",
    "KVStatus",
    "KVTPClient",
    "ModelConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
