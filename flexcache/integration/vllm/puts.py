"""Puts of a request's blocks by reference, while vLLM goes on using or freeing them.

A request is stored when its prompt has been computed, and what it generated when it ends. The
blocks to be copied are pinned in vLLM's block pool, so neither the request's end nor its preemption
waits for the copy:

    prompt's last step scheduled, or request finished
      --> matched, and the blocks pinned
      --> launched, and announced in the next step's metadata: its blocks are complete by then
      --> ended on every rank: unpinned
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flexcache.errors import InternalError
from flexcache.integration.vllm.calls import CacheCalls

_PATIENCE_S = 2.0  # with copies of which none ends, while vLLM or its user waits for GPU blocks


class BlockPool(Protocol):
    """What is used of vLLM's pool of GPU blocks."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any], /) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any], /) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Put:
    """A matched put of a request.

    Attributes:
        table: The request's GPU blocks from the first to the last that is copied.
        block_ids: Those that are copied.
    """

    task_id: int
    request: Any
    table: Sequence[int]
    block_ids: Sequence[int]


class Puts:
    """The puts of one engine, from the match until the blocks are unpinned.

    Attributes:
        pool: vLLM's block pool, once bound.
    """

    def __init__(self, cache: CacheCalls, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self.pool: BlockPool | None = None
        self._prompts: dict[str, Any] = {}
        """Admitted requests whose prompt was not offered to the cache."""
        self._num_offered: dict[str, int] = {}
        """Blocks of unfinished requests that were offered."""
        self._matched: list[_Put] = []
        """Not launched yet."""
        self._pinned: dict[int, Sequence[int]] = {}
        """Pinned blocks of each task."""
        self._give_up_s: float | None = None
        """When vLLM has waited long enough for pinned blocks, if it waits."""

    def bind(self, pool: BlockPool) -> None:
        """Pin blocks of this pool from now on, and let go of them when it is reset.

        A pool with blocks in use refuses, and vLLM asks its connectors only after that.
        """
        self.pool, reset = pool, pool.reset_prefix_cache

        def reset_unpinned() -> bool:
            self.let_go()
            return reset()

        pool.reset_prefix_cache = reset_unpinned  # type: ignore[method-assign]

    @property
    def is_pinning(self) -> bool:
        """Whether GPU blocks are pinned."""
        return bool(self._pinned)

    def is_worth_waiting(self, now: float) -> bool:
        """Return whether vLLM, out of GPU blocks, should wait for pinned ones, not preempt.

        Copies of which none has ended for a while are cancelled: those that have not begun end.
        """
        if not self._pinned:
            return False
        if self._give_up_s is None:
            self._give_up_s = now + _PATIENCE_S
        if now < self._give_up_s:
            return True
        self.cancel()
        return False

    # -- what is stored --------------------------------------------------------------------------

    def admitted(self, request: Any) -> None:
        """Store the request's prompt as soon as it has been computed."""
        num_blocks = request.num_prompt_tokens // self._block_size
        if num_blocks > self._num_offered.get(request.request_id, 0):
            self._prompts[request.request_id] = request

    def scheduled(
        self,
        num_scheduled_tokens: Mapping[str, int],
        block_ids_of: Callable[[str], tuple[Sequence[int], ...]],
    ) -> None:
        """Begin puts of the prompts that the next step completes, with the blocks that it uses."""
        for request_id in [r for r in self._prompts if r in num_scheduled_tokens]:
            request = self._prompts[request_id]
            num_blocks = request.num_prompt_tokens // self._block_size
            num_tokens = num_blocks * self._block_size
            computed = request.num_computed_tokens
            if computed + num_scheduled_tokens[request_id] < num_tokens:
                continue
            del self._prompts[request_id]
            if computed >= num_tokens:
                continue  # all of it came from a cache
            self._match(request, block_ids_of(request_id)[0], 0, num_blocks)
            self._num_offered[request_id] = num_blocks

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """Begin a put of what a finished request has computed since its prompt was stored.

        Args:
            block_ids: Its blocks; none if their contents are unknown.
        """
        self._prompts.pop(request.request_id, None)
        num_offered = self._num_offered.pop(request.request_id, 0)
        # Count only tokens that are certainly computed: no step in flight, no token just sampled.
        num_tokens = min(
            request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
            request.num_tokens - 1,
        )
        num_blocks = min(num_tokens // self._block_size, len(block_ids), len(request.block_hashes))
        if num_blocks <= num_offered:
            return
        if not self._match(request, block_ids, num_offered, num_blocks) and num_offered:
            self._match(request, block_ids, 0, num_blocks)  # the prompt may have been evicted

    def withdraw(self, bad_blocks: Collection[int]) -> None:
        """Take back puts of what the last step computed from blocks that were not loaded."""
        bad = frozenset(bad_blocks)
        for put in self._matched:
            if bad.isdisjoint(put.table):
                continue
            self._cache.cancel(put.task_id)
            self._unpin(put.task_id)
            if self._num_offered.pop(put.request.request_id, None) is not None:
                self._prompts[put.request.request_id] = put.request
        self._matched = [put for put in self._matched if put.task_id in self._pinned]

    def _match(self, request: Any, block_ids: Sequence[int], first: int, stop: int) -> bool:
        """Match a put of blocks ``[first, stop)``, and pin those that will be copied."""
        if self.pool is None:
            return False
        found = self._cache.match_put(request, first, stop)
        if found is None:
            return False
        task_id, wanted = found
        table = block_ids[: wanted.stop]
        put = _Put(task_id, request, table, table[wanted.start :])
        self.pool.touch([self.pool.blocks[block_id] for block_id in put.block_ids])
        self._pinned[task_id] = put.block_ids
        self._matched.append(put)
        return True

    # -- copies ----------------------------------------------------------------------------------

    def launch(self) -> list[int]:
        """Launch what was matched, and return its tasks for the metadata of the next step."""
        matched, self._matched = self._matched, []
        launched = []
        for put in matched:
            if put.task_id not in self._pinned:
                continue  # it has ended meanwhile: cancelled, say
            if self._cache.launch(put.task_id, put.block_ids):
                launched.append(put.task_id)
            else:
                self._unpin(put.task_id)
        return launched

    def release(self) -> bool:
        """Unpin the blocks of puts that ended on every rank; return whether there were any."""
        ended = self._cache.ended(self._pinned) if self._pinned else ()
        for task_id in ended:
            self._unpin(task_id)
        return bool(ended)

    def let_go(self) -> None:
        """Unpin all blocks: wait for what was launched, and store nothing that was not."""
        for put in self._matched:
            self._cache.cancel(put.task_id)
        self._cache.wait_ended(self._pinned, _PATIENCE_S)
        self.cancel()
        self._cache.wait_ended(self._pinned, _PATIENCE_S)
        self.release()

    def cancel(self) -> None:
        """Store nothing that is still being copied. Blocks stay pinned until copies have ended."""
        for task_id in self._pinned:
            self._cache.cancel(task_id)

    def _unpin(self, task_id: int) -> None:
        assert self.pool is not None
        self._give_up_s = None
        blocks = [self.pool.blocks[block_id] for block_id in self._pinned.pop(task_id)]
        self.pool.free_blocks(reversed(blocks))  # vLLM evicts the first of them first

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is remembered or a block is pinned."""
        if self._prompts or self._num_offered or self._matched or self._pinned:
            raise InternalError(f"still open: {list(self._prompts)}, {self._pinned}")
