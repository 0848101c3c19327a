"""CacheCalls: an engine's calls to its cache, in terms of vLLM's requests and blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from flexcache.errors import FlexCacheError
from flexcache.ids import OpKind, RequestInfo, TierName, check_request_info
from flexcache.integration.counters import read_counters
from flexcache.integration.safe_calls import safely
from flexcache.integration.task_calls import TaskCalls
from flexcache.integration.vllm.kv_events import EventHashes, read_request_info
from flexcache.integration.vllm.names import Names
from flexcache.integration.vllm.request_hints import (
    read_namespace,
    read_retention,
    read_session_end,
    read_session_id,
)
from flexcache.logs import log_event
from flexcache.manager import KVManager

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
        can_lose_loads: Whether vLLM can be told of any request that what was loaded is of no use.

    Attributes:
        names: What the KV of each request is called.
        hashes: vLLM's own hashes of what is cached under others.
    """

    effect_of_lost_load = "vLLM computes it"

    def __init__(
        self,
        manager: KVManager | None,
        block_size: int,
        namespace: Sequence[str],
        keys_per_position: int = 1,
        can_lose_loads: bool = True,
    ) -> None:
        super().__init__(manager, block_size)
        self._namespace = namespace
        self._keys_per_position = keys_per_position
        self.names = Names(self._generation, can_lose_loads)
        self.hashes = EventHashes()

    def _generation(self) -> int:
        return self.manager.weights_generation if self.is_open else 0

    def keys(self, request: Any) -> Sequence[bytes]:
        """Return the keys of a request's positions. vLLM may hash parts of them, chained."""
        has_adapter = request.lora_request is not None
        return self._of_positions(
            self.names.of(request).block_hashes if has_adapter else request.block_hashes
        )

    def _of_positions(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        size = self._keys_per_position
        return hashes if size == 1 else hashes[size - 1 :: size]

    def _named(self, request: Any) -> dict[str, Any]:
        """Return what names a request's KV besides its keys, as arguments of the manager."""
        name = self.names.of(request)
        return {"weights": name.weights, "adapter": name.adapter or ""}

    def match(
        self, request: Any, num_computed: int, num_tokens: int, look_up: bool
    ) -> Found | NoMatch:
        """Match a request's tokens ``[num_computed, num_tokens)``.

        Args:
            look_up: Whether the remote store may be asked first.
        """
        if not self.is_open or self.names.of(request).adapter is None:
            return NoMatch.FAILED
        try:
            matched = self.manager.get_match_by_tier(
                request.all_token_ids,
                range(num_computed, num_tokens),
                namespace=self._namespace_of(request),
                block_keys=self.keys(request),
                request_info=self._info(request),
                look_up=look_up,
                session_id=read_session_id(request),
                awaits_loads=True,
                **self._named(request),
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
        if not self.is_open or self.names.of(request).adapter is None:
            return None
        mask = np.ones(request.num_tokens, dtype=np.bool_)
        mask[: num_on_gpu * self._block_size] = False
        task_id: int | None = safely(
            self.manager.prefetch_nowait,
            request.all_token_ids,
            mask,
            namespace=self._namespace_of(request),
            block_keys=self.keys(request),
            session_id=read_session_id(request),
            **self._named(request),
        )
        return task_id

    def look_up(self, request: Any) -> None:
        """Begin to ask the remote store about a request that vLLM will ask about."""
        if not self.is_open or self.names.of(request).adapter is None:
            return
        safely(
            self.manager.get_match_by_tier,
            request.all_token_ids,
            namespace=self._namespace_of(request),
            block_keys=self.keys(request),
            look_up="only",
            **self._named(request),
        )

    def may_store(self, request: Any) -> bool:
        """Return whether it is known by now what weights and adapter a request's KV is of."""
        return self.names.of(request).may_store

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
        if not self.is_open:
            return None
        try:
            task_id, wanted = self.manager.put_match(
                request.all_token_ids,
                range(first * self._block_size, stop * self._block_size),
                namespace=self._namespace_of(request),
                block_keys=self.keys(request),
                tail_at=stop * self._block_size if has_tail else None,
                request_info=self._info(request),
                session_id=read_session_id(request),
                **read_retention(request),
                **self._named(request),
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "put_failed", request=request.request_id, error=error
            )
            return None
        if request.lora_request is not None and self.manager.cache_config.kv_events:
            self.hashes.learn(self.keys(request), self._of_positions(request.block_hashes), stop)
        num_wanted = int(np.count_nonzero(wanted))
        if not num_wanted:
            is_over = not has_tail or bool(self.ended([task_id]))
            return None if is_over else (task_id, range(stop, stop))
        begin = int(wanted.argmax()) // self._block_size
        return task_id, range(begin, begin + num_wanted // self._block_size)

    def session_ended(self, request: Any) -> None:
        """Pass on what an ended request says of its session."""
        end = read_session_end(request)
        if end is not None and self.is_open:
            safely(
                self.manager.session_hint,
                end.session_id,
                over=end.over,
                returns_in_s=end.returns_in_s,
            )

    def read_counters(self) -> Mapping[str, float] | None:
        """Read the counters that vLLM reports; None if the server does not answer."""
        if not self.is_open:
            return None
        try:
            return read_counters(self.manager.stats(), self._block_size)
        except FlexCacheError:
            return None

    def read_loads(self) -> tuple[int, float] | None:
        """Return how many tokens were loaded from DRAM and the seconds in which loads ran, since
        startup; None if the server does not answer."""
        if not self.is_open:
            return None
        try:
            loads = self.manager.stats()["engine"]["ops"][OpKind.H2D.value]
        except FlexCacheError:
            return None
        return loads["blocks"] * self._block_size, loads["seconds"]

    def _namespace_of(self, request: Any) -> Sequence[str]:
        namespace = read_namespace(request)
        return self._namespace if namespace is None else (namespace, *self._namespace)

    def _info(self, request: Any) -> RequestInfo | None:
        """Describe a request for KV events and traces, if there are any."""
        if not self.manager.wants_request_info:
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
