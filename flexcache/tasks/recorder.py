"""Recorder: receives every call and every op as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from flexcache.cache.block_keys import PromptKeys
from flexcache.ids import SessionId
from flexcache.tasks.instructions import TaskResult
from flexcache.transfer.scheduler import TransferOp

if TYPE_CHECKING:
    from flexcache.tasks.model import Task


class Recorder(Protocol):
    """Called by `Accounts` under the server's lock: takes microseconds, raises nothing, and reads
    the clock itself."""

    def matched(self, task: Task, keys: PromptKeys, start: int, stop: int, retain_s: float) -> None:
        """Blocks ``[start, stop)`` of a prompt were asked for; ``task.plan`` is what came of it.

        ``keys`` may be a view of memory that changes after the call.
        """

    def launched(self, task: Task) -> None: ...

    def cancelled(self, task: Task) -> None: ...

    def op_started(self, task: Task, op: TransferOp) -> None:
        """An op was given to its executors."""

    def op_ended(self, task: Task, op: TransferOp, num_ok: int, error: str | None) -> None:
        """All of them have reported."""

    def ended(self, task: Task, result: TaskResult) -> None:
        """The task has come to its final state."""

    def cleared(self, tier: str | None, num_blocks: int) -> None: ...

    def session_began(self, session: SessionId, engine: str) -> None: ...

    def session_ended(self, session: SessionId) -> None: ...
