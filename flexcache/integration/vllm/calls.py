"""CacheCalls: an engine's calls to its cache, in terms of vLLM's requests and blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from flexcache.errors import FlexCacheError
from flexcache.ids import OpKind, TierName
from flexcache.integration.counters import read_counters
from flexcache.integration.safe_calls import safely
from flexcache.integration.task_calls import TaskCalls
from flexcache.integration.vllm.kv_events import read_request_info
from flexcache.integration.vllm.request_hints import (
    read_namespace,
    read_retention,
    read_session_end,
    read_session_id,
)
from flexcache.logs import log_event
from flexcache.manager import KVManager
from flexcache.request_info import RequestInfo, check_request_info

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A matched task, the tokens that it will load, and how many of them each tier supplies."""

    task_id: int
    num_tokens: int
    sources: dict[TierName, int]


class NoMatch(Enum):
    """Why there is no task."""

    FAILED = "the call failed"
    UNDECIDED = "the remote store has yet to answer"


class CacheCalls(TaskCalls):
    """Calls to one engine's `KVManager`.

    Args:
        block_size: Tokens between the positions where prefixes can end.
        namespace: Keeps the engine's keys apart from those of engines with other hashes. A request
            may put its own before it.
        keys_per_position: Block hashes that vLLM makes of so many tokens.
    """

    effect_of_lost_load = "vLLM computes it"

    def __init__(
        self,
        manager: KVManager,
        block_size: int,
        namespace: Sequence[str],
        keys_per_position: int = 1,
    ) -> None:
        super().__init__(manager, block_size)
        self._namespace = namespace
        self._keys_per_position = keys_per_position

    def keys(self, request: Any) -> Sequence[bytes]:
        """Return the keys of a request's positions. vLLM may hash parts of them, chained."""
        if self._keys_per_position == 1:
            return request.block_hashes  # type: ignore[no-any-return]
        keys: Sequence[bytes] = request.block_hashes[
            self._keys_per_position - 1 :: self._keys_per_position
        ]
        return keys

    def match(
        self, request: Any, num_computed: int, num_tokens: int, look_up: bool
    ) -> Found | NoMatch:
        """Match a request's tokens ``[num_computed, num_tokens)``.

        Args:
            look_up: Whether the remote store may be asked first.
        """
        try:
            matched = self._manager.get_match_by_tier(
                request.all_token_ids,
                range(num_computed, num_tokens),
                namespace=self._namespace_of(request),
                block_keys=self.keys(request),
                request_info=self._info(request),
                look_up=look_up,
                session_id=read_session_id(request),
                awaits_loads=True,
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "match_failed", request=request.request_id, error=error
            )
            return NoMatch.FAILED
        if matched is None:
            return NoMatch.UNDECIDED
        task_id, found, sources = matched
        return Found(task_id, int(np.count_nonzero(found)), sources)

    def prefetch(self, request: Any, num_on_gpu: int) -> int | None:
        """Begin to bring a request's blocks to DRAM, unless vLLM has them; return the task, None if
        the remote store has yet to answer."""
        mask = np.ones(request.num_tokens, dtype=np.bool_)
        mask[: num_on_gpu * self._block_size] = False
        task_id: int | None = safely(
            self._manager.prefetch_nowait,
            request.all_token_ids,
            mask,
            namespace=self._namespace_of(request),
            block_keys=self.keys(request),
            session_id=read_session_id(request),
        )
        return task_id

    def look_up(self, request: Any) -> None:
        """Begin to ask the remote store about a request that vLLM will ask about."""
        safely(
            self._manager.get_match_by_tier,
            request.all_token_ids,
            namespace=self._namespace_of(request),
            block_keys=self.keys(request),
            look_up="only",
        )

    def match_put(
        self, request: Any, first: int, stop: int, has_tail: bool = False
    ) -> tuple[int, range] | None:
        """Match a put of a request's blocks ``[first, stop)``.

        Args:
            has_tail: Whether the tail behind them is stored, too.

        Returns:
            The task, and which of its blocks will be copied: perhaps none besides the tail. None if
            there is nothing to store.
        """
        try:
            task_id, wanted = self._manager.put_match(
                request.all_token_ids,
                range(first * self._block_size, stop * self._block_size),
                namespace=self._namespace_of(request),
                block_keys=self.keys(request),
                tail_at=stop * self._block_size if has_tail else None,
                request_info=self._info(request),
                session_id=read_session_id(request),
                **read_retention(request),
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "put_failed", request=request.request_id, error=error
            )
            return None
        num_wanted = int(np.count_nonzero(wanted))
        if not num_wanted:
            is_over = not has_tail or bool(self.ended([task_id]))
            return None if is_over else (task_id, range(stop, stop))
        begin = int(wanted.argmax()) // self._block_size
        return task_id, range(begin, begin + num_wanted // self._block_size)

    def session_ended(self, request: Any) -> None:
        """Pass on what an ended request says of its session."""
        end = read_session_end(request)
        if end is not None:
            safely(
                self._manager.session_hint,
                end.session_id,
                over=end.over,
                returns_in_s=end.returns_in_s,
            )

    def read_counters(self) -> Mapping[str, float] | None:
        """Read the counters that vLLM reports; None if the server does not answer."""
        try:
            return read_counters(self._manager.stats(), self._block_size)
        except FlexCacheError:
            return None

    def read_loads(self) -> tuple[int, float] | None:
        """Return how many tokens were loaded from DRAM and the seconds in which loads ran, since
        startup; None if the server does not answer."""
        try:
            loads = self._manager.stats()["engine"]["ops"][OpKind.H2D.value]
        except FlexCacheError:
            return None
        return loads["blocks"] * self._block_size, loads["seconds"]

    def _namespace_of(self, request: Any) -> Sequence[str]:
        namespace = read_namespace(request)
        return self._namespace if namespace is None else (namespace, *self._namespace)

    def _info(self, request: Any) -> RequestInfo | None:
        """Describe a request for KV events and traces, if there are any."""
        if not self._manager.wants_request_info:
            return None
        try:
            info = read_request_info(request, self._block_size)
            check_request_info(info)
            return info
        except Exception as error:  # reads many vLLM internals, and must not fail a request
            log_event(
                logger, logging.WARNING, "request_not_described", request=request.request_id,
                error=error,
            )  # fmt: skip
            return None
