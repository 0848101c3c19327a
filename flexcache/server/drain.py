"""Drain: hands what a host has in DRAM to a peer before the host goes. Both sides.

    the host that goes (Drain)                     the peer (Takeovers)
      |-- FindBlocks, as a sign of life -----------> |
      |<- FoundBlocks -------------------------------|
      |-- TakeBlocks: keys, age; a few at a time --> |-- reads what it lacks, as any PEER2H
      |<- TookBlocks: what it has now ---------------|

Nothing is written to the peer: it reads, from the address by which it knows this host. What it has
no room for is left. If either side dies the other one forgets the drain; loans end by their time.

Used by the event loop's thread; `receive` and what changes `progress` under the server's lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import zmq

from flexcache.cache.drain import LONGEST_AGE_S, MAX_KEYS, HotBlocks, Portion
from flexcache.cache.peers import LENT_SHARE
from flexcache.ids import MAX_KEY_BYTES, ROOT_BYTES, BlockKey, RootId
from flexcache.protocol.messages import FindBlocks, FoundBlocks, TakeBlocks, TookBlocks
from flexcache.server.cache import ServedCache
from flexcache.server.peer_worker import connect_peer
from flexcache.server.reactor import Reactor, UnreadableError, read_message
from flexcache.stats import LoanStats
from flexcache.tasks.engine import KVTaskEngine, Takeover
from flexcache.tasks.instructions import PEER

PORTION_BYTES = 32e6
_MAX_OPEN = 4  # enough that one is read while others are asked for
_PING_S = 0.5
_SILENCE_S = 5.0
"""A peer that says nothing for this long, not even that it lives, is gone."""
_END_PATIENCE_S = 1.0  # for what is being read when the time is up
_MAX_WAITING = 64
_MAX_WAITING_OF_ONE = 8
_POLL_S = 0.05  # a lease that waits for another one ends without a message
_DECODER = msgspec.msgpack.Decoder(FoundBlocks | TookBlocks)

DrainState = Literal["running", "done", "time", "bytes", "stopped", "failed"]


class DrainProgress(msgspec.Struct):
    """How a drain goes: of ``total_blocks`` so many are at the peer, moved or there before; the
    rest is left. What the peer pushes out for hotter blocks counts as moved. ``state`` says why it
    has ended, ``error`` what has failed."""

    to: str
    total_blocks: int
    state: DrainState = "running"
    moved_blocks: int = 0
    moved_bytes: int = 0
    there_blocks: int = 0
    left_blocks: int = 0
    seconds: float = 0.0
    error: str = ""


class Drain:
    """Hands blocks to one peer, as long and as many as it may.

    Args:
        own_id: What peers know this cache by.
        blocks: What there is to hand over.
        seconds: How long it may take; what is being read then may still come.
        most_blocks: How many may be moved.

    Raises:
        ConfigError: The keys cannot be read.
    """

    def __init__(
        self, to: str, own_id: bytes, blocks: HotBlocks, block_bytes: int, seconds: float,
        most_blocks: float = math.inf,
    ) -> None:  # fmt: skip
        self.progress = DrainProgress(to, blocks.total, left_blocks=blocks.total)
        self._own_id = own_id
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._seconds = seconds
        self._most_blocks = most_blocks
        self._began_s = self._heard_s = time.monotonic()
        self._ends_s = math.inf
        """When it is over, whatever is open still."""
        self._why: DrainState = "done"
        self._ping_due_s = 0.0
        self._is_there = self._has_lent = False
        self._open: dict[int, Portion] = {}
        self._num_arrived = 0
        """Blocks that the peer has now, of the portions that it has answered."""
        self._to_send: list[TakeBlocks] = []
        self._num_sent = 0
        self._line: zmq.Socket[bytes] | None = None

    @property
    def is_over(self) -> bool:
        return self.progress.state != "running"

    def stop(self, why: DrainState = "stopped") -> None:
        """Ask for nothing more."""
        if self._ends_s == math.inf:
            self._why, self._ends_s = why, time.monotonic() + _END_PATIENCE_S

    def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], curve_keys: str | None, reactor: Reactor
    ) -> None:
        """Open the line to the peer. On the event loop's thread, once."""
        if self._line is None and not self.is_over:
            self._line = connect_peer(context, self.progress.to, curve_keys, is_watched=True)
            reactor.add_socket(self._line)

    def close(self, reactor: Reactor) -> None:
        """Close the line. Idempotent."""
        if self._line is not None:
            reactor.remove_socket(self._line)
            self._line.close()
            self._line = None

    # -- under the lock --------------------------------------------------------------------------

    def receive(self, cache: ServedCache, now: float) -> None:
        """Take in what the peer has answered, and decide what to ask for next."""
        if self._line is None or self.is_over:
            return
        loans = cache.tasks.loans.counters
        while int(self._line.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            try:
                message = read_message(_DECODER, self._line.recv_multipart(zmq.NOBLOCK))
            except UnreadableError as problem:
                self._end("failed", now, loans, f"the peer sends what makes no sense: {problem}")
                return
            self._heard_s = now
            if isinstance(message, TookBlocks):
                self._took(message, now, loans)
            elif message.cache == self._own_id:
                self._end("failed", now, loans, "that is this host itself")
            else:
                self._is_there = True
        if error := self._failure(cache, now):
            self._end("failed", now, loans, error)
        elif now - self._began_s >= self._seconds:
            self.stop("time")
        if not self.is_over:
            self._ask(cache, now)
            if not self._open or now >= self._ends_s:
                self._end_if_due(now, loans)
        self.progress.seconds = now - self._began_s

    def _failure(self, cache: ServedCache, now: float) -> str:
        """Why no more can be moved, if so."""
        lends = cache.tasks.executors.is_up(PEER)
        if self._has_lent and not lends:
            return "the peer worker of this host is not up"
        self._has_lent |= lends  # it may still start
        if now - self._heard_s > _SILENCE_S:
            return "the peer does not answer: see its address, its curve_keys and firewalls"
        return ""

    def _ask(self, cache: ServedCache, now: float) -> None:
        """Hand over more, as long as few portions are open."""
        most = max(1, int(PORTION_BYTES / self._block_bytes))
        while self._is_there and self._ends_s == math.inf and len(self._open) < _MAX_OPEN:
            num_open = sum(portion.num_own for portion in self._open.values())
            room = self._most_blocks - self.progress.moved_blocks - num_open
            portion = None
            if room >= 1:
                most = int(min(most, room))
                portion = self._blocks.take(most, now)
            if portion is None or portion.num_own > room:
                self._blocks.put_back(portion)  # with its tail; there may be room later
                self._stop_if_idle(portion is None and room >= 1)
                return
            self._num_sent += 1
            self._open[self._num_sent] = portion
            keys = portion.keys
            self._to_send.append(TakeBlocks(
                self._num_sent, self._own_id, cache.kept, portion.root, b"".join(keys),
                len(keys[0]), portion.age_s, portion.num_units,
            ))  # fmt: skip

    def _stop_if_idle(self, is_all: bool) -> None:
        if not self._open:
            self.stop("done" if is_all else "bytes")

    def _took(self, took: TookBlocks, now: float, loans: LoanStats) -> None:
        portion = self._open.pop(took.request_id, None)
        if portion is None or self.is_over:
            return
        if took.refusal:
            self._end("failed", now, loans, f"the peer refuses: {took.refusal}")
            return
        progress, num_read = self.progress, max(0, took.num_read)
        num_there = portion.num_there(took.num_blocks, took.has_tail)
        progress.moved_blocks += num_read
        progress.moved_bytes += num_read * self._block_bytes
        self._num_arrived += num_there
        # Over all portions: what is read for one may belong to another one before it.
        progress.there_blocks = max(0, self._num_arrived - progress.moved_blocks)
        num_gone = progress.moved_blocks + progress.there_blocks
        progress.left_blocks = max(0, progress.total_blocks - num_gone)
        # It takes a share of its DRAM at a time, and first what it lacks of the portions before.
        # Where nothing has come there is no room: to ask again would be for nothing.
        is_more = max(num_there, min(num_read, progress.left_blocks)) > 0
        if num_there < portion.num_own and is_more and not portion.num_units:
            num_before = portion.num_before + num_there
            self._blocks.put_back(msgspec.structs.replace(portion, num_before=num_before))

    def _end_if_due(self, now: float, loans: LoanStats) -> None:
        if self._ends_s < math.inf:
            self._end(self._why, now, loans)

    def _end(self, state: DrainState, now: float, loans: LoanStats, error: str = "") -> None:
        progress = self.progress
        progress.state, progress.error, progress.seconds = state, error, now - self._began_s
        loans.moved += progress.moved_blocks
        loans.there += progress.there_blocks
        loans.left += progress.left_blocks
        self._open.clear()
        self._to_send.clear()

    # -- without the lock ------------------------------------------------------------------------

    def send_due(self, now: float) -> None:
        """Send what was decided, and ask for a sign of life."""
        if self._line is None or self.is_over:
            return
        if now >= self._ping_due_s:
            self._ping_due_s = now + _PING_S
            self._send(FindBlocks(0))
        # One at a time: what it does not take now is sent in the next turn.
        while self._to_send and self._send(self._to_send[0]):
            self._to_send.pop(0)

    def _send(self, message: FindBlocks | TakeBlocks) -> bool:
        assert self._line is not None
        try:
            self._line.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # it is not there; that it is silent is seen later
            return False
        return True

    def next_due(self) -> float | None:
        """When there is something to do though nothing happens."""
        is_ending = self._ends_s < math.inf
        ends_s = self._ends_s if is_ending else self._began_s + self._seconds
        return None if self.is_over else min(self._ping_due_s, ends_s)


class _Waiting(NamedTuple):
    sender: bytes
    request_id: int
    peer: str
    portion: Portion
    since_s: float


class Takeovers:
    """Reads what peers hand over before they go, a share of DRAM at a time."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._moving: list[tuple[_Waiting, Takeover]] = []

    @property
    def next_due(self) -> float | None:
        return time.monotonic() + _POLL_S if self._moving else None

    def ask(
        self, sender: bytes, asked: TakeBlocks, cache: ServedCache | None, peer: str | None
    ) -> TookBlocks | None:
        """Take a request; answer one that cannot be carried out.

        Args:
            peer: Where blocks of the cache that goes are read; None if it is not known here.

        Raises:
            ValueError: It makes no sense.
        """
        portion = _portion_of(asked)
        refusal = _refusal(asked, cache, peer)
        mine = sum(each.sender == sender for each in self._waiting)
        if mine >= _MAX_WAITING_OF_ONE or len(self._waiting) >= _MAX_WAITING:
            refusal = refusal or "too many hosts go at once"
        if refusal:
            return TookBlocks(asked.request_id, refusal=refusal)
        since_s = time.monotonic()
        self._waiting.append(_Waiting(sender, asked.request_id, peer or "", portion, since_s))
        return None

    def advance(self, tasks: KVTaskEngine, now: float) -> Iterator[tuple[bytes, TookBlocks]]:
        """Begin what there is room for; yield the answers to what has ended."""
        for asked, takeover in self._moving.copy():
            if takeover.is_over(tasks):
                self._moving.remove((asked, takeover))
                yield asked.sender, _outcome(asked, takeover, tasks)
        host = tasks.cache.tiers.host
        while self._waiting:
            asked, portion = self._waiting[0], self._waiting[0].portion
            # What has landed is no part of its lease any more: its room is for the next.
            num_held = sum(len(lease) for _, each in self._moving for lease in each.leases)
            room = int(LENT_SHARE * host.capacity) - num_held
            if self._moving and room < (portion.num_own if portion.num_units else 1):
                return
            self._waiting.popleft()
            # Else what waits here would seem to have been used later than it was, and push out
            # what is as old.
            age_s = portion.age_s + max(0.0, now - asked.since_s)
            portion = msgspec.structs.replace(portion, age_s=age_s)
            takeover = Takeover.begin(tasks, portion, asked.peer, max(1, room), now)
            self._moving.append((asked, takeover))
            if takeover.is_over(tasks):
                self._moving.pop()
                yield asked.sender, _outcome(asked, takeover, tasks)


def _outcome(asked: _Waiting, takeover: Takeover, tasks: KVTaskEngine) -> TookBlocks:
    host, portion = tasks.cache.tiers.host, asked.portion
    there = host.index.match(takeover.keys).num_blocks
    tail = host.tails.find(portion.root, portion.keys[-1])
    has_tail = tail is not None and len(tail.units) == portion.num_units
    num_read = sum(lease.num_published for lease in takeover.leases)
    tasks.loans.counters.taken += num_read
    return TookBlocks(asked.request_id, there, has_tail, num_read)


def _refusal(asked: TakeBlocks, cache: ServedCache | None, peer: str | None) -> str:
    """Why nothing is taken over, if so."""
    if cache is None or not cache.kept:
        return "it has no engine yet"
    if asked.kept != cache.kept:
        return "it has another model, or another layout of it"
    tasks = cache.tasks
    if not cache.sizes.keeps_on_host:
        return "it keeps nothing in DRAM"
    if peer is None:
        return (
            "it is not in touch with this host: try again in some seconds, or add this host to its "
            "setting peers"
        )
    if not tasks.executors.is_up(PEER):
        return "its peer worker is not up"
    return "" if tasks.loans.is_shared(RootId(asked.root)) else "its weights have another name"


def _portion_of(asked: TakeBlocks) -> Portion:
    size, num_keys = asked.key_bytes, len(asked.keys) // max(1, asked.key_bytes)
    if len(asked.root) not in (0, ROOT_BYTES) or not 0 < size <= MAX_KEY_BYTES:
        raise ValueError(f"a root of {len(asked.root)} bytes, keys of {size}")
    if not 0 < num_keys <= MAX_KEYS or num_keys * size != len(asked.keys):
        raise ValueError(f"{len(asked.keys)} bytes of keys of {size} bytes")
    if not (0 <= asked.age_s <= LONGEST_AGE_S and 0 <= asked.num_units <= MAX_KEYS):
        raise ValueError(f"{asked.num_units} units, {asked.age_s} s old")
    keys = [BlockKey(asked.keys[i : i + size]) for i in range(0, len(asked.keys), size)]
    return Portion(RootId(asked.root), keys, asked.age_s, asked.num_units)
