"""Puts of a request's blocks by reference, while vLLM goes on using or freeing them.

A request is stored at some points while it runs (`PutPoints`), at states that vLLM hands over, and
when it ends. The blocks to be copied are pinned in vLLM's block pool, so neither the request's end
nor its preemption, nor a window that slides on, waits for the copy:

    step past a point scheduled, or request finished
      --> matched, and the blocks pinned
      --> launched, and announced in the next step's metadata: its blocks are complete by then
      --> ended on every rank: unpinned
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flexcache.config.model import KVGroup
from flexcache.errors import InternalError
from flexcache.integration.vllm.calls import CacheCalls, read_hints
from flexcache.integration.vllm.groups import NULL_BLOCK, BlockTables, Tables

_MIN_INTERVAL = 512  # tokens
_WINDOWS_PER_INTERVAL = 4


@dataclass(frozen=True)
class PutPoints:
    """The rule of one engine.

    Windows slide and states are replaced while a request runs, so what they hold at a point is
    copied in the step that computes past it:

      prompt ##################|  answer ......................
             |        |      | |         |                   |
             |        |      | |         interval            request's end: the last position there
             |        |      | prompt's end
             |        |      the last position below it: a repeated prompt resumes here
             |        every `tail_interval_tokens`
             where other prompts part from this one, if vLLM has noticed

    Models of full attention resume anywhere. They need the prompt's end, the request's, and between
    them a point every ``answer_interval``, for the sake of engines that die:

      prompt ##################|  answer ......................
                             |            |            |     |
                  prompt's end            +------------+     request's end
                                          every `answer_interval_tokens`

    If another engine waits for the prompt, each step's part of it is stored.

    Pure: no clock, no I/O.

    Attributes:
        position: Tokens between the positions where prefixes can end.
        interval: Tokens between tails; 0 if prompts can be resumed anywhere.
        answer_interval: Of such a model, tokens between points within an answer; 0 for no points.
        tokens_per_step: The most that a step adds to an answer, drafts included.
    """

    position: int
    interval: int = 0
    answer_interval: int = 0
    tokens_per_step: int = 1

    def next(
        self, num_tokens: int, num_prompt_tokens: int, junction: int = 0, hands_over: bool = False
    ) -> int | None:
        """Return the first point behind ``num_tokens`` at which a request is stored.

        Args:
            junction: Tokens that the prompt shares with others, as far as known.
            hands_over: Whether another engine waits for the prompt.
        """
        if not self.interval:
            end = self.floor(num_prompt_tokens)
            if end > num_tokens:
                soon = self.floor(num_tokens + max(_MIN_INTERVAL, self.position))
                return min(end, soon) if hands_over else end
            if not self.answer_interval:
                return None
            return self.floor(num_tokens) + max(self.position, self.floor(self.answer_interval))
        points = (
            self.floor(num_prompt_tokens - 1),  # the last token is always computed
            self.floor(junction),
            (num_tokens // self.interval + 1) * self.interval,
        )
        return min(point for point in points if point > num_tokens)

    def floor(self, num_tokens: int) -> int:
        """Return the last position that ``num_tokens`` reach."""
        return num_tokens // self.position * self.position


def tail_interval(
    groups: Sequence[KVGroup], position: int, tail_interval_tokens: int | None = None
) -> int:
    """Return tokens between tails: those set, in whole positions; 0 for a model without tails.

    By default four windows, so that tails cost a quarter of keeping all of the windows' KV.
    """
    if all(group.is_dense for group in groups):
        return 0
    window = max(group.window for group in groups)
    wanted = tail_interval_tokens or max(_MIN_INTERVAL, _WINDOWS_PER_INTERVAL * window)
    return -(-wanted // position) * position


_LONGEST_FAR = 256  # steps
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
        table: GPU blocks of its first group, to the last that is copied if there are no others.
        blocks: GPU blocks that are copied, per group.
    """

    task_id: int
    request: Any
    table: Sequence[int]
    blocks: list[list[int]]

    @property
    def block_ids(self) -> list[int]:
        if len(self.blocks) == 1:
            return self.blocks[0]
        return [block_id for blocks in self.blocks for block_id in blocks]


@dataclass(slots=True)
class _Running:
    """A request that is stored at ``point`` tokens; None if vLLM says where."""

    request: Any
    point: int | None


class Puts:
    """The puts of one engine, from the match until the blocks are unpinned.

    Attributes:
        pool: vLLM's block pool, once bound.
    """

    def __init__(self, cache: CacheCalls, tables: BlockTables, points: PutPoints) -> None:
        self._cache = cache
        self._tables = tables
        self._points = points
        self.pool: BlockPool | None = None
        self._running: dict[str, _Running] = {}
        """Admitted requests that are not over, and are to be stored before they are."""
        self._near: dict[str, _Running] = {}
        """Those of them that the next step may bring to their point."""
        self._far: dict[int, list[_Running]] = {}
        """The others, by the step that may: a look at each of them in each step would delay it.
        Those that have ended meanwhile, too."""
        self._num_steps = 0
        self._unscheduled: set[str] = set()
        """Admitted requests that no step was scheduled for since: KV may be on its way to them, by
        other connectors too, which counts as computed already."""
        self._num_offered: dict[str, int] = {}
        """How many tokens of a request the cache was offered."""
        self._matched: list[_Put] = []
        """Not launched yet."""
        self._pinned: dict[int, Sequence[int]] = {}
        """Pinned blocks of each task."""
        self._to_pin: dict[int, Callable[[], object]] = {}
        """The call that pins a prompt when this task has ended; its request may have by then."""
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
        """Store the request at its points from now on, or again after it was preempted."""
        self._unscheduled.add(request.request_id)
        num_offered = self._num_offered.get(request.request_id, 0)
        self._set_point(_Running(request, None), num_offered)

    def _set_point(self, running: _Running, num_tokens: int) -> None:
        """Set the first point behind ``num_tokens``, or forget the request if there is none."""
        request = running.request
        if not self._tables.has_states:  # else vLLM says where
            junction = getattr(request, "shared_prefix_boundary", 0)
            running.point = self._points.next(
                num_tokens, request.num_prompt_tokens, junction, read_hints(request).hands_over
            )
            if running.point is None:
                self._forget(request.request_id)
                return
            self._near[request.request_id] = running
        self._running[request.request_id] = running

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._near.pop(request_id, None)

    def scheduled(self, step: Any) -> None:
        """Begin puts of what the next step completes, with the blocks that it uses.

        Args:
            step: vLLM's `SchedulerOutput`.
        """
        self._num_steps += 1
        for running in self._far.pop(self._num_steps, ()):
            if self._running.get(running.request.request_id) is running:
                self._near[running.request.request_id] = running
        blocks = getattr(step, "kv_connector_block_state", None)
        if blocks is not None:  # vLLM 0.32 and later
            self._store_completed(step, blocks)
        if self._unscheduled:
            self._unscheduled.difference_update(step.num_scheduled_tokens)

    def _store_completed(self, step: Any, blocks: Any) -> None:
        num_scheduled_tokens: Mapping[str, int] = step.num_scheduled_tokens
        drafts = step.scheduled_spec_decode_tokens
        for request_id in [r for r in self._near if r in num_scheduled_tokens]:
            num_tokens, has_drafts = num_scheduled_tokens[request_id], bool(drafts.get(request_id))
            self._look_at(self._near[request_id], num_tokens, has_drafts, blocks)
        for request_id, states in blocks.boundary_state_offloads.items():
            if request_id in self._running:
                request = self._running[request_id].request
                self._store_states(request, states, blocks.get_block_ids(request_id))

    def _look_at(self, running: _Running, num_tokens: int, has_drafts: bool, blocks: Any) -> None:
        """Store a request at the points that it comes to with ``num_tokens`` more."""
        request, computed = running.request, running.request.num_computed_tokens
        if request.request_id in self._unscheduled:  # what it has computed came from a cache
            while running.point is not None and running.point <= computed:
                self._set_point(running, running.point)
        num_reached = num_certain = computed + num_tokens
        if running.point is not None and running.point <= num_reached:
            if has_drafts:  # some may be rejected
                num_certain = computed - getattr(request, "num_in_flight_tokens", 0)
            self._store_until(running, num_certain, blocks.get_block_ids(request.request_id))
        if running.point is None or num_reached < request.num_tokens:
            return
        # From now on it computes what it generates, and is at its point after so many steps. It is
        # looked at in between, or it would be kept for as long after its end.
        num_steps = (running.point - num_reached) // self._points.tokens_per_step
        if num_steps > 1:
            del self._near[request.request_id]
            step = self._num_steps + min(num_steps, _LONGEST_FAR)
            self._far.setdefault(step, []).append(running)

    def _store_until(self, running: _Running, num_certain: int, tables: Tables) -> None:
        """Store a request at its points up to ``num_certain`` tokens."""
        num_keys = len(self._cache.keys(running.request))  # of an engine that schedules ahead, less
        num_certain = min(num_certain, num_keys * self._points.position)
        while (point := running.point) is not None and point <= num_certain:
            self._set_point(running, point)
            has_more = running.point is not None and running.point <= num_certain
            if self._tables.has_tails or not has_more:  # the last point's blocks include the others
                self._offer(running.request, self._tables.select(tables), point)

    def _store_states(
        self, request: Any, states: Sequence[tuple[int, int, int]], tables: Tables
    ) -> None:
        """Store a request where vLLM hands over its states: (group, block, tokens) each."""
        num_keys = len(self._cache.keys(request))
        by_point: dict[int, dict[int, int]] = {}
        for group, block_id, num_tokens in states:
            # States within a block are overwritten by the next step.
            if self._points.floor(num_tokens) == num_tokens <= num_keys * self._points.position:
                by_point.setdefault(num_tokens, {})[group] = block_id
        for num_tokens, blocks in sorted(by_point.items()):
            self._offer(request, self._tables.select(tables), num_tokens, blocks)

    def finished(self, request: Any, tables: Tables) -> None:
        """Begin a put of what a finished request has computed since it was last stored.

        Args:
            tables: Its blocks; none if their contents are unknown.
        """
        self._forget(request.request_id)
        if request.request_id in self._unscheduled:  # aborted while a connector loads it, say
            self._unscheduled.remove(request.request_id)
            tables = ()  # they may hold nothing yet
        # Count only tokens that are certainly computed: no step in flight, no token just sampled.
        num_tokens = min(
            request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
            request.num_tokens - 1,
            len(self._cache.keys(request)) * self._points.position,
        )
        if tables:
            num_tokens = min(num_tokens, self._tables.num_tokens(tables))
        stop = self._points.floor(num_tokens)
        if tables and stop > self._num_offered.get(request.request_id, 0):
            self._offer(request, tables, stop)
        self._num_offered.pop(request.request_id, None)

    def withdraw(self, bad_blocks: Collection[int]) -> None:
        """Take back puts of what the last step computed from blocks that were not loaded."""
        bad = frozenset(bad_blocks)
        for put in self._matched:
            if bad.isdisjoint(put.table):
                continue
            self._cache.cancel(put.task_id)
            self._unpin(put.task_id)
            if self._num_offered.pop(put.request.request_id, None) is not None:
                self.admitted(put.request)
        self._matched = [put for put in self._matched if put.task_id in self._pinned]

    def _offer(
        self, request: Any, tables: Tables, stop: int, states: Mapping[int, int] | None = None
    ) -> None:
        """Match a put of the first ``stop`` tokens, of which most may have been offered before.

        Args:
            states: Blocks with the states there, by the group's number.
        """
        # None while the ranks may yet confirm its adapter: then it is stored when it ends.
        limit = self._points.floor(self._cache.max_stored(request))
        num_offered = self._num_offered.get(request.request_id, 0)
        if stop > limit:
            if limit <= num_offered or self._tables.has_tails:  # no hit could end at the limit
                return
            stop = limit
        tail = self._tables.tail(tables, stop, states or {})
        if self.pool is None or tail is None:
            return
        self._num_offered[request.request_id] = max(stop, num_offered)
        # An answer is offered behind its prompt, so that one request counts as one sighting where
        # what is stored depends on them. A preempted request comes here again.
        first = num_offered if num_offered < stop else 0
        task_id = self._match(request, tables, first, stop, tail)
        if task_id is None and first:  # what came before may have been evicted
            task_id = self._match(request, tables, 0, stop, tail)
        end = min(limit, self._points.floor(request.num_prompt_tokens - self._tables.has_tails))
        if num_offered < end <= stop:
            self._pin_prompt(request, task_id)

    def _pin_prompt(self, request: Any, task_id: int | None) -> None:
        """Have the cache pin a request's prompt, once this task has stored what it lacked of it."""
        pin = self._cache.to_pin(request)
        if pin is None:
            return
        if task_id is None:
            pin()
        else:
            self._to_pin[task_id] = pin

    def _match(
        self, request: Any, tables: Tables, first: int, stop: int, tail: list[list[int]]
    ) -> int | None:
        """Match a put of tokens ``[first, stop)``, and pin the blocks that will be copied. Returns
        its task; None if nothing will be."""
        assert self.pool is not None
        size = self._points.position
        found = self._cache.match_put(request, first // size, stop // size, self._tables.has_tails)
        if found is None:
            return None
        task_id, wanted = found
        dense = self._tables.dense(tables, wanted.start * size, wanted.stop * size)
        if any(NULL_BLOCK in blocks for blocks in dense):  # what windows of answers leave is gone
            self._cache.cancel(task_id)
            return None
        blocks = [*map(list.__add__, dense, tail)]  # a group has one or the other
        put = _Put(task_id, request, tables[0][: wanted.stop], blocks)
        # Holding back the finished request instead would keep all of its blocks, also those that
        # are cached already, and could not store a prompt whose answer is still generated. Watching
        # blocks for reuse would need a way to stop copies in other processes at once.
        self.pool.touch([self.pool.blocks[block_id] for block_id in put.block_ids])
        self._pinned[task_id] = put.block_ids
        self._matched.append(put)
        return task_id

    # -- copies ----------------------------------------------------------------------------------

    def launch(self) -> list[int]:
        """Launch what was matched, and return its tasks for the metadata of the next step."""
        matched, self._matched = self._matched, []
        # The others have ended meanwhile: they were cancelled, say.
        blocks = {put.task_id: put.blocks for put in matched if put.task_id in self._pinned}
        launched = self._cache.launch_all(blocks) if blocks else []
        for task_id in blocks:
            if task_id not in launched:
                self._unpin(task_id)
        return launched

    def release(self) -> bool:
        """Unpin the blocks of puts that ended on every rank; return whether there were any."""
        ended = self._cache.ended(self._pinned) if self._pinned else ()
        for task_id in ended:
            pin = self._to_pin.get(task_id)
            self._unpin(task_id)
            if pin is not None:
                pin()
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
        self._to_pin.pop(task_id, None)
        blocks = [self.pool.blocks[block_id] for block_id in self._pinned.pop(task_id)]
        self.pool.free_blocks(reversed(blocks))  # vLLM evicts the first of them first

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is remembered or a block is pinned."""
        requests = {*self._running, *self._near, *self._unscheduled, *self._num_offered}
        if requests or self._matched or self._pinned or self._to_pin:
            raise InternalError(f"still open: {requests}, {self._pinned}, {[*self._to_pin]}")
