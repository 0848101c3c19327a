"""Members of a group in Kubernetes: the ready endpoints of a service, from a watch of its
EndpointSlices.

Runs in a pod whose service account may list and watch ``endpointslices`` of the namespace. The
slices are listed, then watched; when a watch ends, for whatever reason, they are listed again,
after a pause that grows while nothing succeeds. A failure changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec

from flexcache.config.values import reject
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.discovery.listing import WorkerUrl, bracketed

try:
    import aiohttp
except ImportError as error:
    raise MissingDependencyError(
        f"http+k8s needs the package {error.name}: pip install '.[router]'"
    ) from None

logger = logging.getLogger(__name__)

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


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_slice = msgspec.json.Decoder(_Slice).decode


class _Gone(Exception):
    """The API server no longer has the version to watch from: the slices must be listed again."""


class _Refused(Exception):
    """The API server ended the watch with an error."""


_FAULTS = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, _Refused)
"""ValueError includes everything that cannot be parsed."""


# -- the watch -------------------------------------------------------------------------------------


async def members(
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


def _apply(event: _Event, slices: dict[str, _Slice]) -> None:
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
