"""HeldLoads: loads that a rank can finish by itself, since it was given all of their ops.

Some engines count on a load as soon as it has begun, and cannot compute what is lost. Their ranks
finish the loads that they hold even if the server is lost: the ops name the blocks, and the pool is
mapped. Such a load never reads a block that was given to others:

* The server keeps an op's blocks pinned until the rank reports the op or leaves: says Goodbye or
  Hello, or dies. A rank that loses its server does neither before its held loads have ended, so
  the pins hold if the server lives after all, stopped or silent.
* If the server is dead, nothing in its pool is given out any more. Copies that others began before
  write to blocks of their own: a block is pinned or written, never both. The next server makes
  another pool; the rank's mapping is of the old one, and ends before the rank greets that server.
* A server that does not know the rank (`Rejected`) may have dropped its pins: nothing is finished.

    given --all ops--> held --ops moved--> arrived, or lost
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flexcache.errors import InternalError
from flexcache.transfer.messages import Done, Execute, unpack_ids


@dataclass(slots=True)
class _Load:
    num_blocks: int = 0
    """GPU blocks that its ops fill."""
    open_ops: dict[int, int] = field(default_factory=dict)
    """Ops that have not ended, with their numbers of blocks in the pool."""
    is_lost: bool = False


class HeldLoads:
    """The gated loads of one registration whose end the server has not told. Not thread-safe."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._tasks: dict[int, int] = {}  # by open op

    # -- events ----------------------------------------------------------------------------------

    def given(self, message: Execute) -> None:
        """The rank was given an op of a gated load."""
        load = self._loads.setdefault(message.task_id, _Load())
        load.num_blocks += len(unpack_ids(message.dst))
        load.open_ops[message.op_id] = len(unpack_ids(message.src))
        self._tasks[message.op_id] = message.task_id

    def moved(self, done: Done) -> None:
        """An op has ended on this rank; ops that are not of held loads are ignored."""
        task_id = self._tasks.pop(done.op_id, None)
        if task_id is not None:
            load = self._loads[task_id]
            load.is_lost |= done.num_ok < load.open_ops.pop(done.op_id)

    def forget(self, task_ids: Iterable[int]) -> None:
        """The loads have ended on every rank, or the engine does without them."""
        for task_id in task_ids:
            load = self._loads.pop(task_id, None)
            for op_id in load.open_ops if load is not None else ():
                del self._tasks[op_id]

    # -- questions -------------------------------------------------------------------------------

    def holds(self, task_id: int, num_blocks: int) -> bool:
        """Whether the rank was given all ops of a load that fills so many GPU blocks."""
        load = self._loads.get(task_id)
        return load is not None and load.num_blocks >= num_blocks and not load.is_lost

    @property
    def task_ids(self) -> Collection[int]:
        """All loads, moved on this rank or not."""
        return self._loads.keys()

    @property
    def unfinished(self) -> list[int]:
        """Loads with blocks that have yet to be moved on this rank."""
        return [task_id for task_id, load in self._loads.items() if load.open_ops]

    def num_arrived(self, task_id: int) -> int:
        """How many blocks of a load have arrived: all or none."""
        load = self._loads[task_id]
        return 0 if load.is_lost or load.open_ops else load.num_blocks

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        listed = {op: task for task, load in self._loads.items() for op in load.open_ops}
        if listed != self._tasks:
            raise InternalError("the open ops and the loads that they are of disagree")
