"""Copies on their way, and how many bytes of them there may be.

A GPU makes queued copies in its own order and cannot be told to stop. So only a few milliseconds'
worth of each direction is queued: a load by layer comes soon after it was asked for, and an op that
is dropped or revoked stops soon. (A copier may take less: `Copier.may_start`.)

    op      | piece | piece | piece |        in flight: at most `MOST_BYTES` of a direction
              landed  queued   not yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from flexcache.errors import TaskRevokedError
from flexcache.ids import OpKind
from flexcache.transfer.messages import Done
from flexcache.transfer.workers.copier import Fence
from flexcache.transfer.workers.lane import Lane
from flexcache.transfer.workers.op_copies import OpCopies

MOST_BYTES = 128 << 20
"""2.5 ms at 50 GB/s. A thread that must wait a switch interval (5 ms) for the interpreter lock
before it queues more still keeps half of the link busy."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece, from byte ``begin`` to ``end`` of what its lane has been given without a break."""

    op: OpCopies
    begin: int
    end: int
    landed: Fence


class InFlight:
    """Pieces of ops that were queued, in the order of each lane, until their landing is reported.
    One behind another may have landed before it, since several threads may copy.

    Attributes:
        failure: Why it is unknown what has landed, if it is.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._on_way: dict[Lane, deque[_Piece]] = {lane: deque() for lane in Lane}
        """The first has not landed, as far as is known."""
        self._landed: dict[Lane, deque[_Piece]] = {lane: deque() for lane in Lane}
        """Those before them, to be reported."""

    def __bool__(self) -> bool:
        return any(self._on_way.values()) or any(self._landed.values())

    @property
    def ops(self) -> list[OpCopies]:
        both = (*self._landed.values(), *self._on_way.values())
        return [piece.op for pieces in both for piece in pieces]

    def has_room(self, kind: OpKind, urgent: bool = False) -> bool:
        """Whether more may be queued; loads by layer do not count other loads. What has landed
        takes no room, though it may be long until its report. May be interrupted."""
        if kind is OpKind.D2H:
            ahead = [Lane.STORES]
        else:
            ahead = [Lane.LAYERS] if urgent else [Lane.LOADS, Lane.LAYERS]
        if self._num_bytes(ahead) >= MOST_BYTES:
            self._look(ahead)
        return self._num_bytes(ahead) < MOST_BYTES

    def add(self, op: OpCopies, num_bytes: int, landed: Fence, urgent: bool) -> None:
        """Record a piece that was queued."""
        pieces = self._on_way[Lane.of(op.message.kind, urgent)]
        begin = pieces[-1].end if pieces else 0
        op.num_in_flight += 1
        pieces.append(_Piece(op, begin, begin + num_bytes, landed))

    def end(self, op: OpCopies, failure: str | None = None) -> list[Done]:
        """End an op of which no more will be queued: now, or when what is in flight has landed."""
        op.is_over, op.failure = True, op.failure or failure
        return [] if op.num_in_flight else [_done(op)]

    def forget(self, op_id: int) -> None:
        """Forget an op whose pieces have landed, as if none had been queued."""
        for lanes in (self._on_way, self._landed):
            for lane, pieces in lanes.items():
                lanes[lane] = deque(p for p in pieces if p.op.message.op_id != op_id)

    def take_landed(self) -> list[Done]:
        """Return the ops that have ended, in the order of each lane."""
        self._look(Lane)
        done = []
        for pieces in self._landed.values():
            while pieces:
                op = pieces.popleft().op
                op.num_in_flight -= 1
                if op.is_over and not op.num_in_flight:
                    done.append(_done(op))
        return done

    def check(self) -> None:
        """Raise `AssertionError` unless all is consistent. Not after an interrupt."""
        counts: dict[int, int] = {}
        for op in self.ops:
            counts[id(op)] = counts.get(id(op), 0) + 1
        for op in self.ops:
            assert op.num_in_flight == counts[id(op)]
        for lanes in (self._on_way, self._landed):
            for lane, pieces in lanes.items():
                is_store = lane is Lane.STORES
                assert all((piece.op.message.kind is OpKind.D2H) == is_store for piece in pieces)
        for pieces in self._on_way.values():
            assert all(one.end <= other.begin for one, other in pairwise(pieces))

    def _num_bytes(self, lanes: Iterable[Lane]) -> int:
        """Return how many bytes are on their way, as far as is known."""
        on_way = [self._on_way[lane] for lane in lanes]
        return sum(pieces[-1].end - pieces[0].begin for pieces in on_way if pieces)

    def _look(self, lanes: Iterable[Lane]) -> None:
        """Find out which pieces have landed."""
        for lane in lanes:
            pieces, landed = self._on_way[lane], self._landed[lane]
            while pieces:
                first = pieces[0]
                if not landed or landed[-1] is not first:  # else a look was interrupted here
                    if not self._has_landed(first):
                        break
                    landed.append(first)
                pieces.popleft()

    def _has_landed(self, piece: _Piece) -> bool:
        try:
            return piece.landed.query()
        except TaskRevokedError as error:  # it ended early, like what follows of the op
            piece.op.failure = piece.op.failure or str(error)
            return True
        except Exception as error:  # the driver or its wrapper may raise any class
            self.failure = f"{type(error).__name__}: {error}"
            return False


def _done(op: OpCopies) -> Done:
    if op.failure is not None:
        return Done(op.message.op_id, 0, error=op.failure)
    return Done(op.message.op_id, op.num_units)
