"""Calls of one vLLM engine to its cache, and what of a request goes into them.

A request's hints are in its ``kv_transfer_params``. They come from its sender: invalid ones are
ignored, and logged.

flexcache_namespace                                   whose quota it counts against
flexcache_priority, flexcache_ttl_s                   how long to keep what it stores
flexcache_session_id                                  whose prompt it is
flexcache_session_over, flexcache_returns_in_s        how the session goes on after its end
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils

from flexcache.cache.journal import Change, Removed, Stored
from flexcache.cache.prompt import check_hint, check_name, check_session_id
from flexcache.errors import FlexCacheError
from flexcache.ids import OpKind, RequestInfo, TierName, check_request_info
from flexcache.integration.adapter import TaskCalls, read_counters, safely
from flexcache.integration.vllm.weights import Names
from flexcache.logs import log_event
from flexcache.manager import KVManager

logger = logging.getLogger(__name__)

_HIGHEST_PRIORITY = 100  # highest priority that a request may set
_LONGEST_TTL_S = 7 * 86400.0
_LONGEST_NAMESPACE = 256

_warned: set[str] = set()

T = TypeVar("T")


class SessionEnd(NamedTuple):
    """How a session goes on, or not, after a request; see `KVManager.session_hint`."""

    session_id: str
    over: bool
    returns_in_s: float | None


def read_retention(request: Any) -> dict[str, Any]:
    """Return the hints as arguments of `KVManager.put_match`."""
    if not getattr(request, "kv_transfer_params", None):
        return {}
    hints = {
        "priority": _read(
            request, "priority", _between(int, -_HIGHEST_PRIORITY, _HIGHEST_PRIORITY)
        ),
        "ttl_s": _read(request, "ttl_s", _between(float, 0.0, _LONGEST_TTL_S)),
    }
    return {name: hint for name, hint in hints.items() if hint is not None}


def read_namespace(request: Any) -> str | None:
    """Return the namespace in which the request's blocks are kept, if it names one."""
    return _read(request, "namespace", _namespace)


def read_session_id(request: Any) -> str | None:
    """Return the session that the request belongs to, if it says so."""
    return _read(request, "session_id", _session_id)


def read_session_end(request: Any) -> SessionEnd | None:
    """Return what is to be passed on when the request has ended, if anything."""
    session_id = read_session_id(request)
    if session_id is None:
        return None
    over = _read(request, "session_over", _bool) or False
    returns_in_s = _read(request, "returns_in_s", _returns_in_s)
    if over == (returns_in_s is not None):
        if over:
            _ignored(request, "session_over", "flexcache_returns_in_s says that it goes on")
        return None
    return SessionEnd(session_id, over, returns_in_s)


def _read(request: Any, name: str, convert: Callable[[Any], T]) -> T | None:
    params = getattr(request, "kv_transfer_params", None)
    if not params or (hint := params.get(f"flexcache_{name}")) is None:
        return None
    try:
        return convert(hint)
    except (TypeError, ValueError, OverflowError) as error:
        _ignored(request, name, error)
        return None


def _ignored(request: Any, name: str, reason: object) -> None:
    """Log a hint that makes no sense; the first of each name as a warning."""
    level = logging.DEBUG if name in _warned else logging.WARNING
    _warned.add(name)
    log_event(
        logger, level, "hint_ignored", request=request.request_id, hint=f"flexcache_{name}",
        reason=reason,
    )  # fmt: skip


def _between(kind: type[T], lowest: Any, highest: Any) -> Callable[[Any], T]:
    def convert(hint: Any) -> T:
        value: Any = kind(hint)  # type: ignore[call-arg]
        if not lowest <= value <= highest:
            raise ValueError(f"must be {lowest} to {highest}")
        return value  # type: ignore[no-any-return]

    return convert


def _bool(hint: Any) -> bool:
    if not isinstance(hint, bool):
        raise TypeError("must be true or false")
    return hint


def _namespace(hint: Any) -> str:
    check_name("namespace", hint, _LONGEST_NAMESPACE)
    return str(hint)


def _session_id(hint: Any) -> str:
    check_session_id(hint)
    return str(hint)


def _returns_in_s(hint: Any) -> float:
    seconds = float(hint)
    check_hint("any", over=False, returns_in_s=seconds)
    return seconds


_hash = kv_cache_utils.maybe_convert_block_hash
_MAX_HASHES = 1 << 20
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
"""vLLM 0.32 hashes tagged extra keys and publishes them without their tags."""


def read_request_info(request: Any, block_size: int) -> RequestInfo:
    """Read the request metadata that vLLM would publish with its own blocks."""
    lora = request.lora_request
    return RequestInfo(
        request_id=request.request_id,
        lora_id=None if lora is None else lora.adapter_id,
        lora_name=None if lora is None else lora.name,
        extra_keys=_extra_keys(request, block_size),
    )


def _extra_keys(request: Any, block_size: int) -> list[Any] | None:
    """Read the extra keys of each whole block; None if the request has only tokens."""
    has_more = (
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or getattr(request, "prompt_embeds", None) is not None
    )
    if not has_more or not request.block_hashes:
        return None
    extra_keys, image = [], 0
    for index in range(min(len(request.block_hashes), request.num_tokens // block_size)):
        start = index * block_size
        keys, image = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_size, image
        )
        extra_keys.append(keys)
    return list(_untagged(extra_keys))


class EventHashes:
    """vLLM's hashes of blocks that are cached under others: those of requests with adapters, as
    vLLM hashes the adapter's name and path, and the cache its content.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def learn(self, keys: Sequence[bytes], hashes: Sequence[bytes], stop: int) -> None:
        """Note the hashes of the first ``stop`` blocks."""
        self._hashes.update(zip(keys[:stop], hashes[:stop], strict=False))
        while len(self._hashes) > _MAX_HASHES:
            self._hashes.popitem(last=False)

    def of(self, key: bytes) -> Any:
        """Return a block's hash as vLLM publishes it."""
        return _hash(self._hashes.get(key, key))


def to_vllm_events(changes: Iterable[Change], hashes: EventHashes) -> Iterator[KVCacheEvent]:
    """Convert changes for vLLM's own publisher, whose stream also has its GPU's blocks."""
    for change in changes:
        if isinstance(change, Stored):
            yield BlockStored(
                block_hashes=[hashes.of(key) for key in change.keys],
                parent_block_hash=None if change.parent is None else hashes.of(change.parent),
                token_ids=list(change.token_ids),
                block_size=change.block_size,
                lora_id=change.info.lora_id,
                medium=change.medium.value,
                lora_name=change.info.lora_name,
                extra_keys=change.extra_keys,
            )
        elif isinstance(change, Removed):
            yield BlockRemoved(
                block_hashes=[hashes.of(key) for key in change.keys], medium=change.medium.value
            )
        else:  # readers would apply "all cleared" to the GPU's blocks too
            yield from to_vllm_events(change.removed, hashes)


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
