"""PageCalls: the linker's calls of the cache about pages, by SGLang's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flexcache.cache.block_keys import PromptContent
from flexcache.ids import TierName
from flexcache.integration.adapter import TaskCalls, safely
from flexcache.integration.sglang.page_tables import NO_BLOCKS, Blocks
from flexcache.integration.sglang.rank_cache import RankCache


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
