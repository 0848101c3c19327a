"""Identity of a model before its cache opens. Hashing may take a while: vLLM starts meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from flexcache.cache.prompt import random_version
from flexcache.config import CacheConfig
from flexcache.integration.identity.files import FileDigests, NotKeptError
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # a small model's first request finds its cache open

ReadId = Callable[[FileDigests], str]


def identify_now(read: ReadId, config: CacheConfig) -> tuple[str, CacheConfig]:
    """Return a model's id, and the settings of its cache; wait until its files are hashed."""
    return _read(read, config, FileDigests())


def when_identified(
    read: ReadId, config: CacheConfig, use: Callable[[str, CacheConfig], None]
) -> bool:
    """Call ``use`` with a model's id and the settings of its cache: at once if all digests of its
    files are kept, else on a thread that reads them. Return whether it was at once.

    Args:
        read: Reads the id. Called again on the thread.
    """
    try:
        found = _read(read, config, FileDigests(may_read=False))
    except NotKeptError as error:
        log_event(
            logger, logging.INFO, "model_files_hashed", first=error,
            effect="the cache opens when they are; their digests are kept for later starts",
        )  # fmt: skip
        thread = threading.Thread(
            target=_read_and_use, args=(read, config, use), name="flexcache-identity", daemon=True
        )
        thread.start()
        thread.join(_PATIENCE_S)
        return False
    use(*found)
    return True


def _read_and_use(
    read: ReadId, config: CacheConfig, use: Callable[[str, CacheConfig], None]
) -> None:
    try:
        use(*identify_now(read, config))
    except Exception:  # the engine must continue without the cache
        log_event(
            logger, logging.ERROR, "cache_not_opened", effect="runs without a cache", exc_info=True
        )


def _read(read: ReadId, config: CacheConfig, digests: FileDigests) -> tuple[str, CacheConfig]:
    model_id = read(digests)
    if digests.problem is None or config.model_version is not None:
        return model_id, config
    log_event(
        logger, logging.WARNING, "weights_not_identified", reason=digests.problem,
        effect="no other engine finds what this one stores, nor does this one after a restart",
        remedy="name the weights: set FLEXCACHE_MODEL_VERSION",
    )  # fmt: skip
    return model_id, dataclasses.replace(config, model_version=random_version())
