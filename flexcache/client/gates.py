"""What a rank knows of gated tasks: which are over, and which will not begin any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from flexcache.tasks.ids import epoch_of, session_of

_NUM_REMEMBERED = 16_384  # ended tasks that the engine's worker has not asked for
Value = TypeVar("Value")


class GatedTasks:
    """Not thread-safe. Task ids tell the server and the session that they are of (`tasks.ids`).

    Attributes:
        epoch: The server's, from its task ids; 0 while the rank is not registered. Without a server
            every task is over: no copy can be running.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._ended: OrderedDict[int, int] = OrderedDict()
        self._sessions_over: OrderedDict[int, None] = OrderedDict()
        self._shut: OrderedDict[int, None] = OrderedDict()

    # -- events ----------------------------------------------------------------------------------

    def end(self, task_id: int, num_ok: int) -> None:
        """A task is over on every rank; its first ``num_ok`` blocks have arrived."""
        _remember(self._ended, task_id, num_ok)

    def lose(self) -> None:
        """Nothing of what has ended, and was not taken, is of use any more."""
        for task_id in self._ended:
            self._ended[task_id] = 0

    def end_session(self, session: int) -> None:
        """What has not been reported of a session's tasks never began, and will not."""
        _remember(self._sessions_over, session, None)

    def shut(self, task_ids: Iterable[int]) -> None:
        """Keep gates shut for good that were to be opened while there was no server."""
        for task_id in task_ids:
            _remember(self._shut, task_id, None)

    # -- questions -------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the end of some task was not taken yet."""
        return bool(self._ended)

    def is_shut(self, task_id: int) -> bool:
        """Whether the task's gate will never be opened."""
        return task_id in self._shut

    def not_ended(self, task_ids: Iterable[int]) -> list[int]:
        """The tasks whose end was not reported."""
        return [task_id for task_id in task_ids if task_id not in self._ended]

    def is_over(self, task_id: int) -> bool:
        """Whether no copy of the task is running or will."""
        return (
            task_id in self._ended
            or task_id in self._shut
            or session_of(task_id) in self._sessions_over
            or epoch_of(task_id) != self.epoch
        )

    def take_over(self, task_ids: Iterable[int]) -> dict[int, int]:
        """Those of the tasks that are over, with how many blocks arrived. Each is returned once."""
        return {
            task_id: self._ended.pop(task_id, 0) for task_id in task_ids if self.is_over(task_id)
        }


def _remember(known: OrderedDict[int, Value], key: int, value: Value) -> None:
    """Keep it, and forget the oldest if there are too many."""
    known[key] = value
    if len(known) > _NUM_REMEMBERED:
        known.popitem(last=False)
