"""The server's end of the Unix sockets for calls, beside its zmq socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from flexcache.protocol.call_stream import CallReader, pack_call
from flexcache.server.call_sockets import ClientSocket
from flexcache.server.router_socket import Sent

WAIT_S = 60.0


class Server:
    """A socket for clients, at a path and at an address of this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = ClientSocket(self.context)
        self.socket.zmq_socket.bind("inproc://server")
        self.socket.listen(path)

    def connect(self, identity: bytes) -> socket.socket:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(WAIT_S)
        caller.connect(self.path)
        caller.sendall(pack_call(identity))
        return caller

    def next(self) -> list[bytes]:
        """Return the next message, with its sender."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if (frames := self.socket.receive()) is not None:
                return frames
        raise AssertionError("nothing came")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(str(tmp_path / "calls"))
    yield server
    server.close()


def is_hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_call_comes_with_its_sender_and_its_data_and_is_answered(server: Server) -> None:
    with server.connect(b"a") as caller, server.connect(b"b") as other:
        caller.sendall(pack_call(b"call", b"data") + b"data")
        assert server.next() == [b"a", b"call", b"data"]
        other.sendall(pack_call(b"empty", b""))
        assert server.next() == [b"b", b"empty", b""]
        assert server.socket.send(b"a", b"answer") is Sent.QUEUED
        assert CallReader().read(caller.recv(100)) == [[b"answer"]]


@pytest.mark.parametrize("sent", [b"\xff" * 8, pack_call(b"") + pack_call(b"call")])
def test_what_is_no_call_ends_one_connection_and_no_other(server: Server, sent: bytes) -> None:
    with server.connect(b"good") as good, socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(WAIT_S)
        bad.connect(server.path)
        bad.sendall(sent)
        good.sendall(pack_call(b"call"))
        assert server.next() == [b"good", b"call"]
        assert server.socket.receive() is None
        assert is_hung_up(bad)


def test_an_identity_belongs_to_whoever_had_it_first_until_that_one_leaves(server: Server) -> None:
    with server.connect(b"a") as first:
        first.sendall(pack_call(b"first"))
        assert server.next() == [b"a", b"first"]
        with server.connect(b"a") as second:
            second.sendall(pack_call(b"second"))
            assert server.socket.receive() is None
            assert server.socket.receive() is None
            assert is_hung_up(second)
    while server.socket.send(b"a", b"answer") is not Sent.GONE:
        assert server.socket.receive() is None
    with server.connect(b"a") as third:
        third.sendall(pack_call(b"third"))
        assert server.next() == [b"a", b"third"]


def test_a_long_answer_arrives_whole_though_its_reader_is_late(server: Server) -> None:
    answer = bytes(range(256)) * 16_384
    with server.connect(b"a") as caller:
        caller.sendall(pack_call(b"call"))
        server.next()
        assert server.socket.send(b"a", answer) is Sent.QUEUED
        assert server.socket.send(b"a", b"the end") is Sent.QUEUED
        reader, read = CallReader(), []
        while len(read) < 2:
            server.socket.receive()
            read += reader.read(caller.recv(1 << 20))
        assert read == [[answer], [b"the end"]]
        assert not server.socket.has_message()


def test_a_caller_that_reads_no_answers_is_hung_up_on(server: Server) -> None:
    with server.connect(b"a") as caller:
        caller.sendall(pack_call(b"call"))
        server.next()
        sent = [server.socket.send(b"a", bytes(8 << 20)) for _ in range(4)]
    assert sent[0] is Sent.QUEUED
    assert Sent.UNREAD in sent


def test_neither_calls_nor_other_messages_wait_for_a_flood_of_the_other_kind(
    server: Server,
) -> None:
    with server.connect(b"a") as caller, server.context.socket(zmq.DEALER) as peer:
        peer.identity = b"peer"
        peer.connect("inproc://server")
        for _ in range(8):
            caller.sendall(pack_call(b"call"))
            peer.send(b"message")
        assert server.next() and server.socket.zmq_socket.poll(WAIT_S * 1000)
        assert {server.next()[0] for _ in range(3)} == {b"a", b"peer"}
        assert server.socket.send(b"peer", b"answer") is Sent.QUEUED
        assert peer.recv() == b"answer"
