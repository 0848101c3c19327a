"""What a scheduler's client knows of its tasks: what was matched, and what it was answered.

Calls are checked here, so that a launch or a cancel can be sent without waiting for an answer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexcache.ids import KVStatus, TaskKind
from flexcache.tasks.instructions import TaskResult

BlockIds = npt.NDArray[np.int64]
_NUM_REMEMBERED = 16_384


@dataclass(slots=True, eq=False)
class ClientTask:
    """One task, as its owner sees it."""

    kind: TaskKind
    start: int
    num_blocks: int
    num_tokens: int
    launched: bool = False
    result: TaskResult | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None and self.result.is_final


class ClientTasks:
    """Thread-safe; ``changed`` may be waited for by others too."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._tasks: OrderedDict[int, ClientTask] = OrderedDict()

    def add(self, task_id: int, task: ClientTask, ended: KVStatus | None) -> None:
        """Keep a task, open or ended already; the oldest that is over is forgotten."""
        with self._changed:
            self._tasks[task_id] = task
            if ended is not None:
                self._end(task, ended)
            if len(self._tasks) > _NUM_REMEMBERED:
                oldest = next(iter(self._tasks))
                if self._tasks[oldest].is_over:
                    del self._tasks[oldest]
                else:
                    self._tasks.move_to_end(oldest)

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds]) -> list[int]:
        """Check all, then mark them launched; which of them are to be started, by position.

        Raises:
            ValueError: A number is wrong, or a task was launched before.
            KeyError: An id was never given out.
        """
        if len(task_ids) != len(gpu_blocks) or len(set(task_ids)) != len(task_ids):
            raise ValueError(f"{len(task_ids)} distinct tasks need {len(task_ids)} slot mappings")
        to_start = []
        with self._changed:
            for position, (task_id, blocks) in enumerate(zip(task_ids, gpu_blocks, strict=True)):
                task = self._known(task_id)
                if task.launched:
                    raise ValueError(f"task {task_id} was launched before")
                if task.result is not None:
                    continue  # it was cancelled, or had nothing to move
                if task.kind is not TaskKind.PREFETCH and len(blocks) != task.num_blocks:
                    raise ValueError(
                        f"task {task_id} needs slots for {task.num_blocks} blocks, "
                        f"{len(blocks)} were given"
                    )
                to_start.append(position)
            for position in to_start:
                self._tasks[task_ids[position]].launched = True
        return to_start

    def cancel(self, task_ids: Iterable[int]) -> list[int]:
        """End what was not launched; which of the tasks the server must be told of."""
        with self._changed:
            tasks = {task_id: self._known(task_id) for task_id in task_ids}
            are_open = {task_id: task for task_id, task in tasks.items() if not task.is_over}
            for task in are_open.values():
                if not task.launched:  # nothing moves: no need to wait for the answer
                    self._end(task, KVStatus.CANCELLED)
        return list(are_open)

    def answer(self, task_id: int, result: TaskResult) -> None:
        """The server says how a task ended."""
        with self._changed:
            task = self._tasks.get(task_id)
            if task is not None and not task.is_over:
                task.result = result
                self._changed.notify_all()

    def results(
        self,
        task_ids: Iterable[int],
        timeout: float | None,
        completely: bool,
        check_open: Callable[[], None],
    ) -> dict[int, TaskResult]:
        """What of the tasks is over, at the latest after ``timeout`` s; None: when all are.

        ``check_open`` raises when there is nothing more to wait for.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            tasks = {task_id: self._known(task_id) for task_id in task_ids}
            while True:
                over = {
                    task_id: task.result
                    for task_id, task in tasks.items()
                    if task.result is not None and (not completely or task.is_over)
                }
                left = None if deadline is None else deadline - time.monotonic()
                if len(over) == len(tasks) or (left is not None and left <= 0):
                    return over
                check_open()
                self._changed.wait(left)

    def open_tasks(self) -> list[ClientTask]:
        with self._changed:
            return [task for task in self._tasks.values() if not task.is_over]

    def fail(self, tasks: Iterable[ClientTask], error: str) -> None:
        """Nobody will answer these any more. What was answered for the GPU side stays."""
        with self._changed:
            for task in tasks:
                if task.result is None:
                    self._end(task, KVStatus.FAILED, error)
                elif not task.is_over:
                    gpu_side = task.result
                    task.result = gpu_side._replace(is_final=True, error=gpu_side.error or error)
            self._changed.notify_all()

    def _known(self, task_id: int) -> ClientTask:
        task = self._tasks.get(task_id)
        if task is None:
            raise KeyError(f"task {task_id} was never given out, or was answered long ago")
        return task

    def _end(self, task: ClientTask, status: KVStatus, error: str | None = None) -> None:
        task.result = TaskResult(status, task.start, 0, task.num_tokens, error)
        self._changed.notify_all()
