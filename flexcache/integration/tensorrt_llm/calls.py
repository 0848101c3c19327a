"""RequestCalls: matches of TensorRT-LLM's requests at their cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexcache.errors import FlexCacheError
from flexcache.ids import RequestInfo, TierName
from flexcache.integration.adapter import TaskCalls
from flexcache.integration.tensorrt_llm.requests import describe
from flexcache.logs import log_event
from flexcache.manager import KVManager

logger = logging.getLogger(__name__)

_MAX_PREFETCHES = 4  # at once: they use the disk that puts write to


class RequestCalls(TaskCalls):
    """Calls to one engine's `KVManager`, in blocks of its requests.

    TensorRT-LLM cannot recompute what a load was to bring. So only blocks in DRAM are matched, and
    what is found on SSD or in the remote store is brought to DRAM for requests to come.
    """

    effect_of_lost_load = "the request is not stored"

    def __init__(self, manager: KVManager, block_size: int) -> None:
        super().__init__(manager, block_size)
        self._prefetches: set[int] = set()

    def match_in_dram(
        self, request: Any, scope: Sequence[str], first: int, stop: int
    ) -> tuple[int, int] | None:
        """Match the blocks ``[first, stop)`` of a request that are in DRAM.

        Returns:
            The task and how many blocks it will load; None if there are none.
        """
        found = self._match(request, scope, first, stop)
        if found is None:
            return None
        task_id, num_found, num_in_dram = found
        if num_in_dram < num_found:  # the rest is below
            again = self._match(request, scope, first, first + num_in_dram)
            self.cancel(task_id)
            self._prefetch(request, scope)
            if again is None:
                return None
            task_id, num_found, num_in_dram = again
        if num_in_dram < num_found:
            self.cancel(task_id)
            return None
        return (task_id, num_found) if num_found else None

    def match_put(
        self, request: Any, scope: Sequence[str], num_blocks: int, weights: int
    ) -> tuple[int, range] | None:
        """Match a put of a request's first blocks, computed with weights of this generation.

        Returns:
            The task, and which blocks will be copied; None if there is nothing to store.
        """
        tokens = request.get_tokens(0)[: num_blocks * self._block_size]
        try:
            task_id, wanted = self.manager.put_match(
                tokens, namespace=scope, request_info=self._info(request), weights=weights
            )
        except (FlexCacheError, ValueError) as error:
            self._log("put_failed", request, error)
            return None
        if not wanted.any():
            return None
        begin = int(wanted.argmax()) // self._block_size
        return task_id, range(begin, begin + int(wanted.sum()) // self._block_size)

    def _match(
        self, request: Any, scope: Sequence[str], first: int, stop: int
    ) -> tuple[int, int, int] | None:
        """Return a task, and how many blocks it finds in all and in DRAM."""
        tokens = request.get_tokens(0)[: stop * self._block_size]
        mask = np.ones(len(tokens), dtype=np.bool_)
        mask[: first * self._block_size] = False
        try:
            matched = self.manager.get_match_by_tier(
                tokens, mask, namespace=scope, request_info=self._info(request), look_up=False
            )
        except (FlexCacheError, ValueError) as error:
            self._log("match_failed", request, error)
            return None
        assert matched is not None  # the remote store was not asked
        task_id, found, sources = matched
        in_dram = sources.get(TierName.CPU, 0) // self._block_size
        return task_id, int(found.sum()) // self._block_size, in_dram

    def _prefetch(self, request: Any, scope: Sequence[str]) -> None:
        self._prefetches.difference_update(self.ended(self._prefetches))
        if len(self._prefetches) >= _MAX_PREFETCHES:
            return
        try:
            self._prefetches.add(
                self.manager.prefetch_async(request.get_tokens(0), namespace=scope)
            )
        except (FlexCacheError, ValueError) as error:
            self._log("prefetch_failed", request, error)

    def _info(self, request: Any) -> RequestInfo | None:
        return describe(request) if self.manager.wants_request_info else None

    def _log(self, event: str, request: Any, error: Exception) -> None:
        log_event(logger, logging.WARNING, event, request=request.request_id, error=error)
