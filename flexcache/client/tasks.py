"""What an engine's client knows of its tasks: what was matched, and how it ended.

Launches and cancels are checked here, so that a transport can send them without waiting for an
answer. Answers are pushed in by the transport. The cache itself forgets a task when it has ended;
its result can be asked for here until many others have ended after it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexcache.client.slots import BlockIds
from flexcache.errors import ClosedError
from flexcache.ids import KVStatus, SessionId, TaskKind
from flexcache.tasks.ids import session_of
from flexcache.tasks.instructions import MatchedTask, TaskResult
from flexcache.tasks.launch_checks import check_launchable, check_slot_mappings

_NUM_REMEMBERED = 16_384


class Extent(NamedTuple):
    """What a task moves: ``num_blocks`` of the prompt, and the tail behind its first ``tail_at``
    blocks, unless that is 0."""

    kind: TaskKind
    num_blocks: int
    tail_at: int


@dataclass(slots=True, eq=False)
class ClientTask:
    """One task, as its owner sees it."""

    kind: TaskKind
    start: int
    num_blocks: int
    num_tokens: int
    num_gpu_blocks: int
    tail_at: int
    launched: bool = False
    result: TaskResult | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None and self.result.is_final

    def end(self, status: KVStatus, error: str | None = None) -> None:
        """End it with nothing moved."""
        self.result = TaskResult(status, self.start, 0, self.num_tokens, error)


class ClientTasks:
    """The tasks of one engine. Thread-safe; never calls out while it holds its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: OrderedDict[int, ClientTask] = OrderedDict()
        self._early: dict[int, TaskResult] = {}
        """Answers that came before their match had returned."""
        self._session: SessionId | None = None
        self._was_lost = False
        """Since the first loss, a match of another session than this one has come too late."""
        self._is_closed = False
        self._num_waiting = 0
        self.renamed: Callable[[int, str], None] = lambda generation, version: None
        """Called with each new generation of the engine's weights, and their version."""

    # -- calls of the engine ---------------------------------------------------------------------

    def add(self, kind: TaskKind, matched: MatchedTask, num_tokens: int) -> None:
        """Keep a new task. The oldest that is over is forgotten when there are too many.

        Raises:
            ClosedError: The cache was shut down.
        """
        task_id, start, num_blocks, _, num_gpu_blocks, tail_at = matched
        nothing = None
        if not num_blocks and not tail_at:
            nothing = TaskResult(KVStatus.NOT_FOUND, start, 0, num_tokens)
        task = ClientTask(
            kind, start, num_blocks, num_tokens, num_gpu_blocks, tail_at, False, nothing
        )
        with self._lock:
            if self._is_closed:
                raise ClosedError("the cache was shut down")
            self._tasks[task_id] = task
            if task_id in self._early:
                task.result = self._early.pop(task_id)
            elif nothing is None and self._was_lost and session_of(task_id) != self._session:
                task.end(KVStatus.FAILED, "the server was lost")
            if len(self._tasks) > _NUM_REMEMBERED:
                oldest = next(iter(self._tasks))
                if self._tasks[oldest].is_over:
                    del self._tasks[oldest]
                else:
                    self._tasks.move_to_end(oldest)

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds]) -> list[int]:
        """Check all, then mark them launched; the positions of those to be started.

        Raises:
            ValueError: A number is wrong, or a task was launched before.
            KeyError: An id was never given out.
        """
        check_slot_mappings(task_ids, gpu_blocks)
        to_start = []
        with self._lock:
            for position, (task_id, blocks) in enumerate(zip(task_ids, gpu_blocks, strict=True)):
                task = self._known(task_id)
                if task.result is not None and not task.launched:
                    continue  # it was cancelled, or had nothing to move
                check_launchable(task_id, task.kind, task.launched, task.num_gpu_blocks, blocks)
                to_start.append(position)
            for position in to_start:
                self._tasks[task_ids[position]].launched = True
        return to_start

    def promised(self, task_id: int) -> None:
        """The cache has started it: no launch follows."""
        with self._lock:
            self._known(task_id).launched = True

    def extent(self, task_id: int) -> Extent:
        """What a task moves. A `KeyError` if the id was never given out."""
        with self._lock:
            task = self._known(task_id)
            return Extent(task.kind, task.num_blocks, task.tail_at)

    def cancel(self, task_ids: Iterable[int]) -> list[int]:
        """End what was not launched; the tasks that the cache must cancel. It keeps what a prefetch
        has brought."""
        are_open = []
        with self._lock:
            for task_id, task in [(task_id, self._known(task_id)) for task_id in task_ids]:
                has_brought = task.kind is TaskKind.PREFETCH and task.launched
                if task.is_over and (self._is_closed or not has_brought):
                    continue
                are_open.append(task_id)
                if not task.launched:  # nothing moves: no need to wait for the answer
                    task.end(KVStatus.CANCELLED)
            self._notify()
        return are_open

    def results(
        self, task_ids: Iterable[int], timeout: float | None, completely: bool
    ) -> dict[int, TaskResult]:
        """The results of those tasks that are over within ``timeout`` s; None: wait for all.

        Raises:
            ClosedError: A task is open, and no answer will come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            tasks = {task_id: self._known(task_id) for task_id in task_ids}
            while True:
                over = {
                    task_id: task.result
                    for task_id, task in tasks.items()
                    if task.result is not None and (not completely or task.is_over)
                }
                if len(over) == len(tasks):
                    return over
                if self._is_closed:
                    raise ClosedError("the cache was shut down")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return over
                self._num_waiting += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._num_waiting -= 1

    # -- events, from the transport --------------------------------------------------------------

    def answer(self, task_id: int, result: TaskResult) -> None:
        """A task has ended: its GPU side, or all of it."""
        with self._lock:
            task = self._tasks.get(task_id)
            if task is None:
                self._early[task_id] = result
            elif not task.is_over and not self._is_closed:
                task.result = result
                self._notify()

    def begin(self, session: SessionId) -> None:
        """A server has opened a session, from which no match has returned yet."""
        with self._lock:
            self._session = session

    def lose(self) -> list[ClientTask]:
        """The session's server was lost: its open tasks. They stay open until `fail`."""
        with self._lock:
            self._session, self._was_lost = None, True
            self._early.clear()
            return [task for task in self._tasks.values() if not task.is_over]

    def fail(self, tasks: Iterable[ClientTask], error: str) -> None:
        """End tasks that the cache will not answer. An answer for the GPU side stays."""
        with self._lock:
            if self._is_closed:
                return
            for task in tasks:
                if task.result is None:
                    task.end(KVStatus.FAILED, error)
                elif not task.is_over:
                    gpu_side = task.result
                    task.result = gpu_side._replace(is_final=True, error=gpu_side.error or error)
            self._notify()

    def close(self) -> None:
        """No answer will come any more; wake the callers that wait for one. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._notify()

    def _notify(self) -> None:
        if self._num_waiting:  # else it would cost a tenth of a match for nothing
            self._changed.notify_all()

    def _known(self, task_id: int) -> ClientTask:
        task = self._tasks.get(task_id)
        if task is None:
            raise KeyError(f"task {task_id} was never given out, or was answered long ago")
        return task
