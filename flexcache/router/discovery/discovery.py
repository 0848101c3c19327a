"""Follows all that workers are learned from, and hands out their complete set when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from flexcache.errors import ConfigError
from flexcache.logs import log_event
from flexcache.router.discovery import dns
from flexcache.router.discovery.file import WorkerFile
from flexcache.router.discovery.listing import Listing, WorkerEntry, WorkerUrl
from flexcache.router.waiting import Turns
from flexcache.router.workers import WorkerSpec

logger = logging.getLogger(__name__)

FILE_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 10.0

Members = Callable[[WorkerUrl], AsyncIterator[tuple[str, ...]]]
"""Yields the complete set of a group's addresses at first and after each change, and never ends."""

_Group = tuple[WorkerEntry, WorkerUrl]


def _kubernetes_members(url: WorkerUrl) -> AsyncIterator[tuple[str, ...]]:
    from flexcache.router.discovery.endpoint_slices import members  # needs aiohttp

    return members(url)


LOOKUPS: Mapping[str, Members] = {"dns": dns.members, "k8s": _kubernetes_members}
"""How the members of a group are found, by the kind of its URL."""


class Discovery:
    """Follows the workers of the options, of a file, and of the groups that they name.

    An entry that both have is the one of the options. Caches that all workers share may be named in
    either.

    Args:
        options: What the command line lists.
        on_change: Called with the complete set at first and after each change.
        file: Read again when it changes.
        lookups: See `LOOKUPS`.
        retry_interval_s: Until a group is looked up again whose look-up failed.
    """

    def __init__(
        self,
        options: Listing,
        on_change: Callable[[tuple[WorkerSpec, ...]], None],
        *,
        file: WorkerFile | None = None,
        lookups: Mapping[str, Members] = LOOKUPS,
        file_interval_s: float = FILE_INTERVAL_S,
        retry_interval_s: float = RETRY_INTERVAL_S,
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._file = file
        self._lookups = lookups
        self._file_interval_s = file_interval_s
        self._retry_interval_s = retry_interval_s
        self._followers: dict[_Group, asyncio.Task[None]] = {}
        self._addresses: dict[_Group, tuple[str, ...]] = {}
        self._published: tuple[WorkerSpec, ...] | None = None

    @property
    def listing(self) -> Listing:
        """What options and file list now."""
        return self._options if self._file is None else self._options.joined(self._file.listing)

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            ConfigError: A group of the options can never be looked up.
        """
        turns, readings = Turns("discovery"), Turns("worker file")
        try:
            while True:
                with turns.turn():
                    self._follow_groups()
                    self._publish()
                await asyncio.sleep(self._file_interval_s)
                self._restart_failed()
                if self._file is not None:
                    with readings.turn():
                        await asyncio.to_thread(self._file.reread)
        finally:
            await _cancel(list(self._followers.values()))

    def _follow_groups(self) -> None:
        """Start to follow the groups that are new, and stop for those no longer listed."""
        groups = self.listing.groups()
        for group in self._followers.keys() - set(groups):
            self._followers.pop(group).cancel()
            self._addresses.pop(group, None)
        for group in groups:
            if group not in self._followers:
                self._followers[group] = asyncio.create_task(self._follow(group))

    def _restart_failed(self) -> None:
        """Look up a group again whose look-up failed; its members stay as they were.

        Raises:
            ConfigError: A group of the options can never be looked up.
        """
        for group, follower in self._followers.items():
            if follower.done():
                if (
                    isinstance(follower.exception(), ConfigError)
                    and group in self._options.groups()
                ):
                    follower.result()
                log_event(
                    logger, logging.ERROR, "discovery_failed", group=group[1],
                    error=repr(follower.exception()), retried_in=f"{self._retry_interval_s:g} s",
                )  # fmt: skip
                follow = self._follow(group, delay_s=self._retry_interval_s)
                self._followers[group] = asyncio.create_task(follow)

    async def _follow(self, group: _Group, delay_s: float = 0.0) -> None:
        url = group[1]
        await asyncio.sleep(delay_s)
        async for addresses in self._lookups[url.group](url):
            self._addresses[group] = addresses
            self._publish()

    def _publish(self) -> None:
        listing = self.listing
        found = {spec.name: spec for spec in listing.specs()}
        for (entry, url), addresses in self._addresses.items():
            for address in addresses:
                for spec in listing.specs_of(entry, url.member(address)):
                    found.setdefault(spec.name, spec)
        specs = tuple(found.values())
        if specs != self._published:
            self._published = specs
            self._on_change(specs)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
