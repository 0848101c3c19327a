"""Remote stores: where blocks go that other hosts, and later lives of this one, shall find."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from flexcache.config.remote_url import RemoteUrl, check_remote_url
from flexcache.errors import MissingDependencyError
from flexcache.storage.remote.base import Region, RemoteStore

__all__ = [
    "RemoteStore", "RemoteUrl", "check_packages", "check_remote_url", "open_remote_store",
]  # fmt: skip
_PACKAGES = {
    "mooncake": ("mooncake", "mooncake"),
    "zstd": ("zstandard", "compression"),
    "lz4": ("lz4", "compression"),
} | dict.fromkeys(("s3", "gs", "az", "file"), ("obstore", "object-store"))
"""What a kind of store or a compression needs, and the extra that brings it."""


def check_packages(url: str, compression: str) -> None:
    """
    Raises:
        MissingDependencyError: A package that the store or the compression needs is not installed.
    """
    for need in (check_remote_url(url).scheme, compression):
        package, extra = _PACKAGES.get(need, (None, None))
        if package is not None and find_spec(package) is None:
            raise MissingDependencyError(
                f"{need} needs the package {package}: pip install 'flexcache[{extra}]'"
            )


def open_remote_store(
    url: str, *, regions: Sequence[Region] = (), timeout_s: float = 10.0, concurrency: int = 16
) -> RemoteStore:
    """Open the store at a URL.

    Args:
        url: See `check_remote_url` and docs/remote.md.
        regions: Where the parts lie that will be read into and written from. They must outlive
            the store.
        timeout_s: No single request waits longer.
        concurrency: Requests at once of one batch, for stores that have no batches of their own.

    Raises:
        ConfigError: The URL or one of its options is wrong.
        MissingDependencyError: The store's client is not installed.
        StoreUnavailableError: The store does not answer now, or the directory cannot be used; it
            may later.
    """
    parsed = check_remote_url(url)
    if parsed.scheme == "memory":
        from flexcache.storage.remote.memory import MemoryStore

        return MemoryStore()
    if parsed.scheme == "mooncake":
        from flexcache.storage.remote.mooncake import MooncakeStore

        return MooncakeStore(parsed, regions, timeout_s)
    from flexcache.storage.remote.object_store import open_object_store

    return open_object_store(parsed, timeout_s, concurrency)
