"""Addresses of engines, as Envoy needs them: ``IP:PORT``."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from flexcache.router.discovery.dns import Resolve, resolve
from flexcache.router.discovery.listing import bracketed

KEPT_S = 5.0


class Destinations:
    """Turns URLs into addresses. Those of names are looked up again every few seconds.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(
        self, *, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resolve = resolve
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """Return ``IP:PORT`` of an engine, an IPv6 address in brackets.

        Raises:
            OSError: Its name has no address.
        """
        address, until_s = self._known.get(url, ("", 0.0))
        if address and self._clock() < until_s:
            return address
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        until_s = float("inf")
        if not _is_address(host):
            host = (await self._resolve(host, port))[0]
            until_s = self._clock() + KEPT_S
        address = f"{bracketed(host)}:{port}"
        self._known[url] = (address, until_s)
        return address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
