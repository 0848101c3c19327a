"""Blocks that peers read by Transfer Engine, here over TCP; owners are played by bare engines."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
from mutants import Fixtures, Mutant, check_seen
from stores import missing
from test_peer_worker import (
    BLOCK,
    BY_RDMA,
    CHECKSUM,
    HEADER,
    NUM_BLOCKS,
    PATIENCE_S,
    TOKEN,
    Host,
    Owner,
    content,
    frame,
    host,
    lend,
    owner,
    receive,
    send_well,
    until,
)

from flexcache.protocol.messages import AskLoan, Loan
from flexcache.server import peer_worker
from flexcache.server.peer_rdma import RdmaPlane, TransferError
from flexcache.storage.pieces import address_of
from flexcache.transfer.messages import Done, PeerFailed, SendNoMore

pytestmark = pytest.mark.skipif(bool(missing("mooncake.engine")), reason="Mooncake is missing")

ROOM = 3 * BLOCK
PLACE_BYTES = 16
OWNER = """
import mmap, sys
import numpy
from mooncake.engine import TransferEngine
engine, memory = TransferEngine(), mmap.mmap(-1, 1 << 16)
memory[:] = b"x" * len(memory)
address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(address, len(memory)) == 0
print("at", engine.get_rpc_port(), address, flush=True)
sys.stdin.read()
"""


class Bare:
    """A bare Transfer Engine, with memory of its own."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self.memory = memoryview(mmap.mmap(-1, 1 << 16))
        self.address = address_of(self.memory)
        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(self.address, len(self.memory)) == 0
        self.port: int = self._engine.get_rpc_port()

    def read(self, port: int, address: int, size: int) -> bytes | None:
        call = self._engine.transfer_sync_read
        is_read = call(f"127.0.0.1:{port}", self.address, address, size) == 0
        return bytes(self.memory[:size]) if is_read else None

    def overwrite(self, port: int, address: int, size: int) -> bool:
        self.memory[:size] = b"\xee" * size
        call = self._engine.transfer_sync_write
        return bool(call(f"127.0.0.1:{port}", self.address, address, size) == 0)


@pytest.fixture(scope="module")
def bare() -> Bare:
    return Bare()


def place(bare: Bare, blocks: list[int], data: bytes | None = None, count: int = 0) -> bytes:
    """Show blocks; with other bytes than their checksums say, if they are given."""
    whole = b"".join(map(content, blocks)) if data is None else data
    bare.memory[: len(whole)] = whole
    checksums = b"".join(frame(block)[: CHECKSUM.size] for block in blocks)
    where = [(count or len(blocks)).to_bytes(4, "little"), bare.port.to_bytes(4, "little")]
    return b"".join(where) + bare.address.to_bytes(8, "little") + checksums


def shown(owner: Owner) -> bytes:
    num_asked = len(owner.asked[-1].keys) // owner.asked[-1].key_bytes
    return HEADER.pack(b"FCr1", num_asked, BLOCK)


# -- two workers ---------------------------------------------------------------------------------


@contextmanager
def pair(of_reader: str | None, of_owner: str | None) -> Iterator[tuple[Host, Host, str]]:
    """A reader, an owner whose server the test plays, and the owner's name."""
    with ExitStack() as stack:
        reader = stack.enter_context(host(rdma_devices=of_reader, room_bytes=ROOM))
        sender = stack.enter_context(host(listens=True, rdma_devices=of_owner, room_bytes=ROOM))
        for block in range(NUM_BLOCKS):
            sender.fill(block, content(block))

        def loan(ask: AskLoan, port: int) -> list[bytes]:
            keys = [ask.keys[i : i + 16] for i in range(0, len(ask.keys), 16)]
            token = b"token %10d" % ask.request_id
            lend(sender, [int(key[4:]) for key in keys], token=token)
            return [msgspec.msgpack.encode(Loan(ask.request_id, token, sender.port, 60.0))]

        yield reader, sender, stack.enter_context(owner(loan=loan)).name


@pytest.mark.parametrize("planes", [("", ""), ("", None), (None, "")])
def test_blocks_arrive_by_the_plane_that_both_have(
    planes: tuple[str | None, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pair(*planes) as (reader, _, name):
        for op_id in (1, 2):
            reader.load(name, [3, 1, 4, 0, 5, 2, 7], op_id)  # more than a room has
            assert reader.answers(1) == [Done(op_id, 7)]
            for block in (3, 1, 4, 0, 5, 2, 7):
                assert reader.read(block) == content(block)
                reader.fill(block, bytes(BLOCK))
        events = [record.getMessage().split()[0] for record in caplog.records]
        assert events.count("peer_rdma_began") == {("", ""): 2}.get(planes, int(planes[0] == ""))
        assert events.count("peer_read_by_tcp") == int(planes == ("", None))


# -- reading -------------------------------------------------------------------------------------


@contextmanager
def reading(send: Any, bare: Bare, **how: Any) -> Iterator[tuple[Host, Owner]]:
    def send_by_plane(connection: socket.socket, played: Owner) -> None:
        if played.requests[-1][16:] == BY_RDMA:
            send(connection, played, bare)
        else:
            send_well(connection, played)

    with host(rdma_devices="", room_bytes=ROOM) as reader, owner(send=send_by_plane, **how) as peer:
        yield reader, peer


def wrong_bytes(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    wrong = bytearray(content(0) + content(1))
    wrong[-1] ^= 1
    connection.sendall(shown(owner) + place(bare, [0, 1], bytes(wrong)))


def test_copies_that_have_another_checksum_are_not_taken(bare: Bare) -> None:
    with reading(wrong_bytes, bare) as (reader, peer):
        reader.load(peer.name, [0, 1])
        failed, done = reader.answers(2)
        assert failed == PeerFailed(peer.name, f"{peer.name}: a block has another checksum")
        assert done.num_ok == 1
        assert reader.read(0) == content(0)


def too_late(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + place(bare, [0]))
    assert connection.recv(1) == b"."
    real_time, after = time.monotonic, owner.asked_s + owner.seconds
    until(lambda: real_time() >= after)
    connection.sendall(place(bare, [1, 2]))


def test_what_is_read_after_the_end_of_the_loan_is_not_taken(bare: Bare) -> None:
    with reading(too_late, bare, seconds=0.7) as (reader, peer):
        reader.load(peer.name, [0, 1, 2])
        answers = reader.answers(1)
        assert [each.num_ok for each in answers] == [1]  # the peer has done nothing wrong


def late_transfer(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + place(bare, [0]))


def test_a_transfer_that_ends_after_the_loan_is_not_taken(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(late_transfer, bare, seconds=0.5) as (reader, peer):
        original = RdmaPlane._transfer

        def slow(plane: RdmaPlane, *arguments: Any) -> bool:
            is_read = original(plane, *arguments)
            until(lambda: time.monotonic() >= peer.asked_s + peer.seconds)
            return is_read

        monkeypatch.setattr(RdmaPlane, "_transfer", slow)
        # Also if it is not given up before.
        fetched = RdmaPlane.fetched
        monkeypatch.setattr(
            RdmaPlane, "fetched", lambda plane, *a: fetched(plane, *a[:-1], a[-1] + PATIENCE_S)
        )
        reader.load(peer.name, [0])
        answers = reader.answers(1)
        assert [each.num_ok for each in answers] == [0]


def nowhere(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    whole = bytearray(place(bare, [0, 1]))
    whole[8:16] = (bare.address + (1 << 30)).to_bytes(8, "little")
    connection.sendall(shown(owner) + whole)


def no_engine(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    whole = bytearray(place(bare, [0, 1]))
    whole[4:8] = (1).to_bytes(4, "little")
    connection.sendall(shown(owner) + whole)


@pytest.mark.parametrize("send", [nowhere, no_engine])
def test_a_host_that_transfer_engine_cannot_read_is_read_by_tcp(send: Any, bare: Bare) -> None:
    with reading(send, bare) as (reader, peer):
        reader.load(peer.name, [0, 1])
        failed, done = reader.answers(2)
        assert isinstance(failed, PeerFailed)
        assert done.num_ok == 0
        reader.load(peer.name, [0, 1], 2)
        assert reader.answers(1) == [Done(2, 2)]
        assert [request[16:] for request in peer.requests] == [BY_RDMA, b"\0"]


def none_at_once(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + bytes(PLACE_BYTES))


def too_many(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + place(bare, [0, 1], count=1 << 31))


def too_large(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + place(bare, [0, 1, 2, 3]))


def half(connection: socket.socket, owner: Owner, bare: Bare) -> None:
    connection.sendall(shown(owner) + place(bare, [0, 1])[:20])
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("send", [none_at_once, too_many, too_large, half])
def test_a_peer_that_shows_nonsense_is_left(send: Any, bare: Bare) -> None:
    with reading(send, bare) as (reader, peer):
        reader.load(peer.name, [0, 1, 2, 3] if send is too_large else [0, 1])
        failed, done = reader.answers(2)
        assert isinstance(failed, PeerFailed)
        assert done.num_ok == 0


@contextmanager
def engine_process() -> Iterator[tuple[int, int, int]]:
    """A bare engine in a process: its pid, port, and the address of its memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline().split())[:1] != [b"at"]:
            assert line, "it has ended"
        yield process.pid, int(line[1]), int(line[2])
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_engine_costs_a_room_until_it_ends_and_all_go_by_tcp_meanwhile(
    bare: Bare,
) -> None:
    plane = RdmaPlane("", BLOCK)
    assert plane.begin("127.0.0.1")

    def fetch(port: int, address: int, patience_s: float) -> bytes:
        until_s = time.monotonic() + patience_s
        with plane.fetched("127.0.0.1", port, address, BLOCK, until_s) as memory:
            return bytes(memory)

    bare.memory[:BLOCK] = content(1)
    with engine_process() as (pid, port, address):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(8):
            with pytest.raises(TransferError, match="does not return"):
                fetch(port, address, 0.05)
        with pytest.raises(TransferError, match="no bounce memory"):
            fetch(bare.port, bare.address, 0.05)
        assert not plane.can_reach("10.0.0.1")
    until(lambda: plane.can_reach("10.0.0.1"))
    assert fetch(bare.port, bare.address, PATIENCE_S) == content(1)


# -- showing -------------------------------------------------------------------------------------


@contextmanager
def showing() -> Iterator[tuple[Host, Any]]:
    """An owner, and what connects to it: its connection, header, and the place it shows."""
    with host(listens=True, rdma_devices="", room_bytes=ROOM) as sender, ExitStack() as stack:
        for block in range(NUM_BLOCKS):
            sender.fill(block, content(block))

        def ask(token: bytes = TOKEN) -> tuple[socket.socket, bytes, tuple[int, int, int]]:
            there = ("127.0.0.1", sender.port)
            connection = stack.enter_context(socket.create_connection(there, PATIENCE_S))
            connection.sendall(token + BY_RDMA)
            header = receive(connection, HEADER.size)
            is_shown = header[:4] == b"FCr1"
            return connection, header, read_place(connection) if is_shown else (0, 0, 0)

        yield sender, ask


def read_place(connection: socket.socket) -> tuple[int, int, int]:
    """Return number of blocks, port and address of what is shown next."""
    data = receive(connection, PLACE_BYTES)
    count = int.from_bytes(data[:4], "little")
    receive(connection, count * CHECKSUM.size)
    return count, int.from_bytes(data[4:8], "little"), int.from_bytes(data[8:], "little")


def test_a_stranger_reads_no_pool_and_changes_nothing_that_is_served(bare: Bare) -> None:
    with showing() as (sender, ask):
        lend(sender, [2, 0, 1, 3])
        connection, header, (count, port, address) = ask()
        assert (header, count) == (HEADER.pack(b"FCr1", 4, BLOCK), 3)
        size = 3 * BLOCK
        right = content(2) + content(0) + content(1)
        assert bare.read(port, address, size) == right
        assert bare.overwrite(port, address, size)
        assert bare.read(port, address, size) == b"\xee" * size
        pool = sender.segments[0].address
        assert bare.read(port, pool, 4096) is None
        assert not bare.overwrite(port, pool, 4096)
        connection.sendall(b".")
        assert read_place(connection) == (1, port, address)
        assert bare.read(port, address, BLOCK) == content(3)
        connection.sendall(b".")
        lend(sender, [2, 0, 1], token=b"another token...")
        connection.sendall(b"another token..." + BY_RDMA)
        assert receive(connection, HEADER.size) == HEADER.pack(b"FCr1", 3, BLOCK)
        assert bare.read(port, read_place(connection)[2], size) == right
        assert sender.read(2) == content(2)


def test_a_room_is_used_again_once_it_is_read_or_its_reader_gone() -> None:
    with showing() as (sender, ask):
        lend(sender, [2])
        held = [ask() for _ in range(8)]
        places = [where for _, _, where in held]
        assert len(set(places)) == 8
        # Without a room blocks go by TCP.
        assert ask()[1] == HEADER.pack(b"FCp1", 1, BLOCK)
        held[3][0].sendall(b".")
        until(lambda: ask()[2] == places[3])
        held[5][0].close()
        until(lambda: ask()[2] == places[5])


def test_a_room_is_kept_for_a_silent_reader_until_the_loan_is_over() -> None:
    with showing() as (sender, ask):
        ends_s = time.monotonic() + 2.5
        lend(sender, [2], 2.5)
        for _ in range(8):
            assert ask()[2] != (0, 0, 0)
        lend(sender, [2], token=b"another token...")
        while ask(b"another token...")[2] == (0, 0, 0):
            assert time.monotonic() < ends_s + PATIENCE_S
        assert time.monotonic() >= ends_s


def test_nothing_is_shown_of_what_was_given_back(bare: Bare) -> None:
    with showing() as (sender, ask):
        lend(sender, [0, 1, 2, 3])
        connection, _, _ = ask()
        sender.service.take(SendNoMore(TOKEN))
        until(lambda: ask()[1] == HEADER.pack(b"FCp1", 0, BLOCK))
        connection.sendall(b".")
        assert connection.recv(1) == b""


# -- faults that a test must see -----------------------------------------------------------------

MUTANTS = [
    Mutant("no checksum", peer_worker._Link, "_fetch_shown",
           "if scatter_checked(data, [data[:0], *pool.pieces(block)]) != expected:",
           "if scatter_checked(data, [data[:0], *pool.pieces(block)]) is None:",
           test_copies_that_have_another_checksum_are_not_taken),
    Mutant("the checksum of what anyone may write", peer_worker._Link, "_fetch_shown",
           "if scatter_checked(data, [data[:0], *pool.pieces(block)]) != expected:",
           "if scatter_checked(data, pool.pieces(block)) == expected:",
           test_copies_that_have_another_checksum_are_not_taken),
    Mutant("no clock", peer_worker._Link, "_fetch_shown",
           "if time.monotonic() >= ends_s:", "if False:",
           test_a_transfer_that_ends_after_the_loan_is_not_taken),
    Mutant("a room is used while a transfer may land", RdmaPlane, "fetched",
           "rest = stack.pop_all()", "stack.close(); rest = stack",
           test_a_stopped_engine_costs_a_room_until_it_ends_and_all_go_by_tcp_meanwhile),
    Mutant("a room is used while a silent reader may read it", peer_worker, "_has_read",
           "continue", "return False",
           test_a_room_is_kept_for_a_silent_reader_until_the_loan_is_over),
    Mutant("what is over is shown", peer_worker._Sender, "_show",
           "if not self._is_lent(token, lent):", "if False:",
           test_nothing_is_shown_of_what_was_given_back),
]  # fmt: skip


@contextmanager
def with_bare(patch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    yield {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_seen(mutant: Mutant, bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_peer_worker.PATIENCE_S", 2.0)
    check_seen(mutant, with_bare, monkeypatch, bare=bare)
