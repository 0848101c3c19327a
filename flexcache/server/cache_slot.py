"""The one cache of a server, which may become known only with the first engine that greets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from flexcache.config import ModelConfig
from flexcache.errors import FlexCacheError, StorageError
from flexcache.logs import log_event
from flexcache.server.background import BackgroundJob
from flexcache.server.outbox import Outbox
from flexcache.server.served_cache import Clearing, ServedCache
from flexcache.tasks.engine import KVTaskEngine

logger = logging.getLogger(__name__)

OpenCache = Callable[[ModelConfig, int], ServedCache]


class CacheSlot:
    """Opens the cache when its model and block size are known.

    Args:
        open_cache: Makes the tiers for a model and a block size. Raises `ConfigError` if that is
            impossible, `RegistrationError` or `DirectoryInUseError` if it is for now.
    """

    def __init__(self, open_cache: OpenCache, outbox: Outbox) -> None:
        self._open_cache = open_cache
        self._outbox = outbox
        self.cache: ServedCache | None = None

    @property
    def tasks(self) -> KVTaskEngine:
        assert self.cache is not None
        return self.cache.tasks

    def open(self, model: ModelConfig, tokens_per_block: int) -> ServedCache:
        """The cache; the first call decides what it holds."""
        if self.cache is None:
            self.cache = self._open_cache(model, tokens_per_block)
        return self.cache

    def adopt_layout(self, layout: str, now: float) -> str | None:
        """Have the cache keep blocks of a rank's layout; returns why it cannot."""
        assert self.cache is not None
        try:
            clearing = self.cache.adopt_layout(layout, now)
        except FlexCacheError as error:
            return str(error)
        if clearing is not None:
            self._outbox.begin(BackgroundJob(clearing.work, partial(_layout_cleared, clearing)))
        return None


def _layout_cleared(clearing: Clearing, error: OSError | None) -> None:
    # Blocks that a restart brings back are under their own layout: not found, no harm.
    try:
        clearing.end(error)
    except StorageError as failure:
        log_event(logger, logging.WARNING, "ssd_not_cleared_for_good", error=failure)
