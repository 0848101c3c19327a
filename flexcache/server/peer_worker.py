"""Peer worker: reads blocks from other hosts' DRAM (PEER2H), and sends ours, in its own process.

    reader's worker                       owner
      |-- AskLoan ------------------------> server: pins the blocks, has its worker prepare them
      |<- Loan: token, port, seconds ------|
      |-- token --------------------------> worker: header, then of each block checksum and bytes
      |<= blocks ==========================|
      |-- GiveBack -----------------------> server: unpins

Questions about loans go to the owner's server, encrypted (`server.peers`). The bytes go over a TCP
connection between the two workers, as they are: only who was told the token gets any, and nothing
can be written. What is read lands in the host pool, where nothing finds it before it is complete.

If both have the plane `rdma` (`server.peer_rdma`), the connection tells where blocks lie instead,
and when they have been read:

      |<- place and checksums -----------|
      |<= read by Transfer Engine =======|
      |-- one byte ---------------------> the place is used for the next blocks

A reader trusts neither its speed nor the owner: what has not arrived within the loan's time, by its
own clock, counts as not arrived, and each block must have its checksum, which the owner's worker
made while the block was pinned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec
import zmq

from flexcache.config.values import split_tcp
from flexcache.errors import FlexCacheError
from flexcache.logs import log_event
from flexcache.protocol.messages import AskLoan, GiveBack, Loan
from flexcache.protocol.trust import secure_client
from flexcache.server.peer_rdma import RdmaPlane, TransferError
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import Parts, address_of, checksum, cut, gather, scatter_checked
from flexcache.storage.shards import shards_of_block
from flexcache.transfer.messages import (
    BlockNames,
    Done,
    Drop,
    Execute,
    PeerFailed,
    SendBlocks,
    SendNoMore,
    unpack_ids,
)
from flexcache.transfer.worker_process import (
    WorkerConfig,
    map_segments,
    serve,
    start_worker_process,
)

logger = logging.getLogger(__name__)

_READERS = 3  # more threads would only compete for the processors
_PROGRESS_S = 1.0
"""A peer that sends, takes or answers nothing for this long is given up."""
_TOKEN_PATIENCE_S = 1.0  # the peer may be faster than our server's message
_ROOM_PATIENCE_S = 0.05  # for bounce memory; then blocks go by TCP
_IDLE_S = 60.0
_MAX_CONNECTIONS = 768  # of 256 hosts
_MAX_NEWCOMERS = 64
_REQUEST = struct.Struct("<16s?")  # token, whether the plane `rdma` is wanted
_HEADER = struct.Struct("<4sIQ")  # magic, number of blocks, bytes of each
_MAGIC = b"FCp1"  # the blocks follow
_MAGIC_RDMA = b"FCr1"  # places of blocks follow
_PLACE = struct.Struct("<IIQ")  # number of blocks, port of Transfer Engine, address
_HAS_READ = b"."
_CHECKSUM = struct.Struct("<Q")

Answer = Done | PeerFailed


class PeerWorkerConfig(WorkerConfig, frozen=True):
    """The configuration of the process, on the first line of its standard input.

    ``listen_fd``: the socket where peers connect, or -1. ``curve_keys``: as the setting.
    ``rdma_devices``: as of `RdmaPlane`; None without. ``room_bytes``: of its bounce memory.
    """

    shard_bytes: list[int]
    listen_fd: int
    curve_keys: str | None
    timeout_s: float
    rdma_devices: str | None = None
    room_bytes: int = 0


class _Pool:
    """The host pool, as blocks of all ranks' bytes in sequence."""

    def __init__(self, segments: Sequence[HostSegment], shard_bytes: Sequence[int]) -> None:
        self._segments = segments
        self._sizes = shard_bytes
        self.block_bytes = sum(shard_bytes)

    def pieces(self, block: int) -> Parts:
        return shards_of_block(self._segments, self._sizes, block)


# -- what peers read here -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lent:
    blocks: Sequence[int]
    checksums: Sequence[int]
    ends_s: float


class _Sender:
    """Sends what is lent to peers that show its token, a thread for each connection."""

    def __init__(self, pool: _Pool, listener: socket.socket, rdma: RdmaPlane | None) -> None:
        self._pool = pool
        self._rdma = rdma
        self._listener = listener
        self._changed = threading.Condition()
        self._lent: dict[bytes, _Lent] = {}
        self._messages: SimpleQueue[SendBlocks | SendNoMore] = SimpleQueue()
        self._newcomers: deque[socket.socket] = deque()
        """Connections that have shown no token yet, the oldest first."""
        self._known: set[socket.socket] = set()
        """Those that have."""
        # Apart from the messages: checksums of 16 MB take half a millisecond, and reads wait there.
        _start("flexcache-peer-lend", self._lend)
        _start("flexcache-peer-accept", self._accept)

    def take(self, message: SendBlocks | SendNoMore) -> None:
        """Send these blocks from now on, or no more. Never blocks."""
        self._messages.put(message)

    def _lend(self) -> None:
        while True:
            message = self._messages.get()
            lent = self._prepare(message) if isinstance(message, SendBlocks) else None
            with self._changed:
                if lent is not None:
                    self._lent[message.token] = lent
                else:
                    self._lent.pop(message.token, None)
                self._changed.notify_all()

    def _prepare(self, message: SendBlocks) -> _Lent | None:
        """Make the checksums; None if that took longer than the blocks are kept: one of them may be
        that of other bytes."""
        blocks = unpack_ids(message.blocks).tolist()
        checksums = [checksum(self._pool.pieces(block)) for block in blocks]
        is_late = time.monotonic() >= message.ends_s
        return None if is_late else _Lent(blocks, checksums, message.ends_s)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptors, say
                log_event(logger, logging.WARNING, "peer_not_accepted", error=str(error))
                time.sleep(_PROGRESS_S)
                continue
            with self._changed:
                # A peer shows its token at once. So strangers who hold connections lose them to it.
                while len(self._newcomers) >= _MAX_NEWCOMERS:
                    with contextlib.suppress(OSError):  # its thread closes it
                        self._newcomers.popleft().shutdown(socket.SHUT_RDWR)
                self._newcomers.append(connection)
            _start("flexcache-peer-send", self._serve, connection)

    def _admit(self, connection: socket.socket, token: bytes) -> _Lent | None:
        """Return what a connection may read by a token, and know it from then on."""
        with self._changed:
            self._changed.wait_for(lambda: token in self._lent, _TOKEN_PATIENCE_S)
            lent = self._lent.get(token)
            if lent is not None and connection in self._newcomers:
                if len(self._known) >= _MAX_CONNECTIONS:
                    return None
                self._newcomers.remove(connection)
                self._known.add(connection)
            return lent

    def _leave(self, connection: socket.socket) -> None:
        with self._changed:
            self._known.discard(connection)
            if connection in self._newcomers:  # else it was closed for a newer one
                self._newcomers.remove(connection)

    def _serve(self, connection: socket.socket) -> None:
        request = memoryview(bytearray(_REQUEST.size))
        # A connection stays for many reads: a new one costs a round trip and a slow start.
        try:
            with connection, contextlib.suppress(OSError):
                while True:
                    _set_patience(connection, _IDLE_S)
                    _receive(connection, [request])
                    _set_patience(connection, _PROGRESS_S)
                    if not self._send(connection, *_REQUEST.unpack(request)):
                        return
        finally:
            self._leave(connection)

    def _send(self, connection: socket.socket, token: bytes, wants_rdma: bool) -> bool:
        """Send what a token is for; whether the connection can be used on."""
        lent = self._admit(connection, token)
        if lent is None:
            connection.sendall(_HEADER.pack(_MAGIC, 0, self._pool.block_bytes))
            return False  # a guess costs a new connection
        rdma = self._rdma if wants_rdma else None
        if rdma is not None and rdma.begin(connection.getsockname()[0]):
            with rdma.shown.room(time.monotonic() + _ROOM_PATIENCE_S) as room:
                if room is not None:
                    return self._show(connection, token, lent, room, rdma.port)
        header = _HEADER.pack(_MAGIC, len(lent.blocks), self._pool.block_bytes)
        for block, expected in zip(lent.blocks, lent.checksums, strict=True):
            # Not for the reader, which has its own clock: what comes now would be for nothing.
            if not self._is_lent(token, lent):
                return False
            _send_all(connection, [header + _CHECKSUM.pack(expected), *self._pool.pieces(block)])
            header = b""
        return True

    def _is_lent(self, token: bytes, lent: _Lent) -> bool:
        return time.monotonic() < lent.ends_s and token in self._lent

    def _show(
        self, connection: socket.socket, token: bytes, lent: _Lent, room: memoryview, port: int
    ) -> bool:
        """Let Transfer Engine's peer read what a token is for, as `_send`."""
        header = _HEADER.pack(_MAGIC_RDMA, len(lent.blocks), self._pool.block_bytes)
        step = len(room) // self._pool.block_bytes
        for start in range(0, len(lent.blocks), step):
            if not self._is_lent(token, lent):
                return False
            blocks = lent.blocks[start : start + step]
            gather([piece for block in blocks for piece in self._pool.pieces(block)], room)
            checksums = map(_CHECKSUM.pack, lent.checksums[start : start + step])
            place = _PLACE.pack(len(blocks), port, address_of(room))
            _send_all(connection, [header + place + b"".join(checksums)])
            header = b""
            if not _has_read(connection, lent.ends_s):
                return False
        return True


def _has_read(connection: socket.socket, ends_s: float) -> bool:
    """Wait until a peer has read from its room, or will not: it is gone, or the loan is over."""
    while time.monotonic() < ends_s:
        try:
            return connection.recv(1) == _HAS_READ
        except BlockingIOError:  # nothing yet
            continue
        except OSError:  # we do not hear of it any more, but it may still read
            time.sleep(max(0.0, ends_s - time.monotonic()))
    return False


def _set_patience(connection: socket.socket, seconds: float) -> None:
    """Give up a call after so long. By the kernel: Python would poll before each call."""
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_all(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        count = connection.sendmsg(left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _receive(connection: socket.socket, parts: Parts, until_s: float | None = None) -> None:
    """Fill the parts.

    Raises:
        _Over: Some of it has not come by then.
        OSError: The connection is closed, or nothing comes.
    """
    for part in parts:
        while part:
            count = connection.recv_into(part, len(part), socket.MSG_WAITALL)
            # After each: what was there in time was kept for us. One look at the end would do for
            # that, but a peer that sends a byte now and then would hold us for ever.
            if until_s is not None and time.monotonic() >= until_s:
                raise _Over
            if count == 0:
                raise ConnectionError("the connection was closed")
            part = part[count:]


# -- what is read from peers ----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Read:
    """An op, and how much of it has arrived."""

    op_id: int
    names: BlockNames
    blocks: Sequence[int]
    until_s: float
    num_ok: int = 0


class _Missing(FlexCacheError):
    """The peer lends nothing of this: it has evicted it, or lends too much already."""


class _Over(FlexCacheError):
    """The loan was over before all had arrived."""


def connect_peer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, curve_keys: str | None,
    is_watched: bool = False,
) -> zmq.Socket[bytes]:  # fmt: skip
    """Connect to where a cache answers other hosts. To one that is not there nothing is sent.

    Args:
        is_watched: Whether the connection ends if it is cut, also while nothing is sent.

    Raises:
        ConfigError: The keys cannot be read.
    """
    line = context.socket(zmq.DEALER)
    line.linger = 0
    line.immediate = True
    line.ipv6 = "[" in address
    line.reconnect_ivl, line.reconnect_ivl_max = 200, 5000
    if is_watched:
        line.heartbeat_ivl, line.heartbeat_timeout = 1000, 3000
    try:
        if curve_keys is not None:
            secure_client(line, curve_keys)
        line.connect(address)
    except BaseException:
        line.close()  # else its context never ends
        raise
    return line


class _Link:
    """One thread's connections to one peer.

    Raises:
        ConfigError: The keys cannot be read.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, curve_keys: str | None,
        rdma: RdmaPlane | None,
    ) -> None:  # fmt: skip
        self._host, _ = split_tcp(name)
        self._rdma = rdma
        self.used_s = 0.0
        self._socket = connect_peer(context, name, curve_keys)
        self._socket.sndtimeo = int(1000 * _PROGRESS_S)
        self._data: socket.socket | None = None
        self._num_asked = 0
        self._decoder = msgspec.msgpack.Decoder(Loan)

    def close(self) -> None:
        self._socket.close()
        if self._data is not None:
            self._data.close()

    def read(self, op: _Read, pool: _Pool) -> None:
        """Read an op's blocks.

        Raises:
            _Missing, _Over: They are not to be had, or not all of them.
            OSError, zmq.ZMQError, msgspec.MsgspecError: The peer fails.
        """
        loan, ends_s = self._borrow(op)
        try:
            self._fetch(op, pool, loan, min(ends_s, op.until_s))
        except _Over:
            # What is read next has another connection: the rest of this one may still come.
            if self._data is not None:
                self._data.close()
            self._data = None
            raise
        finally:
            with contextlib.suppress(zmq.ZMQError):  # else it ends by itself
                self._socket.send(msgspec.msgpack.encode(GiveBack(loan.token)), zmq.NOBLOCK)

    def _borrow(self, op: _Read) -> tuple[Loan, float]:
        """Ask for a loan of the blocks; return it, and when it ends by our clock."""
        self._num_asked += 1
        names, number = op.names, self._num_asked
        keys = b"".join(names.keys)
        ask = AskLoan(number, names.root, keys, len(names.keys[0]), names.tail, names.first)
        asked_s = time.monotonic()  # before it is sent: the owner counts from after
        self._socket.send(msgspec.msgpack.encode(ask))
        until_s = min(asked_s + _PROGRESS_S, op.until_s)
        while self._socket.poll(max(0, int(1000 * (until_s - time.monotonic())))):
            loan = self._decoder.decode(self._socket.recv())
            if loan.request_id == number:
                if not loan.token:
                    raise _Missing
                return loan, asked_s + loan.seconds
        raise TimeoutError("it does not answer")

    def _fetch(self, op: _Read, pool: _Pool, loan: Loan, ends_s: float) -> None:
        """Read what was lent into the host pool."""
        magic, count, size = self._show(loan, ends_s)
        assert self._data is not None
        if (magic, count) == (_MAGIC, 0):
            raise _Over
        if (count, size) != (len(op.blocks), pool.block_bytes):
            raise ValueError(f"{count} blocks of {size} bytes, not {len(op.blocks)}")
        if magic == _MAGIC_RDMA and self._rdma is not None:
            self._fetch_shown(op, pool, self._rdma, ends_s)
            return
        if magic != _MAGIC:
            raise ValueError(f"it does not send blocks, but {magic!r}")
        given = memoryview(bytearray(_CHECKSUM.size))
        for block in op.blocks:
            pieces = pool.pieces(block)
            _receive(self._data, [given, *pieces], ends_s)
            # Of the bytes in place: nothing writes there after this thread.
            if checksum(pieces) != _CHECKSUM.unpack(given)[0]:
                raise ValueError("a block has another checksum")
            op.num_ok += 1

    def _fetch_shown(self, op: _Read, pool: _Pool, rdma: RdmaPlane, ends_s: float) -> None:
        """Read what was lent by Transfer Engine, and copy it into the host pool."""
        assert self._data is not None
        place = memoryview(bytearray(_PLACE.size))
        while op.num_ok < len(op.blocks):
            _receive(self._data, [place], ends_s)
            count, port, address = _PLACE.unpack(place)
            blocks = op.blocks[op.num_ok : op.num_ok + count]
            if not 0 < count == len(blocks):
                raise ValueError(f"{count} blocks at once")
            given = memoryview(bytearray(_CHECKSUM.size * count))
            _receive(self._data, [given], ends_s)
            num_bytes, until_s = count * pool.block_bytes, time.monotonic() + _PROGRESS_S
            try:
                with rdma.fetched(
                    self._host, port, address, num_bytes, min(until_s, ends_s)
                ) as memory:
                    if time.monotonic() >= ends_s:
                        raise _Over
                    self._data.sendall(_HAS_READ)
                    for block, (expected,), data in zip(
                        blocks, _CHECKSUM.iter_unpack(given),
                        cut(memory, [pool.block_bytes] * count), strict=True,
                    ):  # fmt: skip
                        # Of the copy: anyone may write where it came from. All of it counts, behind
                        # a first part without bytes.
                        if scatter_checked(data, [data[:0], *pool.pieces(block)]) != expected:
                            raise ValueError("a block has another checksum")
                        op.num_ok += 1
            except TransferError as error:
                if ends_s <= time.monotonic():  # it was given up for that
                    raise _Over from None
                rdma.avoid(self._host, str(error))
                raise

    def _show(self, loan: Loan, ends_s: float) -> tuple[bytes, int, int]:
        """Show a token, and return the header of what follows."""
        header = memoryview(bytearray(_HEADER.size))
        # One that lay idle may have been closed meanwhile: that says nothing of the peer.
        for is_used in (True, False):
            if self._data is None and is_used:
                continue
            if self._data is None:
                self._data = socket.create_connection((self._host, loan.port), _PROGRESS_S)
                _set_patience(self._data, _PROGRESS_S)
            try:
                wants_rdma = self._can_rdma(self._data)
                self._data.sendall(_REQUEST.pack(loan.token, wants_rdma))
                _receive(self._data, [header], ends_s)
                break
            except ConnectionError:
                if not is_used:
                    raise
                self._data.close()
                self._data = None
        magic, count, size = _HEADER.unpack(header)
        if wants_rdma and magic == _MAGIC and self._rdma is not None:
            self._rdma.note_tcp(self._host)
        return magic, count, size

    def _can_rdma(self, connection: socket.socket) -> bool:
        rdma = self._rdma
        if rdma is None or not rdma.can_reach(self._host):
            return False
        return rdma.begin(connection.getsockname()[0])


class _Reader:
    """Reads from peers, for one thread."""

    def __init__(self, pool: _Pool, curve_keys: str | None, rdma: RdmaPlane | None) -> None:
        self._pool = pool
        self._curve_keys = curve_keys
        self._rdma = rdma
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._links: dict[str, _Link] = {}

    def read(self, op: _Read) -> list[Answer]:
        """Read an op's blocks, up to the first that does not come."""
        name, now = op.names.peer, time.monotonic()
        for idle in [n for n, link in self._links.items() if now >= link.used_s + _IDLE_S]:
            self._links.pop(idle).close()  # of a peer that has left, say
        try:
            if name not in self._links:
                self._links[name] = _Link(self._context, name, self._curve_keys, self._rdma)
            self._links[name].used_s = now
            self._links[name].read(op, self._pool)
        except _Missing:
            return [Done(op.op_id, 0, f"{name} lends it not", bad_block=True)]
        except _Over:
            return [Done(op.op_id, op.num_ok, f"{name}: {_Over.__doc__}")]
        except Exception as error:
            # What is under way on the connections is of no use any more.
            if (link := self._links.pop(name, None)) is not None:
                link.close()  # its loan ends by its time
            reason = f"{name}: {str(error) or type(error).__name__}"
            return [PeerFailed(name, reason), Done(op.op_id, op.num_ok, reason)]
        return [Done(op.op_id, op.num_ok)]


class PeerService:
    """Threads that read and send; `filenos` are readable when there are answers.

    Args:
        segments: The mapped segments; they must outlive the service.
    """

    def __init__(self, config: PeerWorkerConfig, segments: Sequence[HostSegment]) -> None:
        # The server replaces a worker that misses an op's deadline: a slow peer must not cause it.
        self._patience_s = max(config.timeout_s / 2, config.timeout_s - _PROGRESS_S)
        self._pool = _Pool(segments, config.shard_bytes)
        self._sender: _Sender | None = None
        rdma = None
        if config.rdma_devices is not None:
            rdma = RdmaPlane(config.rdma_devices, max(config.room_bytes, self._pool.block_bytes))
        if config.listen_fd >= 0:
            self._sender = _Sender(self._pool, socket.socket(fileno=config.listen_fd), rdma)
        self._changed = threading.Condition()
        self._waiting: dict[int, _Read] = {}
        self._running: Counter[str] = Counter()
        """Ops by peer."""
        self._answers: deque[Answer] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for i in range(_READERS):
            reader = _Reader(self._pool, config.curve_keys, rdma)
            _start(f"flexcache-peer-{i}", self._read, reader)

    def filenos(self) -> list[int]:
        return [self._event]

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._waiting and not self._running.total() and not self._answers

    def take(self, message: Execute | Drop | SendBlocks | SendNoMore) -> None:
        """Start processing a message. Never blocks."""
        match message:
            case SendBlocks() | SendNoMore() if self._sender is not None:
                self._sender.take(message)
            case Execute(op_id):
                blocks, names = unpack_ids(message.dst).tolist(), message.names
                if names is None or not names.keys or len(names.keys) != len(blocks):
                    self._answer([Done(op_id, 0, error="malformed op")])
                    return
                until_s = time.monotonic() + self._patience_s  # includes waiting here
                with self._changed:
                    self._waiting[op_id] = _Read(op_id, names, blocks, until_s)
                    self._changed.notify()
            case Drop(op_id):  # one that runs goes on: it may be writing
                with self._changed:
                    dropped = self._waiting.pop(op_id, None)
                if dropped is not None:
                    self._answer([Done(op_id, 0)])

    def advance(self) -> list[Answer]:
        """Return the answers since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._changed:
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def _read(self, reader: _Reader) -> None:
        while True:
            with self._changed:
                while (op := self._next_op()) is None:
                    self._changed.wait()
                self._running[op.names.peer] += 1
            answers = reader.read(op)
            with self._changed:
                self._running[op.names.peer] -= 1
                self._running += Counter()  # without those of which none runs
                self._answer(answers)
                self._changed.notify()  # of its peer another may run

    def _next_op(self) -> _Read | None:
        """Take the next op out, the oldest first; a slow peer never has all threads."""
        for op_id, op in self._waiting.items():
            if self._running[op.names.peer] < _READERS - 1:
                return self._waiting.pop(op_id)
        return None

    def _answer(self, answers: Sequence[Answer]) -> None:
        with self._changed:
            self._answers.extend(answers)
            os.eventfd_write(self._event, 1)


def _start(name: str, target: object, *args: object) -> None:
    # Daemon threads: one in a call of the kernel must not keep the process alive.
    threading.Thread(target=target, args=args, name=name, daemon=True).start()  # type: ignore[arg-type]


def main() -> None:
    """Serve until a `Stop` message arrives or the parent closes its end of standard input."""
    config = start_worker_process(PeerWorkerConfig)
    service = PeerService(config, map_segments(config))
    plane = "tcp" if config.rdma_devices is None else "rdma"
    serve(config, plane, Execute | Drop | SendBlocks | SendNoMore, service)
    os._exit(0)  # its threads may be in a call of the kernel, and nothing is left to end


if __name__ == "__main__":
    main()
