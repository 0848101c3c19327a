"""The peer worker beside peers that a test plays: slow ones, broken ones, and some that lie."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from mutants import Fixtures, Mutant, check_seen

from flexcache.ids import OpKind
from flexcache.protocol.messages import AskLoan, FromPeer, GiveBack, Loan
from flexcache.server import peer_worker
from flexcache.server.peer_worker import PeerService, PeerWorkerConfig
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import checksum
from flexcache.transfer.messages import (
    BlockNames,
    Done,
    Drop,
    Execute,
    PeerFailed,
    SendBlocks,
    SendNoMore,
    pack_ids,
)

SHARDS = (5000, 3000)  # of a block: two ranks
BLOCK = sum(SHARDS)
NUM_BLOCKS = 8
PATIENCE_S = 30.0
HEADER = struct.Struct("<4sIQ")
CHECKSUM = struct.Struct("<Q")


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(BLOCK)


@dataclass
class Host:
    """A worker and its pool."""

    service: PeerService
    segments: list[HostSegment]
    port: int = 0

    def fill(self, block: int, data: bytes) -> None:
        start = 0
        for segment, size in zip(self.segments, SHARDS, strict=True):
            segment.block(block)[:size] = data[start : start + size]
            start += size

    def read(self, block: int) -> bytes:
        pairs = zip(self.segments, SHARDS, strict=True)
        return b"".join(bytes(segment.block(block)[:size]) for segment, size in pairs)

    def answers(self, count: int) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"only {found}"
            select.select(self.service.filenos(), [], [], left)
            found += self.service.advance()
        return found

    def load(self, peer: str, blocks: list[int], op_id: int = 1) -> None:
        keys = [b"key %12d" % block for block in blocks]
        names = BlockNames(b"r" * 16, 0, b"", keys, peer=peer)
        ids = pack_ids(np.array(blocks))
        self.service.take(Execute(op_id, OpKind.PEER2H, ids, ids, 1, names=names))


@contextmanager
def host(listens: bool = False, timeout_s: float = 3.0, **rdma: Any) -> Iterator[Host]:
    with ExitStack() as stack:
        segments = [
            stack.enter_context(closing(HostSegment.create(size, NUM_BLOCKS))) for size in SHARDS
        ]
        for segment in segments:
            segment.map()
        fd, port = -1, 0
        if listens:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            fd = listener.detach()
        config = PeerWorkerConfig(
            "", "", [], [], NUM_BLOCKS, "INFO", "text", shard_bytes=list(SHARDS), listen_fd=fd,
            curve_keys=None, timeout_s=timeout_s, **rdma,
        )  # fmt: skip
        yield Host(PeerService(config, segments), segments, port)


Send = Callable[[socket.socket, "Owner"], None]


@dataclass
class Owner:
    """A peer that lends what it is asked for, and sends it as the test says."""

    send: Send | None = None
    loan: Callable[[AskLoan, int], list[bytes]] | None = None
    seconds: float = 60.0
    name: str = ""
    asked: list[AskLoan] = field(default_factory=list)
    given_back: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    """What was shown on connections for blocks: tokens, and by which plane."""
    asked_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, router: zmq.Socket[bytes], listener: socket.socket) -> None:
        decoder = msgspec.msgpack.Decoder(FromPeer)
        port = listener.getsockname()[1]
        while not self.is_over.is_set():
            if not router.poll(20):
                continue
            sender, data = router.recv_multipart()
            message = decoder.decode(data)
            if isinstance(message, GiveBack):
                self.given_back.append(message.token)
            elif isinstance(message, AskLoan):
                self.asked_s = time.monotonic()
                self.asked.append(message)
                token = b"token %10d" % message.request_id
                answers = [msgspec.msgpack.encode(
                    Loan(message.request_id, token, port, self.seconds)
                )]  # fmt: skip
                if self.loan is not None:
                    answers = self.loan(message, port)
                for answer in answers:
                    router.send_multipart([sender, answer])
        router.close(linger=0)

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while len(request := connection.recv(17, socket.MSG_WAITALL)) == 17:
                    self.requests.append(request)
                    (self.send or send_well)(connection, self)
            except OSError:
                return


def frame(block: int, data: bytes | None = None) -> bytes:
    """A block as it is sent; with other bytes than its checksum says, if they are given."""
    right = content(block)
    return CHECKSUM.pack(checksum([memoryview(right)])) + (right if data is None else data)


def header(owner: Owner, count: int | None = None, size: int = BLOCK) -> bytes:
    num_asked = len(owner.asked[-1].keys) // owner.asked[-1].key_bytes
    return HEADER.pack(b"FCp1", num_asked if count is None else count, size)


def send_well(connection: socket.socket, owner: Owner) -> None:
    ask = owner.asked[-1]
    keys = [ask.keys[i : i + 16] for i in range(0, len(ask.keys), 16)]
    connection.sendall(header(owner) + b"".join(frame(int(key[4:])) for key in keys))


@contextmanager
def owner(**how: Any) -> Iterator[Owner]:
    played = Owner(**how)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    played.name = f"tcp://127.0.0.1:{port}"
    listener = socket.create_server(("127.0.0.1", 0))
    threads = [
        threading.Thread(target=played.run, args=(router, listener), daemon=True),
        threading.Thread(target=played.accept, args=(listener,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield played
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        played.is_over.set()
        threads[0].join(PATIENCE_S)
        context.term()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- reading -------------------------------------------------------------------------------------


def test_what_a_peer_lends_is_read_and_given_back() -> None:
    with host() as reader, owner() as peer:
        for op_id in (1, 2):
            reader.load(peer.name, [3, 1, 4], op_id)
            assert reader.answers(1) == [Done(op_id, 3)]
            for block in (3, 1, 4):
                assert reader.read(block) == content(block)
                reader.fill(block, bytes(BLOCK))
        until(lambda: len(peer.given_back) == 2)


def once(connection: socket.socket, owner: Owner) -> None:
    send_well(connection, owner)
    connection.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_was_closed_while_it_lay_idle_is_no_failure() -> None:
    with host() as reader, owner(send=once) as peer:
        for op_id in range(1, 7):  # of three threads
            reader.load(peer.name, [3, 1], op_id)
            assert reader.answers(1) == [Done(op_id, 2)]


def lent_not(ask: AskLoan, port: int) -> list[bytes]:
    return [msgspec.msgpack.encode(Loan(ask.request_id))]


def test_what_a_peer_does_not_lend_is_a_miss_and_no_failure() -> None:
    with host() as reader, owner(loan=lent_not) as peer:
        reader.load(peer.name, [0, 1])
        (done,) = reader.answers(1)
        assert (done.num_ok, done.bad_block) == (0, True)


def wrong_bytes(connection: socket.socket, owner: Owner) -> None:
    wrong = bytearray(content(1))
    wrong[-1] ^= 1  # of the last rank
    connection.sendall(header(owner) + frame(0) + frame(1, bytes(wrong)) + frame(2))


def test_bytes_that_have_another_checksum_are_not_taken() -> None:
    with host() as reader, owner(send=wrong_bytes) as peer:
        reader.load(peer.name, [0, 1, 2])
        failed, done = reader.answers(2)
        assert failed == PeerFailed(peer.name, f"{peer.name}: a block has another checksum")
        assert done.num_ok == 1
        assert reader.read(0) == content(0)


def too_late(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(header(owner) + frame(0))
    time.sleep(owner.seconds)
    connection.sendall(frame(1) + frame(2))


def test_what_comes_after_the_end_of_the_loan_is_not_taken() -> None:
    with host() as reader, owner(send=too_late, seconds=0.7) as peer:
        reader.load(peer.name, [0, 1, 2])
        answers = reader.answers(1)
        assert [each.num_ok for each in answers] == [1]  # the peer has done nothing wrong
        assert not answers[0].bad_block
        # The rest of that connection is of no use for what is read next.
        peer.send, peer.seconds = None, 60.0
        reader.load(peer.name, [5])
        assert reader.answers(1) == [Done(1, 1)]
        assert peer.num_connections == 2


def other_count(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(header(owner, count=9) + frame(0))


def other_size(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(header(owner, size=BLOCK // 2) + frame(0))


def no_header(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40)


def half(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(header(owner) + frame(0) + frame(1)[: BLOCK // 2])
    connection.shutdown(socket.SHUT_RDWR)


def silence(connection: socket.socket, owner: Owner) -> None:
    connection.sendall(header(owner) + frame(0))
    connection.recv(1)


@pytest.mark.parametrize(
    ("send", "num_ok"), [(other_count, 0), (other_size, 0), (no_header, 0), (half, 1), (silence, 1)]
)
def test_a_peer_that_does_not_send_as_it_should_is_left(send: Send, num_ok: int) -> None:
    with host() as reader, owner(send=send) as peer:
        reader.load(peer.name, [0, 1, 2])
        failed, done = reader.answers(2)
        assert isinstance(failed, PeerFailed)
        assert done.num_ok == num_ok
        assert not done.bad_block
        peer.send = None  # it is well again
        reader.load(peer.name, [5])
        assert reader.answers(1) == [Done(1, 1)]


def drip(connection: socket.socket, owner: Owner) -> None:
    for byte in header(owner) + frame(0):
        connection.sendall(bytes([byte]))
        time.sleep(0.2)


def test_a_peer_that_is_very_slow_costs_others_nothing() -> None:
    with host(timeout_s=2.5) as reader, owner(send=drip) as slow, owner() as fast:
        for op_id in (1, 2, 3, 4):
            reader.load(slow.name, [0], op_id)
        reader.load(fast.name, [1], 5)
        assert reader.answers(1) == [Done(5, 1)]
        late = [each for each in reader.answers(4) if isinstance(each, Done)]
        assert all(each.num_ok == 0 for each in late)


def mumble(ask: AskLoan, port: int) -> list[bytes]:
    return [b"\xc1 no message"]


def silent(ask: AskLoan, port: int) -> list[bytes]:
    return []


def wrong_port(ask: AskLoan, port: int) -> list[bytes]:
    return [msgspec.msgpack.encode(Loan(ask.request_id, b"t" * 16, 1, 60.0))]


@pytest.mark.parametrize("loan", [mumble, silent, wrong_port])
def test_a_peer_that_does_not_answer_as_it_should_is_left(loan: Any) -> None:
    with host() as reader, owner(loan=loan) as peer:
        reader.load(peer.name, [0])
        failed, done = reader.answers(2)
        assert isinstance(failed, PeerFailed)
        assert done.num_ok == 0


def replayed(ask: AskLoan, port: int) -> list[bytes]:
    loans = [
        Loan(ask.request_id - 1, b"a former token..", port, 60.0),
        Loan(ask.request_id + 1, b"another token...", port, 60.0),
        Loan(ask.request_id, b"the right token.", port, 60.0),
    ]
    return [msgspec.msgpack.encode(loan) for loan in loans]


def test_answers_to_other_questions_are_ignored() -> None:
    with host() as reader, owner(loan=replayed) as peer:
        reader.load(peer.name, [0, 1])
        assert reader.answers(1) == [Done(1, 2)]
        until(lambda: peer.given_back == [b"the right token."])


def test_an_op_that_waits_can_be_dropped_and_one_that_runs_goes_on() -> None:
    may_send = threading.Event()

    def later(connection: socket.socket, owner: Owner) -> None:
        may_send.wait(PATIENCE_S)
        send_well(connection, owner)

    with host(timeout_s=PATIENCE_S) as reader, owner(send=later) as peer:
        for op_id in (1, 2, 3):  # two run: one peer never has all threads
            reader.load(peer.name, [op_id], op_id)
        until(lambda: len(peer.asked) == 2)
        for op_id in (1, 2, 3):
            reader.service.take(Drop(op_id))
        assert reader.answers(1) == [Done(3, 0)]
        assert not reader.service.is_idle


# -- sending -------------------------------------------------------------------------------------

TOKEN = b"sixteen bytes..."
BY_TCP, BY_RDMA = b"\0", b"\1"


def lend(sender: Host, blocks: list[int], seconds: float = 60.0, token: bytes = TOKEN) -> None:
    ends_s = time.monotonic() + seconds
    sender.service.take(SendBlocks(token, pack_ids(np.array(blocks)), ends_s))


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def fetch(connection: socket.socket, count: int, token: bytes = TOKEN) -> bytes:
    connection.sendall(token + BY_TCP)
    return receive(connection, HEADER.size + count * (CHECKSUM.size + BLOCK))


@contextmanager
def sending() -> Iterator[tuple[Host, socket.socket]]:
    with host(listens=True) as sender:
        for block in range(NUM_BLOCKS):
            sender.fill(block, content(block))
        with socket.create_connection(("127.0.0.1", sender.port), PATIENCE_S) as connection:
            yield sender, connection


def test_what_is_lent_is_sent_to_who_shows_the_token() -> None:
    with sending() as (sender, connection):
        connection.sendall(TOKEN + BY_TCP)  # it may come before the server's message
        lend(sender, [2, 0])
        expected = HEADER.pack(b"FCp1", 2, BLOCK) + frame(2) + frame(0)
        assert receive(connection, len(expected)) == expected
        assert fetch(connection, 2) == expected  # also once more


@pytest.mark.parametrize("how", ["never lent", "given back", "over"])
def test_nothing_is_sent_for_another_token(how: str) -> None:
    with sending() as (sender, connection):
        lend(sender, [2], 0.0 if how == "over" else 60.0)
        if how == "given back":
            assert len(fetch(connection, 1)) > BLOCK
            sender.service.take(SendNoMore(TOKEN))
            lend(sender, [3], token=b"the next message")  # once that is known, so is the one before
            assert len(fetch(connection, 1, b"the next message")) > BLOCK
        token = b"another token..." if how == "never lent" else TOKEN
        assert fetch(connection, 1, token) == HEADER.pack(b"FCp1", 0, BLOCK)
        assert connection.recv(1) == b""  # a guess costs a new connection


def test_blocks_that_are_overwritten_have_another_checksum() -> None:
    with sending() as (sender, connection):
        lend(sender, [2])
        assert fetch(connection, 1)[HEADER.size :] == frame(2)
        sender.fill(2, content(3))
        assert fetch(connection, 1)[HEADER.size :] == frame(2, content(3))


def test_strangers_who_hold_connections_keep_no_peer_out() -> None:
    with sending() as (sender, known), ExitStack() as stack:
        lend(sender, [2])
        whole = HEADER.size + CHECKSUM.size + BLOCK
        assert len(fetch(known, 1)) == whole

        def connect() -> socket.socket:
            place = ("127.0.0.1", sender.port)
            return stack.enter_context(socket.create_connection(place, PATIENCE_S))

        strangers = [connect() for _ in range(80)]
        until(lambda: len(select.select(strangers, [], [], 0)[0]) == 16)  # those are closed
        assert len(fetch(connect(), 1)) == whole
        assert len(fetch(known, 1)) == whole


# -- faults that a test must see -----------------------------------------------------------------

MUTANTS = [
    Mutant("no checksum", peer_worker._Link, "_fetch",
           "if checksum(pieces) != _CHECKSUM.unpack(given)[0]:", "if False:",
           test_bytes_that_have_another_checksum_are_not_taken),
    Mutant("no clock", peer_worker, "_receive",
           "if until_s is not None and time.monotonic() >= until_s:", "if False:",
           test_what_comes_after_the_end_of_the_loan_is_not_taken),
    Mutant("the clock starts with the answer", peer_worker._Link, "_borrow",
           "return loan, asked_s + loan.seconds", "return loan, time.monotonic() + 60",
           test_what_comes_after_the_end_of_the_loan_is_not_taken),
    Mutant("a loan is never given back", peer_worker._Link, "read",
           "self._socket.send(msgspec.msgpack.encode(GiveBack(loan.token)), zmq.NOBLOCK)", "pass",
           test_what_a_peer_lends_is_read_and_given_back),
    Mutant("a former loan is taken", peer_worker._Link, "_borrow",
           "if loan.request_id == number:", "if True:",
           test_answers_to_other_questions_are_ignored),
    Mutant("what is over is sent", peer_worker._Sender, "_prepare",
           "is_late = time.monotonic() >= message.ends_s", "is_late = False",
           test_nothing_is_sent_for_another_token, ("over",)),
]  # fmt: skip


@contextmanager
def nothing(patch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    yield {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_peer_worker.PATIENCE_S", 2.0)
    check_seen(mutant, nothing, monkeypatch)
