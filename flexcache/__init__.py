"""FlexCache: a KV-cache memory hierarchy for LLM serving.

Names are imported on first use: worker processes that do not need torch start without it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if __spec__.submodule_search_locations is None:  # installed as `flexcache.py` (`setup.py`)
    __path__ = __spec__.submodule_search_locations = [os.path.splitext(__file__)[0]]

from flexcache.ids import __version__

if TYPE_CHECKING:
    from flexcache.cache.control import Pin
    from flexcache.client.rank import KVTPClient
    from flexcache.config import CacheConfig, KVGroup, ModelConfig
    from flexcache.errors import (
        AmbiguousEngineError,
        ClosedError,
        ConfigError,
        DeviceLostError,
        FlexCacheError,
        InternalError,
        LoadLostError,
        MissingDependencyError,
        NoDirectPathError,
        RegistrationError,
        ServerLostError,
        StorageError,
        TaskRevokedError,
        TraceError,
        UnsupportedLayoutError,
        UntrustedError,
    )
    from flexcache.ids import KVStatus, RequestInfo, TierName
    from flexcache.manager import KVManager, KVResponse

_HOMES = {
    "CacheConfig": "flexcache.config",
    "KVGroup": "flexcache.config",
    "KVManager": "flexcache.manager",
    "KVResponse": "flexcache.manager",
    "KVStatus": "flexcache.ids",
    "KVTPClient": "flexcache.client.rank",
    "ModelConfig": "flexcache.config",
    "Pin": "flexcache.cache.control",
    "RequestInfo": "flexcache.ids",
    "TierName": "flexcache.ids",
}

__all__ = [
    "AmbiguousEngineError",
    "CacheConfig",
    "ClosedError",
    "ConfigError",
    "DeviceLostError",
    "FlexCacheError",
    "InternalError",
    "KVGroup",
    "KVManager",
    "KVResponse",
    "KVStatus",
    "KVTPClient",
    "LoadLostError",
    "MissingDependencyError",
    "ModelConfig",
    "NoDirectPathError",
    "Pin",
    "RegistrationError",
    "RequestInfo",
    "ServerLostError",
    "StorageError",
    "TaskRevokedError",
    "TierName",
    "TraceError",
    "UnsupportedLayoutError",
    "UntrustedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "flexcache.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
