"""Device worker: executes the ops that touch the GPU for one rank, inside the engine's process.

The process that owns the memory does the copy, so no other process needs a handle to it. Ops run in
order, loads before stores; but after three loads a store has its turn. A gated op waits until the
engine's worker thread opens the gate of its task; on CUDA it is then ordered after the work queued
on the compute stream at that moment, so that a copy never overtakes queued work on the same slots.

A load that the engine waits for layer by layer (`load_by_layer`) is copied in parts of one or more
layers, before all other ops; concurrent ones take turns, so that all get their first layers first.

Ops between the GPU and the SSD are carried out by `DirectOps`, once their gates are open.

Ops are copied in pieces, and few of them are queued at a time (`InFlight`). An op of a revoked
task, or one that is dropped, stops after the pieces that were started; on a GPU those land even
while the process is stopped.

`DeviceWorker` is driven by one thread at a time (`client.rank_ops`); only its gates may be used by
others meanwhile. It has no sockets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flexcache.errors import DeviceLostError, TaskRevokedError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.copier import (
    EAGER_LOADS,
    NEVER_REVOKED,
    ComputePoint,
    Copier,
    CopyLane,
    CopyPermit,
    Runs,
)
from flexcache.transfer.direct.ops import DirectOps
from flexcache.transfer.gates import DeviceGates
from flexcache.transfer.messages import Done, Execute
from flexcache.transfer.op_copies import OpAddresses, OpCopies

# ------------------------------------------------------------------------------------------------
# Copies on their way, and how many bytes of them there may be.
#
# A GPU makes queued copies in its own order and cannot be told to stop. So only some milliseconds'
# worth of each direction is queued, and an op that is dropped or revoked stops soon. It is less
# where loads by layer come, behind nothing that takes long. (A copier may take less:
# `Copier.may_start`.)
#
#     op      | piece | piece | piece |        in flight: at most `MOST_BYTES` of a direction
#               landed  queued   not yet

MOST_BYTES = 512 << 20
"""10 ms at 50 GB/s: the link is busy while the thread that queues more waits for the interpreter
lock, a switch interval (5 ms), twice."""
BESIDE_LAYERS = 128 << 20
"""2.5 ms at 50 GB/s, where the model waits for loads by layer: it would wait four times as long."""


@dataclass(frozen=True, slots=True)
class _Piece:
    op: OpCopies
    num_bytes: int
    landed: ComputePoint


class InFlight:
    """Pieces of ops that were queued, in the order of each lane: none of the first has landed, as
    far as is known. Those behind may have, since several threads may copy.

    Attributes:
        failure: Why it is unknown what has landed, if it is.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._pieces: dict[CopyLane, deque[_Piece]] = {lane: deque() for lane in CopyLane}
        self._bytes = dict.fromkeys(CopyLane, 0)

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
            return self._bytes[CopyLane.STORES] < most
        ahead = 0 if urgent else self._bytes[CopyLane.LOADS]
        return ahead + self._bytes[CopyLane.LAYERS] < most

    def add(self, op: OpCopies, num_bytes: int, landed: ComputePoint, urgent: bool) -> None:
        """Record a piece that was queued."""
        lane = CopyLane.of(op.message.kind, urgent)
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
            # Reported in the order in which they were queued: one that lands before others waits.
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
            is_store = lane is CopyLane.STORES
            assert all((piece.op.message.kind is OpKind.D2H) == is_store for piece in pieces)

    def _has_landed(self, piece: _Piece) -> bool:
        try:
            return piece.landed.query()
        except TaskRevokedError as error:  # it ended early, like what follows of the op
            piece.op.failure = piece.op.failure or str(error)
            return True
        except Exception as error:  # the driver or its wrapper may raise any class
            # It ends the rank's registration, not one op, whose slots would be reused while the
            # copy may still land.
            self.failure = f"{type(error).__name__}: {error}"
            return False


def _done(op: OpCopies) -> Done:
    if op.failure is not None:
        return Done(op.message.op_id, 0, error=op.failure)
    seconds = 0.0 if op.began_s is None else time.monotonic() - op.began_s
    return Done(op.message.op_id, op.num_units, seconds=seconds)


_MIN_PART_BYTES = 4 << 20  # of a load by layer: below this, starting a copy costs what it gains
_PIECE_BYTES = 32 << 20
_LARGE_PIECE_BYTES = 256 << 20  # on a GPU, where nothing waits by layer: half of what may be queued
_TURN_BYTES = 16 << 20  # copied by a turn to which no further op is added; reported together
_TURN_STARTS = 32  # where most of them only queue what another thread copies
_LANES = {OpKind.H2D: CopyLane.LOADS, OpKind.D2H: CopyLane.STORES}
_LOADS_FIRST, _STORES_FIRST = (OpKind.H2D, OpKind.D2H), (OpKind.D2H, OpKind.H2D)


class DeviceWorker:
    """Executes device ops against one rank's KV tensors and its host segment.

    Every op given to `execute` yields exactly one `Done`, from `advance` or `abandon`.

    Args:
        layouts: Of each group of the model; of all layers if it has no groups.
        permit: Set to the task of the current copy; shared with the copier.
        blocks_per_unit: As in `OpAddresses`, like ``may_skip``.
        direct: Executes DISK2D and D2DISK; None if this rank cannot.

    Attributes:
        gates: Which tasks may touch the GPU. Thread-safe.
        queued_op: Id of the last op whose copies `queue` has queued.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        segment: HostSegment,
        copier: Copier,
        permit: CopyPermit | None = None,
        blocks_per_unit: int = 1,
        may_skip: bool = False,
        direct: DirectOps | None = None,
    ) -> None:
        self._layouts = layouts
        self._addresses = OpAddresses(layouts, segment, blocks_per_unit, may_skip)
        self._copier = copier
        self._direct = direct
        self._permit = permit or CopyPermit()
        self._lost: str | None = None
        self._queues: dict[CopyLane, deque[Execute]] = {lane: deque() for lane in CopyLane}
        self._parked: dict[int, list[Execute]] = {}  # task id -> ops behind its gate
        self._in_parts: list[OpCopies] = []
        self._not_begun: list[OpCopies] = []
        self._in_pieces: dict[OpKind, OpCopies] = {}
        self._in_flight = InFlight()
        self._dropped: dict[int, None] = {}
        self._turn_bytes = 0
        self._loads_in_a_row = 0
        self.queued_op: int | None = None
        self.gates = DeviceGates(layouts, copier)

    @property
    def failure(self) -> str | None:
        """Why it is unknown what has landed. After that, only `close` and `abandon` may follow."""
        of_direct = None if self._direct is None else self._direct.failure
        return self._lost or self._in_flight.failure or of_direct

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do or to wait for now."""
        is_moving = self._in_flight or (self._direct is not None and self._direct.op_ids)
        return bool(is_moving) or not self.only_lands

    @property
    def only_waits(self) -> bool:
        """Whether the only work left for now is waiting for copies to land, or to be started."""
        return self.has_work and not self._dropped and self._next_start() is None

    @property
    def only_lands(self) -> bool:
        """Whether nothing is left to be started: what is left, if anything, is in flight."""
        is_left = self._dropped or self._in_parts or self._in_pieces
        return not is_left and not any(self._queues.values())

    def execute(self, message: Execute) -> None:
        """Take an op: behind its gate, past DRAM, or into the queue of its lane. `advance` starts
        it."""
        if message.gated and not self.gates.is_open(message.task_id):
            self._parked.setdefault(message.task_id, []).append(message)
        elif message.kind.is_direct and self._direct is not None:
            if self.gates.end_layer_load(message.task_id):  # it comes block by block
                self._direct.refuse(message.op_id, "a load past DRAM has no layers to wait for")
            else:
                self._direct.execute(message, self.gates.fence_of(message.task_id))
        else:
            lane = CopyLane.of(message.kind, urgent=self.gates.layer_load(message) is not None)
            self._queues[lane].append(message)

    def queue(self, message: Execute) -> bool:
        """Queue the copies of an op, if that is all there is to do and nothing comes before it;
        return whether they are queued. Else the op is not taken.

        If it is interrupted, `queued_op` says whether they are; if not, none is being made.
        """
        kind = message.kind
        if message.gated or kind not in (OpKind.H2D, OpKind.D2H) or self._lost is not None:
            return False
        if not self.only_lands:
            return False
        queue = self._copier.queue(kind)  # its room counts, as what has landed takes none there
        if queue is None or self.gates.layer_load(message) is not None:
            return False
        if self._addresses.most_bytes(message) > _PIECE_BYTES:
            return False
        try:
            op = self._addresses.copies_of(message)
        except ValueError:  # as `execute` will find, and report
            return False
        if not op.num_blocks:
            return False
        try:
            if self._start_copies(op, op.take(_PIECE_BYTES)) is not None:
                self.queued_op = message.op_id
        except BaseException as error:  # of any class, from a signal handler
            # It will be executed later: not beside copies of its own.
            queue.settle()
            self._in_flight.forget(message.op_id)
            self.queued_op = None
            if not isinstance(error, TaskRevokedError):
                raise
        return self.queued_op == message.op_id

    def drop(self, op_id: int) -> None:
        """Drop an op: if it has not started, it ends with nothing moved."""
        self._dropped[op_id] = None

    def fail_all(self, reason: str) -> list[Done]:
        """Fail all ops that it was given, but go on with promised loads. Returns those that have
        ended; `advance` does the others, of which something is in flight (`is_failing`)."""
        is_promised = self.gates.is_promised
        kept = [message for message in self._queues[CopyLane.LAYERS] if is_promised(message)]
        queues = (*self._queues.values(), *self._parked.values())
        to_end = [message for queue in queues for message in queue if message not in kept]
        ended = [self._failed(message, reason) for message in to_end]
        for queue in self._queues.values():
            queue.clear()
        self._queues[CopyLane.LAYERS].extend(kept)
        self._parked.clear()
        begun = [op for op in self._in_parts if not is_promised(op.message)]
        begun += self._in_pieces.values()
        self._in_parts = [op for op in self._in_parts if op not in begun]
        self._in_pieces.clear()
        self.gates.lose_layer_loads()
        self._in_flight.fail_all(reason)
        for op in begun:
            ended += self._in_flight.end(op, reason)
        if self._direct is not None:
            self._direct.fail_all(reason)
        return ended

    @property
    def is_failing(self) -> bool:
        """Whether copies of failed ops are still in flight."""
        of_direct = self._direct is not None and self._direct.is_failing
        return self._in_flight.is_failing or of_direct

    def advance(self, may_copy: bool = True) -> list[Done]:
        """Start ops that may start and return those that ended. Blocks only to copy on the CPU.

        Args:
            may_copy: Whether the calling thread may do that; else it only queues copies.
        """
        if self._parked:
            self._take_opened()
        if self._not_begun:
            self._note_begun()
        done = self._end_dropped() if self._dropped else []
        # Where a start is the whole copy few of them make a turn, so that messages get through.
        self._turn_bytes = num_started = 0
        while self._turn_bytes < _TURN_BYTES and (start := self._next_start(may_copy)) is not None:
            done.extend(ended := start())
            num_started += 1
            if self._lost is not None or num_started == _TURN_STARTS:
                break
            if not ended and not self._copier.wakes:  # on a GPU a start may take long
                break
        done.extend(self._in_flight.take_landed())
        if self._direct is not None:
            done.extend(self._direct.advance())
        return done

    def _take_opened(self) -> None:
        """Take the ops whose gates have been opened."""
        for task_id in [task_id for task_id in self._parked if self.gates.is_open(task_id)]:
            for message in self._parked.pop(task_id):
                self.execute(message)

    def _next_start(self, may_copy: bool = True) -> Callable[[], list[Done]] | None:
        """Return what is to be started next, if it may be now."""
        has_room = partial(self._in_flight.has_room, beside_layers=self.gates.has_layer_loads)
        has_layers = bool(self._queues[CopyLane.LAYERS] or self._in_parts)
        if has_layers and may_copy and has_room(OpKind.H2D, urgent=True):
            return self._start_by_layer if self._queues[CopyLane.LAYERS] else self._start_part
        for kind in _STORES_FIRST if self._loads_in_a_row >= EAGER_LOADS else _LOADS_FIRST:
            op, queue = self._in_pieces.get(kind), self._queues[_LANES[kind]]
            if op is None and not queue:
                continue
            if not has_room(kind) or (has_layers and kind is OpKind.H2D):
                continue
            if not may_copy:
                if self._copier.queue(kind) is not None:
                    return partial(self._start_piece, kind, may_copy)
                continue
            message = queue[0] if op is None else op.message
            if self._copier.may_start(kind, self.gates.opened_at(message.task_id)):
                return partial(self._start_piece, kind, may_copy)
        return None

    def _end_dropped(self) -> list[Done]:
        ended = []
        if self._direct is not None:
            self._direct.drop(self._dropped)
        for queue in (*self._queues.values(), *self._parked.values()):
            for message in [m for m in queue if m.op_id in self._dropped]:
                if self.gates.is_promised(message):
                    continue
                queue.remove(message)
                ended.append(self._failed(message, "dropped before it started"))
        self._parked = {task: ops for task, ops in self._parked.items() if ops}
        for kind, op in list(self._in_pieces.items()):
            if op.message.op_id in self._dropped:
                del self._in_pieces[kind]
                ended += self._in_flight.end(op, "dropped before all of it was copied")
        self._dropped = {}
        return ended

    def _start_piece(self, kind: OpKind, may_copy: bool) -> list[Done]:
        """Start a piece of the op of this kind that is next: a copy, or only its queueing."""
        self._loads_in_a_row = self._loads_in_a_row + 1 if kind is OpKind.H2D else 0
        op = self._in_pieces.pop(kind, None)
        if op is None:
            message = self._queues[_LANES[kind]].popleft()
            try:
                op = self._addresses.copies_of(message)
            except ValueError as error:
                return [self._failed(message, str(error))]
            if not op.num_blocks:
                return self._in_flight.end(op)
            if message.gated and kind is OpKind.H2D:
                self._watch_begin(op)
        try:
            alone = may_copy and self.only_lands and not self._in_flight
            self._start_copies(op, op.take(self._piece_bytes), alone=alone)
        except Exception as error:  # the driver or a compiler may raise any class
            return self._fail(op, error)
        if op.is_over:
            return self._in_flight.end(op)
        self._in_pieces[kind] = op
        return []

    @property
    def _piece_bytes(self) -> int:
        """What a thread queues between two waits for the interpreter, if it has to: on a GPU enough
        for the link while it waits. Loads by layer do not come behind that much."""
        is_small = self._copier.wakes or self.gates.has_layer_loads
        return _PIECE_BYTES if is_small else _LARGE_PIECE_BYTES

    def _start_by_layer(self) -> list[Done]:
        """Start the first layers of the load by layer that is next."""
        message = self._queues[CopyLane.LAYERS].popleft()
        load = self.gates.layer_load(message)
        try:
            op = self._addresses.copies_of(message, by_layer=True)
            if load is not None:
                op.require_whole(load.num_blocks)
        except ValueError as error:
            return [self._failed(message, str(error))]
        self._in_parts.append(op)
        self._watch_begin(op)
        return self._start_part(op)

    def _watch_begin(self, op: OpCopies) -> None:
        """Have it noted when the copies of a gated load can begin."""
        self._not_begun.append(op)
        self._note_begun()

    def _note_begun(self) -> None:
        """Note of gated loads whether the compute that their copies come after has ended."""
        waiting = []
        for op in self._not_begun:
            after = self.gates.opened_at(op.message.task_id)
            try:
                has_begun = after is None or after.query()
            except Exception:  # a lost device, say; the copies tell
                continue
            if has_begun:
                op.began_s = time.monotonic()
            else:
                waiting.append(op)
        self._not_begun = waiting

    def _start_part(self, op: OpCopies | None = None) -> list[Done]:
        """Start the next layers of a load by layer: of the one that has the fewest, by default."""
        self._turn_bytes = _TURN_BYTES  # another load may be asked for: they take turns
        op = op or min(self._in_parts, key=lambda op: op.num_started)
        stop = op.next_part(self._layouts[0], _MIN_PART_BYTES)
        load = self.gates.layer_load(op.message)
        if load is None or not load.begin_part():
            self._in_parts.remove(op)
            return self._fail(op, "the engine no longer waits for it")
        try:
            landed = self._start_copies(op, op.take_until(stop), urgent=True)
        except Exception as error:
            self._in_parts.remove(op)
            return self._fail(op, error)
        load.part_started(stop, landed)
        if stop < len(self._layouts[0].by_layer.sizes):
            return []
        self._in_parts.remove(op)
        return self._in_flight.end(op)

    def _start_copies(
        self, op: OpCopies, runs: Runs, *, urgent: bool = False, alone: bool = False
    ) -> ComputePoint | None:
        message = op.message
        is_promised = urgent and self.gates.is_promised(message)
        self._permit.task_id = NEVER_REVOKED if is_promised else message.task_id
        self._permit.check()
        after = self.gates.fence_of(message.task_id)
        landed = self._copier.start(runs, message.kind, after, urgent, alone)
        num_bytes = runs.num_bytes
        if landed is None:
            self._turn_bytes += num_bytes
        else:
            self._in_flight.add(op, num_bytes, landed, urgent)
        return landed

    def _fail(self, op: OpCopies, error: Exception | str) -> list[Done]:
        """End an op that cannot go on, once what was started has landed."""
        if isinstance(error, DeviceLostError):
            self._lost = str(error)
        load = self.gates.layer_load(op.message)
        if load is not None:
            load.end()
        return self._in_flight.end(op, str(error))

    def _failed(self, message: Execute, reason: str) -> Done:
        load = self.gates.layer_load(message)
        if load is not None:
            load.end()
        return Done(message.op_id, 0, error=reason)

    def close(self) -> None:
        """Wait for copies in flight; no more will start."""
        self.gates.end()
        if self._direct is not None:
            self._direct.close()
        self._copier.close()

    def abandon(self, reason: str) -> list[Done]:
        """End all unfinished ops. The worker must be closed."""
        queues = (*self._queues.values(), *self._parked.values())
        op_ids = [message.op_id for queue in queues for message in queue]
        begun = [*self._in_parts, *self._in_pieces.values(), *self._in_flight.ops]
        op_ids += [op.message.op_id for op in begun]
        op_ids += [] if self._direct is None else self._direct.op_ids
        return [Done(op_id, 0, error=reason) for op_id in dict.fromkeys(op_ids)]
