"""Remote stores: they keep blocks for other hosts, and for this one after a restart."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flexcache.config.remote_url import RemoteUrl, check_remote_url
from flexcache.errors import MissingDependencyError
from flexcache.storage.remote.base import RemoteStore

__all__ = [
    "RemoteStore", "RemoteUrl", "check_packages", "check_remote_url", "open_remote_store",
]  # fmt: skip
_PACKAGES = {
    "mooncake": ("mooncake", "mooncake"),
    "zstd": ("zstandard", "compression"),
    "lz4": ("lz4", "compression"),
} | dict.fromkeys(("s3", "gs", "az"), ("obstore", "object-store"))
"""The package that a kind of store or a compression needs, and the extra that installs it."""


def check_packages(url: str, compression: str) -> None:
    """Check that the packages which the store and the compression need are installed.

    Raises:
        MissingDependencyError: One of them is not.
    """
    for need in (check_remote_url(url).scheme, compression):
        package, extra = _PACKAGES.get(need, (None, None))
        if package is not None and find_spec(package) is None:
            raise MissingDependencyError(
                f"{need} needs the package {package}: pip install '.[{extra}]'"
            )


def open_remote_store(
    url: str, *, call_bytes: int = 0, timeout_s: float = 10.0, concurrency: int = 16
) -> RemoteStore:
    """Open the store at a URL.

    Args:
        url: See `check_remote_url` and docs/remote.md.
        call_bytes: The most bytes that one call reads or writes, for stores that move them
            through memory of their own.
        timeout_s: Limit for a single request.
        concurrency: Concurrent requests per batch, for stores without batches of their own.

    Raises:
        ConfigError: The URL or one of its options is wrong.
        MissingDependencyError: The store's client is not installed.
        StoreUnavailableError: The store does not answer or the directory cannot be used, at
            present.
    """
    parsed = check_remote_url(url)
    if parsed.scheme == "memory":
        from flexcache.storage.remote.memory import MemoryStore

        return MemoryStore()
    if parsed.scheme == "mooncake":
        from flexcache.storage.remote.mooncake import MooncakeStore

        return MooncakeStore(parsed, call_bytes, timeout_s)
    if parsed.scheme == "file":
        from flexcache.storage.remote.directory import DirectoryStore

        is_shared = parsed.options.get("access") == "group"
        return DirectoryStore(Path(parsed.location), parsed.name, concurrency, is_shared)
    from flexcache.storage.remote.object_store import open_object_store

    return open_object_store(parsed, timeout_s, concurrency)
