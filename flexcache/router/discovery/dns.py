"""Members of a group by DNS: all addresses of a name, looked up every few seconds."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from flexcache.logs import log_event
from flexcache.router.discovery.listing import WorkerUrl

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]


async def resolve(name: str, port: int) -> tuple[str, ...]:
    """Return the addresses of a name, sorted. A host of two families counts once, by IPv4.

    Raises:
        OSError: It has none, or no resolver answers.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, *_, address in infos:
        by_family.setdefault(family, set()).add(str(address[0]))
    return tuple(sorted(by_family.get(socket.AF_INET) or by_family[socket.AF_INET6]))


async def members(
    url: WorkerUrl, *, resolve: Resolve = resolve, interval_s: float = INTERVAL_S
) -> AsyncIterator[tuple[str, ...]]:
    """Yield the group's addresses, at first and whenever they change.

    A failed look-up changes nothing: a fault of the DNS must not take all engines away. Those that
    are really gone are noticed by health checks.
    """
    known: tuple[str, ...] = ()
    is_failing = False
    while True:
        try:
            found = await resolve(url.host, url.port)
        except OSError as error:
            if not is_failing:
                log_event(logger, logging.WARNING, "dns_failed", name=url.host, error=str(error))
            is_failing = True
        else:
            if is_failing:
                log_event(logger, logging.INFO, "dns_recovered", name=url.host)
            is_failing = False
            if found != known:
                known = found
                yield found
        await asyncio.sleep(interval_s)
