"""Data plane `rdma` of peers: Mooncake's Transfer Engine, between bounce memories.

    owner's pool --copy--> its bounce memory
                              |  Transfer Engine reads
    reader's pool <--copy-- its bounce memory

Transfer Engine lets everyone who reaches its ports read and write the memory that is registered
with it. So it never sees a pool, and nothing that lies in bounce memory is believed: the reader
checks its copy, by checksums that the owner made of the original and sent another way.

A call that begins a transfer returns at once, but for the first to a peer: that one, and then all
first ones, wait up to a minute for a peer that has stopped. And a transfer that is given up may
still land. So each has a thread and a room of its own until it has ended. Until then blocks of all
peers go by TCP.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

from flexcache.errors import FlexCacheError
from flexcache.logs import log_event
from flexcache.storage.pieces import address_of
from flexcache.storage.remote.base import seconds_until
from flexcache.storage.remote.mooncake import BounceMemory, load_mooncake

logger = logging.getLogger(__name__)

_ROOMS = 8  # for each direction
_POLL_S = 0.0002
_AVOIDED_S = 30.0
_JITTER_S = 0.02
"""First contacts of many hosts at once break handshakes."""
_ENVIRONMENT = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class TransferError(OSError):
    """Transfer Engine could not read from a peer, or not in time."""


class RdmaPlane:
    """Transfer Engine, and the bounce memory that it is given. Thread-safe.

    Args:
        devices: Network cards to use, with ``,`` between; empty for all. Without any, it uses TCP.
        room_bytes: Most that is moved at once.
    """

    def __init__(self, devices: str, room_bytes: int) -> None:
        self._devices = devices
        self._room_bytes = room_bytes
        self._lock = threading.Lock()
        self._engine: Any = None
        self._has_begun = self._has_failed = False
        self._known: set[str] = set()
        """Where a first contact was made."""
        self._avoided: dict[str, float] = {}
        """Hosts that are read by TCP for now, and until when."""
        self._num_given_up = 0
        """Transfers that were given up and have not ended."""
        self._told: set[str] = set()
        self._threads = ThreadPoolExecutor(_ROOMS, "flexcache-peer-rdma")
        self.port = 0
        """Where peers' Transfer Engines find ours."""
        with self._told_if_it_fails():
            self._engine = load_mooncake("engine", _ENVIRONMENT).TransferEngine()

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except FlexCacheError as error:
            self._has_failed = True
            log_event(logger, logging.ERROR, "peer_rdma_failed", reason=str(error),
                      effect="blocks go by TCP")  # fmt: skip

    def begin(self, own_address: str) -> bool:
        """Begin, unless that was done; whether it can be used. It knows no IPv6.

        Not before a connection: only it tells by which address of ours peers reach us.
        """
        own_address = own_address.removeprefix("::ffff:")
        if ":" in own_address:
            return False
        with self._lock:
            if not self._has_begun and not self._has_failed:
                with self._told_if_it_fails():
                    self._begin(own_address)
                    self._has_begun = True
        return self._has_begun

    def _begin(self, own_address: str) -> None:
        if self._engine.initialize(own_address, "P2PHANDSHAKE", "rdma", self._devices) != 0:
            raise FlexCacheError(f"Transfer Engine does not begin at {own_address}")
        # Apart: a peer that is slow to read must not keep us from reading.
        self.shown = BounceMemory(self._room_bytes, _ROOMS, self._register)
        """Rooms whose content peers are to read."""
        self._taken = BounceMemory(self._room_bytes, _ROOMS, self._register)
        self.port = self._engine.get_rpc_port()
        log_event(logger, logging.INFO, "peer_rdma_began", address=own_address, port=self.port)

    def _register(self, address: int, num_bytes: int) -> None:
        if self._engine.register_memory(address, num_bytes) != 0:
            raise FlexCacheError(f"Transfer Engine cannot register {num_bytes} bytes")

    def can_reach(self, host: str) -> bool:
        """Whether a peer's host is to be read from so."""
        is_avoided = time.monotonic() < self._avoided.get(host, 0.0)
        return not self._num_given_up and not is_avoided and ":" not in host

    def avoid(self, host: str, reason: str) -> None:
        """Read from a host by TCP for a while."""
        self._avoided[host] = time.monotonic() + _AVOIDED_S
        log_event(logger, logging.WARNING, "peer_rdma_failed", peer=host, reason=reason,
                  effect=f"it is read by TCP for {_AVOIDED_S:g} s")  # fmt: skip

    def note_tcp(self, host: str) -> None:
        """A peer sends by TCP, though we wanted otherwise: log the first time."""
        if host not in self._told:
            self._told.add(host)
            log_event(
                logger, logging.INFO, "peer_read_by_tcp", peer=host,
                reason="it has another peer_transport, or no bounce memory is free",
            )  # fmt: skip

    @contextmanager
    def fetched(
        self, host: str, port: int, address: int, num_bytes: int, until_s: float
    ) -> Iterator[memoryview]:
        """Read what a peer shows, and lend it.

        Raises:
            TransferError: It has not arrived, or not by then, or is more than a room has.
        """
        with ExitStack() as stack:
            room = stack.enter_context(self._taken.room(until_s))
            if room is None:
                raise TransferError("no bounce memory is free")
            if num_bytes > len(room):
                raise TransferError(f"{num_bytes} bytes at once, of at most {len(room)}")
            there = f"{host}:{port}", address
            transfer = self._threads.submit(self._transfer, *there, address_of(room), num_bytes)
            wait([transfer], seconds_until(until_s))
            if not transfer.done():
                rest = stack.pop_all()  # the room is not free before it has ended
                rest.callback(self._count_given_up, -1)
                self._count_given_up(1)
                transfer.add_done_callback(lambda _: rest.close())
                raise TransferError("Transfer Engine does not return")
            if not transfer.result():
                raise TransferError("Transfer Engine cannot read from it")
            yield room[:num_bytes]

    def _count_given_up(self, change: int) -> None:
        with self._lock:
            self._num_given_up += change

    def _transfer(self, segment: str, source: int, target: int, num_bytes: int) -> bool:
        if segment not in self._known:
            self._known.add(segment)
            time.sleep(random.uniform(0, _JITTER_S))
        batch = self._engine.batch_transfer_async_read(segment, [target], [source], [num_bytes])
        if batch == 0:
            self._known.discard(segment)
            return False
        # Its own waiting call spins, and takes from the threads that receive a processor.
        while (state := self._engine.transfer_check_status(batch)) == 0:
            time.sleep(_POLL_S)
        return bool(state == 1)
