"""Copies on their way, and how many bytes of them there may be.

A GPU makes queued copies in its own order and cannot be told to stop. So only some milliseconds'
worth of each direction is queued, and an op that is dropped or revoked stops soon. It is less where
loads by layer come, behind nothing that takes long. (A copier may take less: `Copier.may_start`.)

    op      | piece | piece | piece |        in flight: at most `MOST_BYTES` of a direction
              landed  queued   not yet
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from flexcache.errors import TaskRevokedError
from flexcache.ids import OpKind
from flexcache.transfer.messages import Done
from flexcache.transfer.workers.copier import Fence
from flexcache.transfer.workers.lane import Lane
from flexcache.transfer.workers.op_copies import OpCopies

MOST_BYTES = 512 << 20
"""10 ms at 50 GB/s: the link is busy while the thread that queues more waits for the interpreter
lock, a switch interval (5 ms), twice."""
BESIDE_LAYERS = 128 << 20
"""2.5 ms at 50 GB/s, where the model waits for loads by layer: it would wait four times as long."""


@dataclass(frozen=True, slots=True)
class _Piece:
    op: OpCopies
    num_bytes: int
    landed: Fence


class InFlight:
    """Pieces of ops that were queued, in the order of each lane: none of the first has landed, as
    far as is known. Those behind may have, since several threads may copy.

    Attributes:
        failure: Why it is unknown what has landed, if it is.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._pieces: dict[Lane, deque[_Piece]] = {lane: deque() for lane in Lane}
        self._bytes = dict.fromkeys(Lane, 0)

    def __bool__(self) -> bool:
        return any(self._pieces.values())

    @property
    def ops(self) -> list[OpCopies]:
        return [piece.op for pieces in self._pieces.values() for piece in pieces]

    def has_room(
        self, kind: OpKind, urgent: bool = False, beside_layers: bool = False
    ) -> bool:  # fmt: skip
        """Whether more may be queued; loads by layer do not count other loads.

        Args:
            beside_layers: Whether loads by layer may come at any time.
        """
        most = BESIDE_LAYERS if urgent or beside_layers else MOST_BYTES
        if kind is OpKind.D2H:
            return self._bytes[Lane.STORES] < most
        ahead = 0 if urgent else self._bytes[Lane.LOADS]
        return ahead + self._bytes[Lane.LAYERS] < most

    def add(self, op: OpCopies, num_bytes: int, landed: Fence, urgent: bool) -> None:
        """Record a piece that was queued."""
        lane = Lane.of(op.message.kind, urgent)
        op.num_in_flight += 1
        self._bytes[lane] += num_bytes
        self._pieces[lane].append(_Piece(op, num_bytes, landed))

    def end(self, op: OpCopies, failure: str | None = None) -> list[Done]:
        """End an op of which no more will be queued: now, or when what is in flight has landed."""
        op.is_over, op.failure = True, op.failure or failure
        return [] if op.num_in_flight else [_done(op)]

    def fail_all(self, reason: str) -> None:
        """Fail the ops of which something is in flight, once that has landed."""
        for op in self.ops:
            op.failure = op.failure or reason

    @property
    def is_failing(self) -> bool:
        """Whether something of a failed op is still in flight."""
        return any(op.failure is not None for op in self.ops)

    def forget(self, op_id: int) -> None:
        """Forget an op whose pieces have landed, as if none had been queued."""
        for lane, pieces in self._pieces.items():
            kept = [piece for piece in pieces if piece.op.message.op_id != op_id]
            self._pieces[lane] = deque(kept)
            self._bytes[lane] = sum(piece.num_bytes for piece in kept)

    def take_landed(self) -> list[Done]:
        """Return the ops that have ended, in the order of each lane."""
        done = []
        for lane, pieces in self._pieces.items():
            while pieces and self._has_landed(pieces[0]):
                op = pieces[0].op
                op.num_in_flight -= 1
                self._bytes[lane] -= pieces.popleft().num_bytes
                if op.is_over and not op.num_in_flight:
                    done.append(_done(op))
        return done

    def check(self) -> None:
        """Raise `AssertionError` unless all is consistent."""
        counts: dict[int, int] = {}
        for op in self.ops:
            counts[id(op)] = counts.get(id(op), 0) + 1
        for op in self.ops:
            assert op.num_in_flight == counts[id(op)]
        for lane, pieces in self._pieces.items():
            assert self._bytes[lane] == sum(piece.num_bytes for piece in pieces)
            is_store = lane is Lane.STORES
            assert all((piece.op.message.kind is OpKind.D2H) == is_store for piece in pieces)

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
    seconds = 0.0 if op.began_s is None else time.monotonic() - op.began_s
    return Done(op.message.op_id, op.num_units, seconds=seconds)
