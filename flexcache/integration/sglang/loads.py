"""Loads of SGLang's pages: what look-ups have found and pinned, and what the model waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flexcache.cache.block_keys import PromptContent
from flexcache.client.rank import KVTPClient
from flexcache.ids import TierName
from flexcache.integration.adapter import TaskCalls, safely
from flexcache.integration.sglang.pools import NO_BLOCKS, Blocks
from flexcache.integration.sglang.rank import RankCache
from flexcache.transfer.gates import LayerLoad


class Pages(NamedTuple):
    """Pages of a prompt.

    Attributes:
        parent_key: Key of the page before them; None at the start of the prompt.
        num_before: How many pages are before them.
        content: What is known of the prompt from the first of them on, for KV events.
        session_id: Whose prompt it is.
    """

    keys: Sequence[str]
    parent_key: str | None = None
    num_before: int = 0
    content: PromptContent | None = None
    session_id: str | None = None

    def first(self, count: int) -> Pages:
        return self._replace(keys=self.keys[:count])


class Match(NamedTuple):
    """A matched task.

    Attributes:
        num_in_dram: How many of its pages DRAM has.
        is_in_dram: Whether DRAM has all that it would load.
    """

    task_id: int
    num_pages: int
    num_in_dram: int
    is_in_dram: bool


class PageCalls:
    """Calls to one rank's cache. None of them raises: the cache may fail, requests must not."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._tasks = TaskCalls(cache.manager, cache.page_size)
        self.cancel = self._tasks.cancel
        self.promise = self._tasks.promise
        self.end_promises = self._tasks.end_promises

    def match(self, pages: Pages) -> Match | None:
        """Find the longest prefix of some pages that can be loaded."""
        found = safely(self._cache.manager.get_match_by_tier, look_up=False, **self._prompt(pages))
        if found is None:
            return None
        task_id, mask, sources = found
        num_pages = self._cache.num_pages(mask)
        num_in_dram = sources.get(TierName.CPU, 0) // self._cache.page_size
        return Match(task_id, num_pages, num_in_dram, sources.keys() <= {TierName.CPU})

    def pin(self, pages: Pages) -> Match | None:
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
        size = self._cache.page_size
        tail_at = len(pages.keys) * size if tail else None
        found = safely(self._cache.manager.put_match, tail_at=tail_at, **self._prompt(pages))
        if found is None or not (found[1].any() or tail):
            return None
        task_id: int = found[0]
        wanted = found[1][: len(pages.keys) * size : size]
        tables = [blocks[wanted], *(tail or ())]
        return task_id if self.launch(task_id, tables) else None

    def launch(self, task_id: int, tables: Sequence[Blocks]) -> bool:
        """Launch a task behind a gate; if that fails, it has ended."""
        num_groups = max(1, len(self._cache.manager.model_config.groups))
        without_tail = [NO_BLOCKS] * (num_groups - len(tables))
        return self._tasks.launch(task_id, [*tables, *without_tail])

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

    def _prompt(self, pages: Pages) -> dict[str, Any]:
        parent = None if pages.parent_key is None else bytes.fromhex(pages.parent_key)
        keys = [bytes.fromhex(key) for key in pages.keys]
        prompt = self._cache.prompt(keys, parent, content=pages.content)
        return {**prompt, "session_id": pages.session_id}


_MAX_PLACES = 16
"""Tails offered to the other ranks for one prompt, the last ones."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    pages: Pages
    matched_s: float
    tasks: dict[int, int]
    """Tasks by how many pages they load, the longest first."""


class PinnedPages:
    """The pinned pages of one rank's requests.

    one group       1 2 3 4 5 .. n    every length up to the longest can be loaded: one task
    with tails        2     5    n    only up to a tail: a task for each, if other ranks may have
                                      less; the ranks then agree on the longest that all have

    Args:
        has_tails: Whether only some lengths can be loaded.
        has_peers: Whether other ranks may have less.
        pin_s: How long pages stay pinned; an older look-up is repeated.
    """

    def __init__(self, calls: PageCalls, has_tails: bool, has_peers: bool, pin_s: float) -> None:
        self._calls = calls
        self._has_tails = has_tails
        self._max_places = _MAX_PLACES if has_tails and has_peers else 1
        self._pin_s = pin_s
        self._pinned: dict[str, _Pinned] = {}

    def find(self, rid: str, pages: Pages) -> list[int]:
        """Pin what DRAM has of a request's pages; return how many can be loaded: all that apply."""
        now = time.monotonic()
        pinned = self._pinned.get(rid)
        if pinned is not None and (pinned.pages != pages or now - pinned.matched_s > self._pin_s):
            self.release(rid)
            pinned = None
        if pinned is None:
            tasks = self._pin(pages)
            if not tasks:
                return []
            pinned = self._pinned[rid] = _Pinned(pages, now, tasks)
        if self._has_tails:
            return sorted(pinned.tasks)
        return list(range(1, next(iter(pinned.tasks)) + 1))

    def longest(self, rid: str) -> int:
        """Return how many pages are pinned for a request."""
        pinned = self._pinned.get(rid)
        return 0 if pinned is None else next(iter(pinned.tasks))

    def take(self, rid: str, num_pages: int) -> tuple[int, Pages] | None:
        """Return the task that loads so many pages, which is now the caller's, and the pages."""
        pinned = self._pinned.pop(rid, None)
        if pinned is None:
            return None
        task_id = pinned.tasks.pop(num_pages, None)
        if task_id is None:  # another rank has fewer
            found = self._calls.pin(pinned.pages.first(num_pages))
            if found is not None and found.num_pages == num_pages:
                task_id = found.task_id
            elif found is not None:
                self._calls.cancel(found.task_id)
        self._cancel(pinned)
        return None if task_id is None else (task_id, pinned.pages)

    def release(self, rid: str) -> None:
        """Unpin what was found for a request."""
        pinned = self._pinned.pop(rid, None)
        if pinned is not None:
            self._cancel(pinned)

    def reset(self) -> None:
        for rid in list(self._pinned):
            self.release(rid)

    def _pin(self, pages: Pages) -> dict[int, int]:
        tasks: dict[int, int] = {}
        while len(tasks) < self._max_places:
            found = self._calls.pin(pages)
            if found is None:
                break
            tasks[found.num_pages] = found.task_id
            pages = pages.first(found.num_pages - 1)
        return tasks

    def _cancel(self, pinned: _Pinned) -> None:
        for task_id in pinned.tasks.values():
            self._calls.cancel(task_id)


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


class LayerWaits:
    """The loads of one forward pass at a time. Used on the model's thread only.

    Args:
        names: Names of the tensors that each layer reads, in the order in which they are loaded.
        timeout_s: Limit on all waiting in one forward pass.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], timeout_s: float) -> None:
        self._last_names = {layer: of_layer[-1] for layer, of_layer in names.items()}
        self._timeout_s = timeout_s
        self._loads: dict[int, Sequence[Load]] = {}
        self._deadlines_s: dict[int, float] = {}
        self._late: set[int] = set()
        """Forward passes that have computed with a layer before it was loaded."""
        self._num_batches = 0
        self.consumer_index = -1

    @property
    def is_busy(self) -> bool:
        """Whether a forward pass that was added has not been finished."""
        return bool(self._loads)

    def add(self, loads: Sequence[Load]) -> int:
        """Take the loads of the next forward pass; return its index."""
        index = self._num_batches
        self._num_batches += 1
        self._loads[index] = loads
        self._deadlines_s[index] = time.monotonic() + self._timeout_s
        return index

    def set_consumer(self, index: int) -> None:
        """Say which forward pass runs; -1 if it loads nothing."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer. If it does not come in time, `finish` says so, even if it comes yet."""
        index = self.consumer_index
        name = self._last_names.get(layer, "")
        for load in self._loads.get(index, ()):
            if not load.wait_layer(name, self._left_s(index)):
                self._late.add(index)

    def finish(self, index: int) -> bool:
        """End a forward pass; return whether every layer was loaded before the model read it. No
        copy is running afterwards."""
        landed = index not in self._late
        for load in self._loads.get(index, ()):
            if not load.wait_all(self._left_s(index)):
                load.give_up()
                landed = False
        self._loads.pop(index, None)
        self._deadlines_s.pop(index, None)
        self._late.discard(index)
        return landed

    def reset(self) -> None:
        """End every forward pass."""
        for index in list(self._loads):
            self.finish(index)
        self.consumer_index = -1

    def _left_s(self, index: int) -> float:
        return max(0.0, self._deadlines_s[index] - time.monotonic())
