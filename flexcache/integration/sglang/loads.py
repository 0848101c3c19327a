"""Loads of SGLang's pages: calls of the cache about them, and what the model waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexcache.client.rank import KVTPClient
from flexcache.ids import TierName
from flexcache.integration.adapter import TaskCalls, safely
from flexcache.integration.sglang.pools import NO_BLOCKS, Blocks
from flexcache.integration.sglang.rank import Pages, RankCache
from flexcache.transfer.gates import LayerLoad


class PageMatch(NamedTuple):
    """A matched task.

    Attributes:
        num_in_dram: How many of its pages DRAM has.
        is_in_dram: Whether DRAM has all that it would load.
    """

    task_id: int
    num_pages: int
    num_in_dram: int
    is_in_dram: bool


class PageCalls(TaskCalls):
    """Calls to one rank's cache. None of them raises: the cache may fail, requests must not."""

    def __init__(self, cache: RankCache) -> None:
        super().__init__(cache.manager, cache.page_size)
        self._cache = cache

    def match(self, pages: Pages, look_up: bool = False) -> PageMatch | None:
        """Find the longest prefix of some pages that can be loaded.

        Args:
            look_up: Whether to ask the remote store, which answers a later call.
        """
        prompt = self._cache.prompt(pages)
        found = safely(self.manager.get_match_by_tier, look_up=look_up, **prompt)
        if found is None:
            return None
        task_id, mask, sources = found
        num_in_dram = sources.get(TierName.CPU, 0) // self._block_size
        is_in_dram = sources.keys() <= {TierName.CPU}
        return PageMatch(task_id, self._cache.num_pages(mask), num_in_dram, is_in_dram)

    def prefetch(self, pages: Pages) -> int | None:
        """Bring pages to DRAM, where they stay until the task ends."""
        task_id: int | None = safely(self.manager.prefetch_async, **self._cache.prompt(pages))
        return task_id

    def pin(self, pages: Pages) -> PageMatch | None:
        """Find the longest prefix that DRAM has, which is pinned until the task ends."""
        while pages.keys:
            found = self.match(pages)
            if found is None:
                return None
            if found.is_in_dram and found.num_pages:
                return found
            self.cancel(found.task_id)
            shorter = min(found.num_in_dram, found.num_pages - 1)  # with tails, before this one
            pages = pages.first(max(0, shorter))
        return None

    def are_in_dram(self, pages: Pages) -> bool:
        if (found := self.match(pages)) is None:
            return False
        self.cancel(found.task_id)
        return found.is_in_dram and found.num_pages == len(pages.keys)

    def put(self, pages: Pages, blocks: Blocks, tail: Sequence[Blocks] | None) -> int | None:
        """Copy those of some pages that are not cached, and the tail behind them.

        Args:
            blocks: The pages on the GPU.
            tail: As `PageTables.tail`.

        Returns:
            A task, whose gate is shut; None if there is nothing to copy.
        """
        size = self._block_size
        tail_at = len(pages.keys) * size if tail else None
        found = safely(self.manager.put_match, tail_at=tail_at, **self._cache.prompt(pages))
        if found is None or not (found[1].any() or tail):
            return None
        task_id: int = found[0]
        wanted = found[1][: len(pages.keys) * size : size]
        tables = [blocks[wanted], *(tail or ())]
        without_tail = [NO_BLOCKS] * (len(self.manager.model_config.groups) - len(tables))
        return task_id if self.launch(task_id, [*tables, *without_tail]) else None

    def hold(self, task_id: int, tables: Sequence[Blocks], timeout_s: float) -> bool:
        """Launch a load behind a gate; return whether the rank holds it within ``timeout_s``, so
        that it ends even if the server is lost."""
        num_blocks = sum(map(len, tables))
        return self.launch(task_id, tables) and self._cache.client.wait_held(
            task_id, num_blocks, timeout_s
        )

    def drop(self, task_id: int) -> None:
        """End a load whose gate is not going to be opened."""
        self._cache.client.forgo([task_id])
        self.cancel(task_id)


_PATIENCE_S = 1.0


class WholeLoad:
    """A launched load whose gate is opened by making this.

    It has what SGLang's KV pools and `LayerWaits` need of a `LayerLoad`, for models with several
    groups: their blocks are not loaded layer by layer.

    Args:
        cancel: Has a task end, copies under way included.
    """

    def __init__(self, client: KVTPClient, task_id: int, cancel: Callable[[int], None]) -> None:
        self._client = client
        self._task_id = task_id
        self._cancel = cancel
        self._num_ok: int | None = None
        client.open_gates([task_id])

    def wait_layer(self, name: str, timeout: float) -> bool:
        """Wait for all layers; return whether they are loaded."""
        return self.wait_all(timeout)

    def wait_all(self, timeout: float) -> bool:
        deadline_s = time.monotonic() + timeout
        while self._num_ok is None:
            self._num_ok = self._client.take_ended([self._task_id]).get(self._task_id)
            left_s = deadline_s - time.monotonic()
            if self._num_ok is not None or left_s <= 0:
                break
            self._client.wait_ended(left_s, [self._task_id])
        return bool(self._num_ok)  # all or nothing

    def give_up(self) -> None:
        """End the load: no copy runs afterwards, and none starts."""
        self._cancel(self._task_id)
        while self._num_ok is None:  # every op has a deadline
            self.wait_all(_PATIENCE_S)


Load = LayerLoad | WholeLoad


@dataclass(slots=True)
class _Forward:
    """A forward pass: its loads, and whether it has computed with a layer before it was loaded."""

    loads: Sequence[Load]
    deadline_s: float
    is_late: bool = False

    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())


class LayerWaits:
    """The loads of one forward pass at a time. Used on the model's thread only.

    Args:
        names: Names of the tensors that each layer reads, in the order in which they are loaded.
        timeout_s: Limit on all waiting in one forward pass.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], timeout_s: float) -> None:
        self._last_names = {layer: of_layer[-1] for layer, of_layer in names.items()}
        self._timeout_s = timeout_s
        self._running: dict[int, _Forward] = {}
        self._num_batches = 0
        self.consumer_index = -1

    @property
    def is_busy(self) -> bool:
        """Whether a forward pass that was added has not been finished."""
        return bool(self._running)

    def add(self, loads: Sequence[Load]) -> int:
        """Take the loads of the next forward pass; return its index."""
        index = self._num_batches
        self._num_batches += 1
        self._running[index] = _Forward(loads, time.monotonic() + self._timeout_s)
        return index

    def set_consumer(self, index: int) -> None:
        """Say which forward pass runs; -1 if it loads nothing."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer. If it does not come in time, `finish` says so, even if it comes yet."""
        running = self._running.get(self.consumer_index)
        if running is None:
            return
        name = self._last_names.get(layer, "")
        for load in running.loads:
            if not load.wait_layer(name, running.left_s()):
                running.is_late = True

    def finish(self, index: int) -> bool:
        """End a forward pass; return whether every layer was loaded before the model read it. No
        copy is running afterwards."""
        running = self._running.get(index)
        if running is None:
            return True
        landed = not running.is_late
        for load in running.loads:
            if not load.wait_all(running.left_s()):
                load.give_up()
                landed = False
        del self._running[index]
        return landed

    def reset(self) -> None:
        """End every forward pass."""
        for index in list(self._running):
            self.finish(index)
        self.consumer_index = -1
