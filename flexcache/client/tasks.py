"""Client tasks: what was matched and how it ended, the way to the cache, and promised loads.

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

from flexcache.errors import ClosedError, RegistrationError
from flexcache.ids import KVStatus, SessionId, TaskKind, session_of
from flexcache.protocol.fence import Fence
from flexcache.tasks.instructions import Offer, TaskResult
from flexcache.tasks.model import check_launchable, check_slot_mappings
from flexcache.transfer.scheduler import BlockIds

_NUM_REMEMBERED = 16_384


@dataclass(slots=True, eq=False)
class ClientTask:
    """One task, as its owner sees it."""

    offer: Offer
    launched: bool = False
    result: TaskResult | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None and self.result.is_final

    def end(self, status: KVStatus, error: str | None = None) -> None:
        """End it with nothing moved."""
        self.result = TaskResult(status, self.offer.start, 0, self.offer.num_tokens, error)


class ClientTasks:
    """The tasks of one engine. Thread-safe; never calls out while it holds its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: OrderedDict[int, ClientTask] = OrderedDict()
        self._early: dict[int, TaskResult] = {}
        """Answers that came before their match had returned: a deadline or a disputed name cancels
        at once."""
        self._session: SessionId | None = None
        self._was_lost = False
        """Since the first loss, a match of another session than this one has come too late."""
        self._is_closed = False
        self._num_waiting = 0
        self.renamed: Callable[[int, str], None] = lambda generation, version: None
        """Called with each new generation of the engine's weights, and their version."""

    # -- calls of the engine ---------------------------------------------------------------------

    def add(self, offer: Offer) -> None:
        """Keep a new task. The oldest that is over is forgotten when there are too many.

        Raises:
            ClosedError: The cache was shut down.
        """
        task_id, task = offer.task_id, ClientTask(offer)
        if not offer.num_blocks and not offer.tail_at:
            task.end(KVStatus.NOT_FOUND)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the cache was shut down")
            self._tasks[task_id] = task
            if task_id in self._early:
                task.result = self._early.pop(task_id)
            elif task.result is None and self._was_lost and session_of(task_id) != self._session:
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
                offer = task.offer
                check_launchable(task_id, offer.kind, task.launched, offer.num_gpu_blocks, blocks)
                to_start.append(position)
            for position in to_start:
                self._tasks[task_ids[position]].launched = True
        return to_start

    def promised(self, task_id: int) -> None:
        """The cache has started it: no launch follows."""
        with self._lock:
            self._known(task_id).launched = True

    def offer(self, task_id: int) -> Offer:
        """What a task moves. A `KeyError` if the id was never given out."""
        with self._lock:
            return self._known(task_id).offer

    def cancel(self, task_ids: Iterable[int]) -> list[int]:
        """End what was not launched; the tasks that the cache must cancel. It keeps what a prefetch
        has brought."""
        are_open = []
        with self._lock:
            for task_id, task in [(task_id, self._known(task_id)) for task_id in task_ids]:
                has_brought = task.offer.kind is TaskKind.PREFETCH and task.launched
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


class StepPromises:
    """Keeps the ranks of one engine from leaving. Thread-safe.

    Some engines cannot go back once a step is scheduled (vLLM with asynchronous scheduling). So
    before a step is scheduled with a load, the scheduler makes sure of all that the load needs:

    * Every rank has the pool mapped, and leaves no sooner than `StepPromises.end`. This holds
      whatever becomes of the server and the session, since it is a lock between the scheduler and
      the ranks.
    * The server *promises* the load: until the ranks have reported it, its blocks stay as they are.
      Nothing else ends it but a cancel by the engine that asked.

    The engine then hands the promised load to its ranks with the step. A rank copies it by itself:
    it asks neither whether the task was revoked meanwhile, nor whether the weights have changed.
    What a step computes belongs to the weights that it was scheduled with, as with the engine's own
    cache.

    Args:
        num_ranks: Ranks that all execute a load.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}

    def begin(self, path: str | None) -> bool:
        """Keep the ranks that the fence at ``path`` is of until `end`; return whether all are kept,
        which they are not while one has no pool, or weights that the server has not heard of."""
        if path is None:
            return False
        with self._lock:
            fence = self._fences.get(path)
            if fence is not None:  # a step counts on them already; one may want to leave after it
                return fence.count_on(self._ranks)
            try:
                fence = Fence.open(path)
            except RegistrationError:  # its server is gone
                return False
            if not fence.count_on(self._ranks):
                fence.close()
                return False
            self._fences[path] = fence
            return True

    def end(self) -> None:
        """No step that is under way, or about to be scheduled, counts on a rank. Idempotent."""
        with self._lock:
            while self._fences:
                self._fences.popitem()[1].close()
