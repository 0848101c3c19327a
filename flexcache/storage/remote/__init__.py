"""Remote stores: they keep blocks for other hosts, and for this one after a restart.

`config.remote_url` has their registry; docs/guide/remote.md says how to add one.
"""

from __future__ import annotations

from importlib.util import find_spec

from flexcache.config.remote_url import StoreLimits, check_remote_url, store_kind
from flexcache.errors import MissingDependencyError
from flexcache.storage.compression import PACKAGES
from flexcache.storage.remote.base import RemoteStore


def check_packages(url: str, compression: str) -> None:
    """Check that the packages which the store and the compression need are installed.

    Raises:
        MissingDependencyError: One of them is not.
    """
    scheme = check_remote_url(url).scheme
    kind = store_kind(scheme)
    needs = (
        (scheme, kind.package, kind.extra),
        (compression, PACKAGES.get(compression), "compression"),
    )
    for need, package, extra in needs:
        if package is not None and find_spec(package) is None:
            install = f"pip install {package}" if extra is None else f"pip install '.[{extra}]'"
            raise MissingDependencyError(f"{need} needs the package {package}: {install}")


def open_remote_store(
    url: str, *, call_bytes: int = 0, timeout_s: float = 10.0, concurrency: int = 16
) -> RemoteStore:
    """Open the store at a URL; the other arguments are those of `StoreLimits`.

    Raises:
        ConfigError: The URL or one of its options is wrong.
        MissingDependencyError: The store's client is not installed.
        StoreUnavailableError: The store does not answer or the directory cannot be used, at
            present.
    """
    parsed = check_remote_url(url)
    store: RemoteStore = store_kind(parsed.scheme).open(
        parsed, StoreLimits(call_bytes, timeout_s, concurrency)
    )
    return store
