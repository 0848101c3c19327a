"""Listings of workers, as a person writes them, and the `WorkerSpec`s that they mean.

A URL names one engine, or a group whose members are looked up and change:

    http://HOST:PORT                        one engine; https likewise
    http+dns://NAME:PORT                    every address of a DNS name (a headless service)
    http+k8s://SERVICE.NAMESPACE:PORT       every ready endpoint of a Kubernetes service

Events are given as ``ENDPOINT`` or ``ENDPOINT,REPLAY``, a cache's HTTP API as ``http://HOST:PORT``;
``{host}`` stands for the worker's host. Data-parallel ranks of vLLM publish on ports of their own,
PORT + rank; a cache that the ranks share has one endpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from flexcache.config.sources import closest, read_file
from flexcache.config.values import is_host, read_endpoint, reject, split_tcp
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.fleet import EventSource, Role, Transfer, WorkerSpec

SCHEMES = ("http", "https", "http+dns", "https+dns", "http+k8s", "https+k8s")
_SIZE, _PEER_PORT = "data_parallel_size", "peer_port"
_OPTIONS = f"[,{_SIZE}=N][,role=prefill|decode][,{_PEER_PORT}=N][,transfer=NAME]"
_MAX_PORT = 65_535
_DEFAULT_PORTS = {"http": 80, "https": 443}


class WorkerUrl(msgspec.Struct, frozen=True):
    """A worker's URL in its parts.

    Attributes:
        scheme: ``http`` or ``https``.
        group: How the members are looked up: ``dns`` or ``k8s``; empty for one engine.
        host: An IPv6 address without brackets.
    """

    scheme: str
    group: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, name: str = "url") -> WorkerUrl:
        """
        Args:
            name: Of the setting, for the error.

        Raises:
            ConfigError: It is none, or has more than scheme, host and port.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise reject(name, text, str(error)) from None
        if min(text, default="!") <= " ":  # which `urlsplit` leaves out
            raise reject(name, text, "must have no control characters or spaces")
        if parts.scheme not in SCHEMES or host in (None, "*") or not is_host(host):
            raise reject(name, text, f"must be SCHEME://HOST:PORT with one of {', '.join(SCHEMES)}")
        rest = parts.path.removeprefix("/"), parts.query, parts.fragment
        if any(rest) or "@" in parts.netloc:
            raise reject(name, text, "must have no path, query, fragment or user")
        scheme, _, group = parts.scheme.partition("+")
        if group and not port:
            raise reject(name, text, "needs the port of the engines")
        return cls(scheme, group, host, port or _DEFAULT_PORTS[scheme])

    def __str__(self) -> str:
        scheme = f"{self.scheme}+{self.group}" if self.group else self.scheme
        return f"{scheme}://{bracketed(self.host)}:{self.port}"

    def member(self, address: str) -> WorkerUrl:
        """Return the URL of a member of this group."""
        return WorkerUrl(self.scheme, "", address, self.port)


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine, or a group of like engines. Also the body of ``POST /workers``.

    Attributes:
        url: See the module.
        data_parallel_size: Ranks of each engine.
        events: Publishers of an engine; those of rank R are R ports further.
        shared_events: Publishers of caches that the ranks of an engine share.
        cache_url: HTTP API of the engine's cache, which the router asks to load early.
        role: See `WorkerSpec`; ``transfer`` likewise.
        peer_port: Likewise; that of rank R is R further, but for FlexCache's, which ranks share.
    """

    url: str
    data_parallel_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    role: Role = "both"
    peer_port: Annotated[int, Meta(ge=1, le=_MAX_PORT)] | None = None
    transfer: Transfer = "flexcache"
    events: tuple[str, ...] = ()
    shared_events: tuple[str, ...] = ()
    cache_url: str | None = None


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of workers. As a file: ``[[workers]]``, ``shared_events`` and ``shared_cache_url``.

    Attributes:
        workers: Engines and groups.
        shared_events: Publishers of caches that all of them share.
        shared_cache_url: HTTP API of the cache of those that name none of their own.

    Raises:
        ConfigError: A URL or an endpoint is malformed, or a worker is listed twice.
    """

    workers: tuple[WorkerEntry, ...] = ()
    shared_events: tuple[str, ...] = ()
    shared_cache_url: str | None = None

    def __post_init__(self) -> None:
        seen: set[WorkerUrl] = set()
        for number, entry in enumerate(self.workers):
            name = f"workers[{number}].url"
            url = WorkerUrl.parse(entry.url, name)
            if url in seen:
                raise reject(name, entry.url, "is listed twice")
            seen.add(url)
            self.specs_of(entry, url)

    def joined(self, other: Listing) -> Listing:
        """Return the entries of both; of a URL in both, the entry of this listing."""
        known = {url for _, url in self._urls()}
        added = (entry for entry, url in other._urls() if url not in known)
        shared = dict.fromkeys((*self.shared_events, *other.shared_events))
        cache_url = self.shared_cache_url or other.shared_cache_url
        return Listing((*self.workers, *added), tuple(shared), cache_url)

    def specs(self) -> tuple[WorkerSpec, ...]:
        """Return the workers whose addresses are listed, without those of groups."""
        return tuple(
            spec
            for entry, url in self._urls()
            if not url.group
            for spec in self.specs_of(entry, url)
        )

    def specs_of(self, entry: WorkerEntry, url: WorkerUrl) -> tuple[WorkerSpec, ...]:
        """Return the workers of one engine, one for each rank, with what all workers share.

        Args:
            url: The engine's.

        Raises:
            ConfigError: Events or the cache's URL are malformed.
        """
        host, base = bracketed(url.host), str(url)
        cache_url = entry.cache_url or self.shared_cache_url
        if cache_url is not None:
            cache_url = parse_cache_url(cache_url, host)
        common = [parse_source(text, host) for text in (*entry.shared_events, *self.shared_events)]
        own = [parse_source(text, host) for text in entry.events]
        ports = _peer_ports(entry)
        is_one = entry.data_parallel_size == 1
        return tuple(
            WorkerSpec(
                name=base if is_one else f"{base}#{rank}",
                url=base,
                data_parallel_rank=None if is_one else rank,
                sources=unique([*(of_rank(source, rank) for source in own), *common]),
                cache_url=cache_url,
                peer_port=ports[rank],
                role=entry.role,
                transfer=entry.transfer,
            )
            for rank in range(entry.data_parallel_size)
        )

    def groups(self) -> tuple[tuple[WorkerEntry, WorkerUrl], ...]:
        """Return the entries whose members must be looked up."""
        return tuple((entry, url) for entry, url in self._urls() if url.group)

    def _urls(self) -> list[tuple[WorkerEntry, WorkerUrl]]:
        return [(entry, WorkerUrl.parse(entry.url)) for entry in self.workers]


def _peer_ports(entry: WorkerEntry) -> Sequence[int | None]:
    """Return the port of each rank."""
    size, first = entry.data_parallel_size, entry.peer_port
    if first is None or entry.transfer == "flexcache":
        return [first] * size
    if first + size > _MAX_PORT + 1:
        raise reject(_PEER_PORT, first, "leaves no port for the last rank")
    return range(first, first + size)


LISTING_KEYS = Listing.__struct_fields__
"""Keys of a settings file that belong to the listing."""


def parse_options(
    workers: Sequence[str], events: Sequence[str], caches: Sequence[str] = ()
) -> Listing:
    """Parse the options ``--worker``, ``--events`` and ``--cache``.

    Args:
        workers: ``URL``, and after it ``,NAME=VALUE`` for more fields of `WorkerEntry`.
        events: ``URL=ENDPOINT[,REPLAY]``, each rank R ports further; with ``URL#*`` of a cache that
            the ranks of this engine share; with ``*`` of a cache that all workers share.
        caches: ``URL=CACHE_URL``; with ``*`` the cache that all workers share.

    Raises:
        ConfigError: One is malformed, or is for a worker that is not listed.
    """
    entries: dict[str, WorkerEntry] = {}
    for text in workers:
        url, _, rest = text.partition(",")
        key = str(WorkerUrl.parse(url, "--worker"))
        if key in entries:
            raise reject("--worker", text, "is listed twice")
        entries[key] = _parse_entry(text, key, rest)
    shared: list[str] = []
    for text in events:
        target, source = _parse_assignment("--events", text, "ENDPOINT[,REPLAY]")
        parse_source(source, "host", "--events")
        if target == "*":
            shared.append(source)
            continue
        url = target.removesuffix("#*")
        key = _key_of("--events", text, url, entries)
        field = "events" if url == target else "shared_events"
        entry = entries[key]
        entries[key] = msgspec.structs.replace(entry, **{field: (*getattr(entry, field), source)})
    shared_cache_url = None
    for text in caches:
        target, cache_url = _parse_assignment("--cache", text, "CACHE_URL")
        parse_cache_url(cache_url, "host", "--cache")
        if target == "*":
            shared_cache_url = cache_url
            continue
        key = _key_of("--cache", text, target, entries)
        entries[key] = msgspec.structs.replace(entries[key], cache_url=cache_url)
    return Listing(tuple(entries.values()), tuple(shared), shared_cache_url)


def _parse_assignment(option: str, text: str, form: str) -> tuple[str, str]:
    """Parse ``URL=VALUE`` or ``*=VALUE``."""
    target, separator, value = text.partition("=")
    if not separator:
        raise reject(option, text, f"must be URL={form} or *={form}")
    return target, value


def _key_of(option: str, text: str, url: str, entries: Mapping[str, WorkerEntry]) -> str:
    """Return the listed worker that an option is for."""
    key = str(WorkerUrl.parse(url, option))
    if key not in entries:
        close = closest(key, entries)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise reject(option, text, f"{key} is no --worker{hint}")
    return key


def _parse_entry(text: str, url: str, rest: str) -> WorkerEntry:
    """Parse what follows a worker's URL."""
    values: dict[str, int | str] = {}
    for each in filter(None, rest.split(",")):
        name, _, value = each.partition("=")
        is_number = name in (_SIZE, _PEER_PORT) and value.isdecimal()
        if name in values or not (is_number or name in ("role", "transfer")):
            raise reject("--worker", text, f"must be URL{_OPTIONS}")
        values[name] = int(value) if is_number else value
    try:
        return msgspec.convert({"url": url, **values}, WorkerEntry)
    except msgspec.ValidationError as error:
        raise reject("--worker", text, str(error)) from None


def parse_table(table: Mapping[str, Any]) -> Listing:
    """Parse a settings file's table; keys other than `LISTING_KEYS` are ignored.

    Raises:
        ConfigError: A value is wrong. Names its place.
    """
    try:
        return msgspec.convert({key: table[key] for key in LISTING_KEYS if key in table}, Listing)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from None


def parse_source(text: str, host: str, name: str = "events") -> EventSource:
    """Parse ``ENDPOINT`` or ``ENDPOINT,REPLAY``.

    Args:
        host: What ``{host}`` stands for.
        name: Of the setting, for the error.

    Raises:
        ConfigError: It is none.
    """
    endpoints = [each.strip().replace("{host}", host) for each in text.split(",")]
    try:
        if len(endpoints) <= 2:
            return EventSource(*(_endpoint(name, each) for each in endpoints))
    except ConfigError:
        raise
    except ValueError:
        pass
    allowed = "must be ENDPOINT or ENDPOINT,REPLAY, each tcp://HOST:PORT or ipc://PATH"
    raise reject(name, text, allowed)


def parse_cache_url(text: str, host: str, name: str = "cache_url") -> str:
    """Parse the address of a cache's HTTP API.

    Args:
        host: What ``{host}`` stands for.
        name: Of the setting, for the error.

    Raises:
        ConfigError: It is none.
    """
    url = WorkerUrl.parse(text.replace("{host}", host), name)
    if url.group:
        raise reject(name, text, "must be http://HOST:PORT or https://HOST:PORT")
    return str(url)


def _endpoint(name: str, text: str) -> str:
    """Return an endpoint to connect to, made of its parts.

    Raises:
        ValueError: It is none.
        ConfigError: It is ``ipc://`` without an absolute path.
    """
    if text.startswith("ipc://") and text != "ipc://" and text.isprintable():
        return read_endpoint(name, text)
    host, port = split_tcp(text)
    if host == "*" or not port:
        raise ValueError("must be an address to connect to")
    return f"tcp://{bracketed(host)}:{port}"


def of_rank(source: EventSource, rank: int) -> EventSource:
    """Return the endpoints of a data-parallel rank: vLLM adds the rank to the port.

    Raises:
        ConfigError: There is no port, or no further one.
    """
    if rank == 0:
        return source
    replay = None if source.replay is None else _port_of_rank(source.replay, rank)
    return EventSource(_port_of_rank(source.endpoint, rank), replay, source.topic)


def _port_of_rank(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        raise reject("events", endpoint, "needs a TCP port, to which ranks are added")
    if int(port) + rank > _MAX_PORT:
        raise reject("events", endpoint, f"leaves no port for rank {rank}")
    return f"{host}:{int(port) + rank}"


def unique(sources: Iterable[EventSource]) -> tuple[EventSource, ...]:
    """Drop sources that occur twice, keeping the order."""
    return tuple(dict.fromkeys(sources))


def bracketed(host: str) -> str:
    """Write a host as in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


logger = logging.getLogger(__name__)


class WorkerFile:
    """A file that lists workers; other settings may stand beside them.

    Attributes:
        listing: The last one that was valid.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
        MissingDependencyError: Its format needs a package that is not installed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._version = self._read_version()
        self._fault: str | None = None
        self.listing: Listing = parse_table(read_file(path, "worker_file"))

    def reread(self) -> bool:
        """Read the file again if it changed; a wrong one leaves the listing as it is.

        Returns:
            Whether the listing is another one.
        """
        version = self._read_version()
        if version == self._version:
            return False
        before = self.listing
        try:
            self.listing = parse_table(read_file(self._path, "worker_file"))
        except (ConfigError, MissingDependencyError) as error:
            self._note(str(error))
        else:
            self._note(None)
        self._version = version
        return self.listing != before

    def _note(self, fault: str | None) -> None:
        """Log a fault when it appears, and its end."""
        if fault == self._fault:
            return
        self._fault = fault
        if fault is None:
            log_event(logger, logging.INFO, "worker_file_recovered", path=self._path)
        else:
            log_event(logger, logging.WARNING, "worker_file_rejected", path=self._path, error=fault)

    def _read_version(self) -> tuple[int, int, int] | None:
        """Return what changes with the content, also where a link is set to another file, as
        Kubernetes does; None if the file is missing."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
