"""TaskCalls: an engine's calls to its cache about tasks that it has matched.

The cache may fail, but the request must not: errors are logged, and the answer is that there is
nothing to load or store.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from flexcache.client.gpu_blocks import GroupBlocks
from flexcache.errors import FlexCacheError
from flexcache.ids import KVStatus
from flexcache.integration.safe_calls import safely
from flexcache.logs import log_event
from flexcache.manager import KVManager
from flexcache.tasks.instructions import PromisedLoad

logger = logging.getLogger(__name__)

_ANSWER_PATIENCE_S = 0.1


class TaskCalls:
    """Calls to one engine's `KVManager`, once it is open: until then nothing is found or stored.

    Args:
        manager: None if `open` follows.
        block_size: Tokens between the positions where prefixes can end.

    Attributes:
        manager: Unset until it is open.
        is_open: Whether there is a manager.
        effect_of_lost_load: What the engine does about it, for the log.
    """

    manager: KVManager
    effect_of_lost_load = ""

    def __init__(self, manager: KVManager | None, block_size: int) -> None:
        self.is_open = False
        self._block_size = block_size
        if manager is not None:
            self.open(manager)

    def open(self, manager: KVManager) -> None:
        """Call this one from now on."""
        self.manager = manager
        self.is_open = True

    def launch(self, task_id: int, blocks: GroupBlocks, gated: bool = True) -> bool:
        """Launch a matched task; return whether it was launched. Else it has ended, or is
        cancelled.

        Args:
            blocks: GPU blocks of each group.
            gated: Whether the ranks begin only when they are asked to (`KVTPClient.open_gates`).
        """
        return bool(self.launch_all({task_id: blocks}, gated))

    def launch_all(self, blocks: Mapping[int, GroupBlocks], gated: bool = True) -> list[int]:
        """Launch matched tasks, given the blocks of each; return those that were launched. The
        others have ended, or are cancelled."""
        task_ids = list(blocks)
        try:
            self.manager.launch(task_ids, group_blocks=list(blocks.values()), gated=gated)
            # A task that had already ended (because the server was lost, say) was not launched.
            ended = self.manager.try_wait(task_ids)
        except (FlexCacheError, ValueError, KeyError) as error:
            if len(task_ids) > 1 and not isinstance(error, FlexCacheError):
                # They were refused as a whole because of one of them.
                return [each for each in task_ids if self.launch(each, blocks[each], gated)]
            for task_id in task_ids:
                log_event(logger, logging.WARNING, "launch_failed", task=task_id, error=error)
                self.cancel(task_id)
            return []
        return [
            task_id
            for task_id in task_ids
            if task_id not in ended or ended[task_id].status is KVStatus.SUCCESS
        ]

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a matched get that cannot be lost any more, if that can be promised."""
        promised: PromisedLoad | None = safely(self.manager.promise, task_id)
        return promised

    def end_promises(self) -> None:
        """No step counts on a promised load any more. Idempotent."""
        if self.is_open:
            self.manager.end_promises()

    def has_arrived(self, task_id: int, num_tokens: int) -> bool:
        """Return whether everything that was matched was loaded.

        The workers have seen the task's end; the server's answer may still be on its way. There is
        none soon if a rank has refused the load: the task is then cancelled.
        """
        try:
            response = self.manager.wait([task_id], _ANSWER_PATIENCE_S)[task_id]
        except (FlexCacheError, KeyError):
            return False
        if response.status is KVStatus.TIMEOUT:
            self.cancel(task_id)
            return False  # else a refused load would be offered again without end
        if int(response.mask.sum()) == num_tokens:
            return True
        log_event(
            logger, logging.WARNING, "load_lost", task=task_id, error=response.error,
            effect=self.effect_of_lost_load,
        )  # fmt: skip
        return False

    def ended(self, task_ids: Iterable[int]) -> Collection[int]:
        """Return those of the tasks whose copies to and from the GPU have ended on every rank."""
        asked = list(task_ids)
        try:
            return self.manager.try_wait(asked).keys() if asked else asked
        except (FlexCacheError, KeyError):  # the cache was shut down: it has let go of the GPU
            return asked

    def wait_ended(self, task_ids: Iterable[int], timeout_s: float) -> None:
        """Wait until copies to and from the GPU have ended on every rank, or for ``timeout_s``."""
        if asked := list(task_ids):  # there are none before it is open
            safely(self.manager.wait, asked, timeout_s)

    def cancel(self, task_id: int) -> None:
        safely(self.manager.cancel, [task_id])

    def report_prefill(self, tokens_per_s: float) -> None:
        if self.is_open:
            safely(self.manager.report_prefill, tokens_per_s)

    def reset(self) -> bool:
        """Drop everything cached and unused. Return whether that succeeded."""
        return not self.is_open or safely(self.manager.reset, if_failed=False) is not False
