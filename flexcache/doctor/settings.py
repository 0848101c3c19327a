"""Checks that the settings are valid, and those of a server fit its model."""

from __future__ import annotations

from collections.abc import Iterator

from flexcache.cache.tiered_cache import CacheSizes
from flexcache.doctor.findings import Finding, error, ok
from flexcache.doctor.subject import Subject
from flexcache.errors import FlexCacheError


def check_settings(subject: Subject) -> Iterator[Finding]:
    if not subject.has_settings:
        yield ok("no settings (FLEXCACHE_*, or --config): only the machine is checked")
        return
    try:
        config = subject.read_config()
        config.check_has_tier()
        subject.read_model()
        if (slot_bytes := subject.slot_bytes) is not None:
            CacheSizes.for_blocks(config, slot_bytes, slot_bytes)
    except FlexCacheError as problem:
        what, _, remedy = str(problem).partition(": ")
        yield error(f"the settings are not valid: {what}", remedy or "see `flexcache config`")
    else:
        yield ok("the settings are valid")
