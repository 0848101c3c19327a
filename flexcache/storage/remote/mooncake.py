"""Mooncake Store: the DRAM of a cluster, behind one master.

The client listens at any address, asks for no key, and lets everyone read and write the memory
that is registered with it. So it is given bounce memory only, never the host pool: see
`BounceMemory` and docs/guide/remote.md.

The client recovers by itself after a restart of its master; until then a call to a dead master
takes seconds, so after a failure the master's port is probed first.

Querying an object grants it a lease (the master's ``default_kv_lease_ttl``), during which it is not
evicted. Every read begins with a query, and so with a fresh lease; if it takes longer than that,
the object's checksum reveals a change.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from itertools import takewhile
from queue import Empty, LifoQueue
from typing import Any, TypeVar

from flexcache.config.remote_url import (
    RemoteUrl,
    StoreKind,
    StoreLimits,
    choice_option,
    number_option,
    register,
    text_option,
)  # fmt: skip
from flexcache.errors import MissingDependencyError
from flexcache.storage.pieces import Parts, address_of, cut, gather, num_bytes_of, scatter_checked
from flexcache.storage.remote.base import (
    MISSING,
    TOO_LATE,
    ObjectOutcome,
    Presence,
    RemoteStore,
    Status,
    StoreUnavailableError,
    failed,
    seconds_until,
    too_large,
)

_T = TypeVar("_T")
_RPCS_PER_OP = 3  # a put is announced, moved and completed
_LOCAL_BUFFER_BYTES = 16 << 20
_ROOMS = 3  # one for each thread of the remote worker: two move in one direction at most
_NICENESS = 10
_DOCTOR_TIMEOUT_S = 3.0
_SAFE_SINCE = (0, 3, 12)  # since then it refuses addresses that were not registered
_PRESENT = 1
_NO_SPACE = -200
_BAD_SIZE = -600
_NOT_FOUND = -704
_UNREACHABLE = (-900, -901)
_UNKNOWN_TENANT = -1701


class BounceMemory:
    """Rooms of memory for a library that shows memory to the network; it is given no other.

    Anyone who reaches the library's ports may read and write it, at any moment. So nothing that
    lies here is believed: what has arrived is copied out first and checked then, and checksums of
    what is sent are made from the original. Thread-safe.

    Args:
        room_bytes: Size of a room: of all that one call of the library moves.
        num_rooms: How many calls there can be at once; further ones wait.
        register: Shows the memory to the library, by address and size.
    """

    def __init__(
        self, room_bytes: int, num_rooms: int, register: Callable[[int, int], object]
    ) -> None:
        memory = memoryview(b"")
        if room_bytes:
            memory = memoryview(mmap.mmap(-1, room_bytes * num_rooms))
            register(address_of(memory), len(memory))
        # The room that was used last comes first: it is in the processor's cache.
        self._free: LifoQueue[memoryview] = LifoQueue()
        for number in range(num_rooms):
            self._free.put(memory[number * room_bytes :][:room_bytes])

    @contextmanager
    def room(self, deadline: float) -> Iterator[memoryview | None]:
        """Lend a room; None if none became free before the deadline.

        The library must be done with it at the end.
        """
        try:
            room = self._free.get(timeout=seconds_until(deadline))
        except Empty:
            yield None
            return
        try:
            yield room
        finally:
            self._free.put(room)


class MooncakeStore(RemoteStore):
    """A client of a Mooncake Store; see the module.

    Raises:
        MissingDependencyError: The client, or a library that it links to, is not installed.
        StoreUnavailableError: The master does not answer.
    """

    def __init__(self, url: RemoteUrl, limits: StoreLimits) -> None:
        self.name = url.name
        self._master = _master_of(url)
        self._connect_timeout_s = limits.timeout_s / _RPCS_PER_OP
        self._is_suspect = False
        self._reading = _Turns("flexcache-mooncake-read")
        self._writing = _Turns("flexcache-mooncake-write")
        api = _load_client(limits.timeout_s)
        own_host = self._try_master()
        options = url.options
        self._client: Any = api.MooncakeDistributedStore()
        # This call holds the interpreter lock; a stopped master blocks us for one RPC.
        result = self._client.setup(
            {
                "local_hostname": options.get("hostname", own_host),
                "metadata_server": options.get("metadata", "P2PHANDSHAKE"),
                "global_segment_size": int(float(options.get("segment_gb", "0")) * 1e9),
                "local_buffer_size": _LOCAL_BUFFER_BYTES,
                "protocol": options.get("protocol", "tcp"),
                "rdma_devices": options.get("device", ""),
                "master_server_addr": url.location.rstrip("/"),
                "tenant_id": options.get("tenant", "default"),  # of vLLM's connector, too
            }
        )
        if result != 0:
            raise StoreUnavailableError(f"{self.name}: setup failed (error {result})")
        self._bounce = BounceMemory(limits.call_bytes, _ROOMS, self._register)
        self._placement = api.ReplicateConfig()
        self._placement.replica_num = int(options.get("replicas", "1"))
        soft_pin_s = float(options.get("soft_pin_s", "0"))
        if soft_pin_s:
            self._placement.soft_pin_action = api.SoftPinAction.ENABLE
            self._placement.soft_pin_ttl_ms = int(soft_pin_s * 1e3)

    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        problem = self._problem(deadline)
        if problem or not names:
            return Presence(0, problem)
        found = self._client.batch_is_exist(list(names))
        present = sum(1 for _ in takewhile(lambda result: result == _PRESENT, found))
        if present < len(names) and found[present] < 0:
            return Presence(present, self._failure(found[present]).reason)
        return Presence(present)

    def first_present(self, names: Sequence[str], deadline: float) -> int:
        if self._problem(deadline) or not names:
            return len(names)
        found = self._client.batch_is_exist(list(names))
        return found.index(_PRESENT) if _PRESENT in found else len(names)

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        def read(memory: memoryview) -> list[ObjectOutcome] | None:
            rooms = cut(memory, [num_bytes_of(each) for each in parts])
            get = self._client.batch_get_into
            results = self._reading.take(deadline, get, list(names), *_addresses_and_sizes(rooms))
            if results is None:
                return None
            moved = zip(names, rooms, results, parts, strict=True)
            return [self._arrived(*each) for each in moved]

        return self._in_a_room(names, deadline, read)

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        def write(memory: memoryview) -> list[ObjectOutcome] | None:
            rooms: list[memoryview] = []
            for content in parts:
                rooms.append(gather(content, memory))
                memory = memory[len(rooms[-1]) :]
            put, buffers = self._client.batch_put_from, _addresses_and_sizes(rooms)
            results = self._writing.take(deadline, put, list(names), *buffers, self._placement)
            if results is None:
                return None
            return [
                ObjectOutcome(Status.OK, len(room)) if result == 0 else self._failure(result)
                for room, result in zip(rooms, results, strict=True)
            ]

        return self._in_a_room(names, deadline, write)

    def _in_a_room(
        self,
        names: Sequence[str],
        deadline: float,
        move: Callable[[memoryview], list[ObjectOutcome] | None],
    ) -> list[ObjectOutcome]:
        """Let a batch be moved through a room of bounce memory; ``move`` returns None if it is too
        late for that."""
        problem = self._problem(deadline)
        if problem:
            return [failed(problem) for _ in names]
        if not names:
            return []
        with self._bounce.room(deadline) as memory:
            outcomes = None if memory is None else move(memory)
        return [TOO_LATE for _ in names] if outcomes is None else outcomes

    def _arrived(self, name: str, room: memoryview, result: int, parts: Parts) -> ObjectOutcome:
        """Copy an object out of its room, before anything of it is believed."""
        if result >= 0:
            digest = scatter_checked(room[:result], parts)
            return ObjectOutcome(Status.OK, result, digest=digest)
        if result == _BAD_SIZE and (size := self._size(name)) > len(room):
            return too_large(size, len(room))
        return self._failure(result)

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        problem = self._problem(deadline)
        if problem:
            return [failed(problem) for _ in names]
        # By force, since our own read has just leased them.
        results = self._client.batch_remove(list(names), True) if names else []
        return [ObjectOutcome(Status.OK) if code == 0 else self._failure(code) for code in results]

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _register(self, address: int, num_bytes: int) -> None:
        if self._client.register_buffer(address, num_bytes) != 0:
            self.close()
            raise StoreUnavailableError(f"{self.name}: cannot register memory")

    def _size(self, name: str) -> int:
        """Return the size of an object in some node's DRAM; 0 if there is none."""
        for replica in self._client.batch_get_replica_desc([name]).get(name, ()):
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return 0

    def _failure(self, code: int) -> ObjectOutcome:
        if code == _NOT_FOUND:
            return MISSING
        if code == _NO_SPACE:
            return failed("the store is full")
        if code == _UNKNOWN_TENANT:
            return failed("the store does not know this tenant; see the URL's option `tenant`")
        if code in _UNREACHABLE:
            self._is_suspect = True
            return failed("the master does not answer")
        return failed(f"the transfer failed (error {code})")

    def _problem(self, deadline: float) -> str | None:
        """Return why the client should not be called now; None if it may be."""
        if seconds_until(deadline) <= 0:
            return TOO_LATE.reason
        if self._is_suspect:
            try:
                self._try_master()
            except StoreUnavailableError as error:
                return str(error)
            self._is_suspect = False
        return None

    def _try_master(self) -> str:
        """Connect to the master's port; return our own address on that route."""
        try:
            with socket.create_connection(self._master, self._connect_timeout_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise StoreUnavailableError(f"{self.name}: {error.strerror or error}") from None


def _load_client(timeout_s: float) -> Any:
    rpc_timeout_ms = str(math.ceil(timeout_s * 1e3 / _RPCS_PER_OP))
    environment = {
        "MC_RPC_TIMEOUT_MS": rpc_timeout_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": rpc_timeout_ms,
        # Per few objects of a call, so a stopped peer costs several times this long.
        "MC_TCP_STATUS_TIMEOUT_SEC": str(math.ceil(timeout_s / _RPCS_PER_OP)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(timeout_s / _RPCS_PER_OP)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # our caller does the retries
        "MC_LOG_LEVEL": "ERROR",
    }
    return load_mooncake("store", environment)


def load_mooncake(module: str, environment: Mapping[str, str]) -> Any:
    """Import a module of Mooncake, which reads its timeouts from the environment.

    Raises:
        MissingDependencyError: It is not installed, or shows memory that it was not given.
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        loaded = importlib.import_module(f"mooncake.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            f"the Mooncake client cannot be loaded ({error}); install the extra: "
            "pip install '.[mooncake]'; it also needs the system's libibverbs"
        ) from error
    for package in packages_distributions().get("mooncake", ()):
        found = tuple(map(int, re.findall(r"\d+", version(package))[:3]))
        if found < _SAFE_SINCE:
            raise MissingDependencyError(
                f"{package} {version(package)} lets anyone who reaches its ports read and change "
                "all memory of this process, the DRAM tier included; install 0.3.12 or later: "
                f"pip install -U {package}"
            )
    return loaded


class _Turns:
    """A thread that makes the client's calls of one direction, one at a time.

    A batch keeps the transport busy by itself: a second concurrent one only takes processor time
    from the first. So does the calling thread, which spins until the batch is over, and therefore
    runs at a lower priority than the client's own threads.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name, initializer=os.nice, initargs=(_NICENESS,))

    def take(self, deadline: float, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return the result of the call; None if its turn did not come before the deadline."""

        def in_time() -> _T | None:
            return call(*arguments) if seconds_until(deadline) > 0 else None

        turn = self._thread.submit(in_time)
        wait([turn], seconds_until(deadline))
        return None if turn.cancel() else turn.result()

    def close(self) -> None:
        self._thread.shutdown()


def _addresses_and_sizes(rooms: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    return [address_of(room) for room in rooms], [len(room) for room in rooms]


def _problem(url: RemoteUrl) -> str | None:
    """Check only that the master accepts connections: a whole client would join the cluster."""
    try:
        socket.create_connection(_master_of(url), _DOCTOR_TIMEOUT_S).close()
    except OSError as failure:
        return f"the master does not accept connections ({failure.strerror or failure})"
    return None


def _master_of(url: RemoteUrl) -> tuple[str, int]:
    host, _, port = url.location.rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


register(
    "mooncake",
    StoreKind(
        open=MooncakeStore,
        form="mooncake://HOST:PORT, the address of the master",
        fits=lambda split: bool(split.hostname and split.port and split.path in ("", "/")),
        options={
            "metadata": text_option,
            "protocol": choice_option("tcp", "rdma"),
            "device": text_option,
            "segment_gb": number_option(0, 1e6),
            "hostname": text_option,
            "replicas": choice_option(*"12345678"),
            "soft_pin_s": number_option(0, 86400),
            "tenant": text_option,
        },
        package="mooncake",
        extra="mooncake",
        problem=_problem,
        caution="; anyone who reaches Mooncake's ports can read and replace what is in the store "
        "(docs/guide/remote.md says how to fence them)",
    ),
)
