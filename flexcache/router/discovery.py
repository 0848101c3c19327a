"""Discovery of workers: from options, a file, DNS and Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec

from flexcache.config.values import reject
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.fleet import WorkerSpec
from flexcache.router.listing import Listing, WorkerEntry, WorkerFile, WorkerUrl, bracketed
from flexcache.router.waiting import Turns

logger = logging.getLogger(__name__)

DNS_INTERVAL_S = 5.0

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


async def dns_members(
    url: WorkerUrl, *, resolve: Resolve = resolve, interval_s: float = DNS_INTERVAL_S
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


try:
    import aiohttp
except ImportError as error:
    raise MissingDependencyError(
        f"http+k8s needs the package {error.name}: pip install '.[router]'"
    ) from None

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH_S = 300
_SILENCE_S = _WATCH_S + 30  # the server ends each watch; a connection silent for longer is dead
_MAX_LINE = 16 << 20  # an event holds a whole slice: up to 1,000 endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """How a pod reaches the API server.

    Attributes:
        token_file: Read for each request, because tokens are renewed; None: no token.
        ca_file: Certificate to check the server against; None: the system's.
    """

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of_pod(cls, env: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ApiServer:
        """
        Raises:
            ConfigError: This process is not in a pod.
        """
        host = env.get("KUBERNETES_SERVICE_HOST")
        if not host or not (account / "token").exists():
            raise ConfigError("http+k8s works in a pod of Kubernetes with a service account only")
        port = env.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(
            url=f"https://{bracketed(host)}:{port}",
            token_file=account / "token",
            ca_file=account / "ca.crt",
        )

    def headers(self) -> dict[str, str]:
        """Return the headers that authorize a request."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def ssl_context(self) -> ssl.SSLContext:
        """Return a context that trusts the API server alone."""
        return ssl.create_default_context(cafile=self.ca_file)


# -- what the API server sends ---------------------------------------------------------------------


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    """None means ready."""


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Metadata(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Slice(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    address_type: str = msgspec.field(default="IPv4", name="addressType")
    endpoints: list[_Endpoint] | None = None

    def ready(self) -> set[str]:
        """Return the addresses that take requests; those of one endpoint are interchangeable."""
        return {
            each.addresses[0] for each in self.endpoints or () if each.conditions.ready is not False
        }


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice]


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_WatchEvent).decode
_decode_slice = msgspec.json.Decoder(_Slice).decode


class _Gone(Exception):
    """The API server no longer has the version to watch from: the slices must be listed again."""


class _Refused(Exception):
    """The API server ended the watch with an error."""


_FAULTS = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, _Refused)
"""ValueError includes everything that cannot be parsed."""


# -- the watch -------------------------------------------------------------------------------------


async def slice_members(
    url: WorkerUrl,
    *,
    server: ApiServer | None = None,
    pause_s: float = 1.0,
    max_pause_s: float = 30.0,
) -> AsyncIterator[tuple[str, ...]]:
    """Yield the service's ready addresses, sorted, at first and whenever they change.

    Args:
        url: Its host is ``SERVICE.NAMESPACE``.
        server: That of the pod if None.
        pause_s: Before the slices are listed again; doubles while nothing succeeds.

    Raises:
        ConfigError: The URL names no service, or the process is not in a pod.
    """
    server = server or ApiServer.of_pod()
    path, service = _collection(url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)
    connector = aiohttp.TCPConnector(ssl=server.ssl_context())
    known: tuple[str, ...] | None = None
    pause, is_failing = pause_s, False
    async with aiohttp.ClientSession(
        server.url, timeout=timeout, connector=connector, read_bufsize=_MAX_LINE
    ) as session:
        while True:
            try:
                async with aclosing(_list_and_watch(session, server, path, service)) as watch:
                    async for slices in watch:
                        if is_failing:
                            log_event(
                                logger, logging.INFO, "endpoint_slices_recovered", url=str(url)
                            )
                        pause, is_failing = pause_s, False
                        found = _ready(slices)
                        if found != known:
                            known = found
                            yield found
            except _Gone:
                pass
            except _FAULTS as error:
                if not is_failing:
                    cause = str(error) or type(error).__name__
                    log_event(
                        logger, logging.WARNING, "endpoint_slices_failed", url=str(url), error=cause
                    )
                is_failing = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, max_pause_s)


def _collection(url: WorkerUrl) -> tuple[str, str]:
    """Return the path of the namespace's slices, and the service."""
    service, _, namespace = url.host.partition(".")
    if not service or not namespace or "." in namespace:
        raise reject("url", str(url), "must be http+k8s://SERVICE.NAMESPACE:PORT")
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", service


def _ready(slices: Iterable[_Slice]) -> tuple[str, ...]:
    """Return the ready addresses. A service of two families has each endpoint twice: those of IPv4
    count."""
    by_family: dict[str, set[str]] = {}
    for each in slices:
        by_family.setdefault(each.address_type, set()).update(each.ready())
    return tuple(sorted(by_family.get("IPv4") or by_family.get("IPv6") or ()))


async def _list_and_watch(
    session: aiohttp.ClientSession, server: ApiServer, path: str, service: str
) -> AsyncGenerator[Iterable[_Slice], None]:
    """Yield the service's slices, at first and after each event, until the watch ends."""
    selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
    timeout = aiohttp.ClientTimeout(total=30)
    async with session.get(
        path, params=selector, headers=server.headers(), timeout=timeout, raise_for_status=True
    ) as response:
        listed = _decode_list(await response.read())
    slices = {each.metadata.name: each for each in listed.items}
    yield slices.values()
    params = {
        **selector,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": listed.metadata.resource_version,
        "timeoutSeconds": str(_WATCH_S),
    }
    async with session.get(path, params=params, headers=server.headers()) as response:
        if response.status == HTTPStatus.GONE:
            raise _Gone
        response.raise_for_status()
        async for line in response.content:
            _apply(_decode_event(line), slices)
            yield slices.values()


def _apply(event: _WatchEvent, slices: dict[str, _Slice]) -> None:
    """
    Raises:
        _Gone, _Refused: The event is an error.
    """
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=_Status)
        raise _Gone if status.code == HTTPStatus.GONE else _Refused(status.message)
    if event.type == "BOOKMARK":
        return
    changed = _decode_slice(event.object)
    if event.type == "DELETED":
        slices.pop(changed.metadata.name, None)
    else:
        slices[changed.metadata.name] = changed


FILE_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 10.0

Members = Callable[[WorkerUrl], AsyncIterator[tuple[str, ...]]]
"""Yields the complete set of a group's addresses at first and after each change, and never ends."""

_Group = tuple[WorkerEntry, WorkerUrl]


LOOKUPS: Mapping[str, Members] = {"dns": dns_members, "k8s": slice_members}
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
