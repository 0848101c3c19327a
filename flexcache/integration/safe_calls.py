"""Calls of the cache by an engine, whose requests must not fail with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flexcache.errors import FlexCacheError
from flexcache.logs import log_event

logger = logging.getLogger(__name__)


def safely(call: Callable[..., Any], *arguments: Any, if_failed: Any = None, **options: Any) -> Any:
    """Make a call and return its answer; log a failure, and return ``if_failed``."""
    try:
        return call(*arguments, **options)
    except (FlexCacheError, TimeoutError, ValueError, KeyError) as error:
        log_event(logger, logging.WARNING, "call_failed", call=call.__name__, error=error)
        return if_failed
