"""Calls of one vLLM engine to its cache, and what of a request goes into them.

A request's hints are in its ``kv_transfer_params``. They come from its sender: invalid ones are
ignored, and logged.

flexcache_namespace                                   whose quota it counts against
flexcache_priority, flexcache_ttl_s                   how long to keep what it stores
flexcache_store, flexcache_max_store_tokens           whether it stores, and how many tokens
flexcache_pin_ttl_s                                   how long its prompt is pinned
flexcache_session_id                                  whose prompt it is
flexcache_session_over, flexcache_returns_in_s        how the session goes on after its end
flexcache_hands_over                                  another engine waits for what it computes
flexcache_source, flexcache_wait_s                    the peer that computes it now, ``HOST:PORT``,
                                                      and how long to wait for that
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils

from flexcache.cache.control import Pin
from flexcache.cache.journal import Change, Removed, Stored
from flexcache.cache.prompt import MAX_SESSION_ID_LENGTH, check_hint, check_name
from flexcache.config.values import is_address, split_tcp
from flexcache.errors import FlexCacheError
from flexcache.ids import HandOver, OpKind, RequestInfo, TierName, check_request_info
from flexcache.integration.adapter import (
    TaskCalls,
    as_bool,
    as_count,
    as_pin_ttl_s,
    hint_ignored,
    is_count,
    read_counters,
    read_hint,
    safely,
)
from flexcache.integration.vllm.weights import Names, RequestName
from flexcache.logs import log_event
from flexcache.manager import KVManager
from flexcache.tasks.instructions import PromisedLoad

logger = logging.getLogger(__name__)

_HIGHEST_PRIORITY = 100  # highest priority that a request may set
_LONGEST_TTL_S = 7 * 86400.0
_LONGEST_NAMESPACE = 256
_LONGEST_WAIT_S = 60.0
_MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of its blocks and its session.

    Attributes:
        namespace: Where its blocks are kept: its parts, none for that of all.
        session_id: The session that it belongs to.
        retention: How long to keep what it stores, as arguments of `KVManager.put_match`.
        session_end: How the session goes on after it, as arguments of `KVManager.session_hint`;
            empty if that is not said.
        max_store_tokens: How many of its tokens may be stored.
        pin_ttl_s: How long its prompt is pinned once it is stored; None: not at all.
        hands_over: Whether another engine waits for what it computes.
        source: The peer that has its prompt, or computes it now; empty: that is not said.
        wait_s: How long it waits for what is computed elsewhere.
    """

    namespace: tuple[str, ...] = ()
    session_id: str | None = None
    retention: Mapping[str, Any] = field(default_factory=dict)
    session_end: Mapping[str, Any] = field(default_factory=dict)
    max_store_tokens: int = sys.maxsize
    pin_ttl_s: float | None = None
    hands_over: bool = False
    source: str = ""
    wait_s: float = 0.0

    def hand_over(self, until_s: float) -> HandOver:
        """Return what a get waits for, until then."""
        return HandOver(until_s, self.source)


_NO_HINTS = Hints()


def read_hints(request: Any) -> Hints:
    """Return a request's hints, of those that make sense."""
    params = getattr(request, "kv_transfer_params", None)
    if not params:
        return _NO_HINTS

    read = partial(read_hint, params, request.request_id)
    retention = {
        "priority": read("priority", _between(int, -_HIGHEST_PRIORITY, _HIGHEST_PRIORITY)),
        "ttl_s": read("ttl_s", _between(float, 0.0, _LONGEST_TTL_S)),
    }
    session_id = read("session_id", _name(MAX_SESSION_ID_LENGTH))
    end = {} if session_id is None else _session_end(read, request.request_id)
    namespace = read("namespace", _parts)
    # Its sender counts on it that others do not get it, and that it can be deleted.
    is_misplaced = namespace is None and params.get("flexcache_namespace") is not None
    may_store = False if is_misplaced else read("store", as_bool)
    return Hints(
        namespace or (), session_id,
        {name: hint for name, hint in retention.items() if hint is not None},
        end, _max_store_tokens(may_store, read("max_store_tokens", as_count), params),
        read("pin_ttl_s", as_pin_ttl_s), read("hands_over", as_bool) or False,
        read("source", _source) or "", read("wait_s", _wait_s) or 0.0,
    )  # fmt: skip


def _session_end(
    read: Callable[[str, Callable[[Any], Any]], Any], request_id: str
) -> dict[str, Any]:
    over = read("session_over", as_bool) or False
    returns_in_s = read("returns_in_s", _returns_in_s)
    if over and returns_in_s is not None:
        hint_ignored(request_id, "session_over", "flexcache_returns_in_s says that it goes on")
        return {}
    return {"over": over, "returns_in_s": returns_in_s} if over or returns_in_s is not None else {}


def _max_store_tokens(store: bool | None, limit: int | None, params: Mapping[str, Any]) -> int:
    """Return how many tokens may be stored. vLLM's own offloading has a hint for it, too."""
    vllms = params.get("max_offload_tokens")
    limits = [0 if store is False else limit, vllms if is_count(vllms) else None]
    return min((each for each in limits if each is not None), default=sys.maxsize)


def _between(kind: Callable[[Any], Any], lowest: Any, highest: Any) -> Callable[[Any], Any]:
    def convert(hint: Any) -> Any:
        value = kind(hint)
        if not lowest <= value <= highest:
            raise ValueError(f"must be {lowest} to {highest}")
        return value

    return convert


def _name(longest: int) -> Callable[[Any], Any]:
    def convert(hint: Any) -> Any:
        check_name("name", hint, longest)
        return hint

    return convert


def _source(hint: Any) -> str:
    address = f"tcp://{hint}"
    host, port = split_tcp(address)
    if not (is_address(host) and port):
        raise ValueError("must be ADDRESS:PORT")
    return address


def _wait_s(hint: Any) -> float:
    if isinstance(hint, bool | str):
        raise TypeError("must be a number")
    seconds = float(hint)
    if not seconds >= 0:
        raise ValueError("must be at least 0")
    return min(seconds, _LONGEST_WAIT_S)


def _parts(hint: Any) -> tuple[str, ...]:
    parts = (hint,) if isinstance(hint, str) else hint
    if not isinstance(parts, list | tuple) or not 0 < len(parts) <= _MOST_PARTS:
        raise TypeError(f"must be a string, or 1 to {_MOST_PARTS} strings")
    return tuple(map(_name(_LONGEST_NAMESPACE), parts))


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
            medium, locality = change.medium.value
            yield BlockStored(
                block_hashes=[hashes.of(key) for key in change.keys],
                parent_block_hash=None if change.parent is None else hashes.of(change.parent),
                token_ids=list(change.token_ids),
                block_size=change.block_size,
                lora_id=change.info.lora_id,
                medium=medium,
                lora_name=change.info.lora_name,
                extra_keys=change.extra_keys,
                locality=locality,
            )
        elif isinstance(change, Removed):
            medium, locality = change.medium.value
            yield BlockRemoved(
                block_hashes=[hashes.of(key) for key in change.keys],
                medium=medium,
                locality=locality,
            )
        else:  # readers would apply "all cleared" to the GPU's blocks too
            yield from to_vllm_events(change.removed, hashes)


@dataclass(slots=True)
class Get:
    """An open get of a request.

    Attributes:
        num_computed: Tokens that the engine had when it asked; the get covers the following ones.
        num_tokens: Tokens found; 0 if none.
        sources: Tokens that each tier supplies.
        name: What the request's KV was called when it was matched.
        num_shared: Tokens of the prompt that some tier has, also behind those found.
        promised: The load, if the last answer to vLLM was that it runs within the request's first
            step.
    """

    task_id: int
    num_computed: int
    num_tokens: int
    sources: dict[TierName, int]
    matched_s: float
    name: RequestName
    num_shared: int = 0
    launched: bool = False
    promised: PromisedLoad | None = None


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

    def _prompt(self, request: Any, hints: Hints = _NO_HINTS) -> dict[str, Any]:
        """Return what names a request's KV, as arguments of the manager."""
        name, namespace = self.names.of(request), self._namespace
        return {
            "namespace": (*hints.namespace, *namespace),
            "block_keys": self.keys(request),
            "session_id": hints.session_id,
            "weights": name.weights,
            "adapter": name.adapter or "",
        }

    def _may_find(self, request: Any) -> bool:
        return self.is_open and self.names.of(request).adapter is not None

    def match(
        self, request: Any, num_computed: int, num_tokens: int, look_up: bool, until_s: float = 0.0
    ) -> Get | NoMatch:
        """Match a request's tokens ``[num_computed, num_tokens)``.

        Args:
            look_up: Whether the remote store may be asked first.
            until_s: Until when what is computed elsewhere may be waited for.
        """
        if not self._may_find(request):
            return NoMatch.FAILED
        hints = read_hints(request)
        try:
            matched = self.manager.get_match_by_tier(
                request.all_token_ids,
                range(num_computed, num_tokens),
                request_info=self._info(request),
                look_up=look_up,
                awaits_loads=True,
                hand_over=hints.hand_over(until_s),
                **self._prompt(request, hints),
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "match_failed", request=request.request_id, error=error
            )
            return NoMatch.FAILED
        if matched is None:
            return NoMatch.UNDECIDED
        task_id, found, sources = matched
        num_found, name = int(np.count_nonzero(found)), self.names.of(request)
        num_shared = self.manager.num_shared(task_id)
        return Get(task_id, num_computed, num_found, sources, time.monotonic(), name, num_shared)

    def prefetch(self, request: Any, num_on_gpu: int) -> int | None:
        """Begin to bring a request's blocks to DRAM, unless vLLM has them; return the task, None if
        the remote store has yet to answer."""
        if not self._may_find(request):
            return None
        mask = np.ones(request.num_tokens, dtype=np.bool_)
        mask[: num_on_gpu * self._block_size] = False
        task_id: int | None = safely(
            self.manager.prefetch_nowait,
            request.all_token_ids,
            mask,
            **self._prompt(request, read_hints(request)),
        )
        return task_id

    def look_up(self, request: Any) -> None:
        """Begin to ask the remote store about a request that vLLM will ask about."""
        if self._may_find(request):
            hints = read_hints(request)
            safely(
                self.manager.get_match_by_tier, request.all_token_ids, look_up="only",
                hand_over=hints.hand_over(time.monotonic() + hints.wait_s),
                **self._prompt(request, Hints(hints.namespace)),
            )  # fmt: skip

    def max_stored(self, request: Any) -> int:
        """Return how many of a request's tokens may be stored: as many as its sender wants, none
        before it is known what weights and adapter its KV is of."""
        return read_hints(request).max_store_tokens if self.names.of(request).may_store else 0

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
        hints = read_hints(request)
        try:
            task_id, wanted = self.manager.put_match(
                request.all_token_ids,
                range(first * self._block_size, stop * self._block_size),
                tail_at=stop * self._block_size if has_tail else None,
                request_info=self._info(request),
                **hints.retention,
                **self._prompt(request, hints),
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

    def to_pin(self, request: Any) -> Callable[[], Pin | None] | None:
        """Return the call that pins what is cached of a request's prompt, also once the request has
        ended; None if its sender does not want that."""
        hints = read_hints(request)
        if hints.pin_ttl_s is None or not self.is_open:
            return None
        prompt = self._prompt(request, hints)
        num_blocks = request.num_prompt_tokens // self._block_size
        return partial(
            safely, self.manager.pin, ttl_s=hints.pin_ttl_s, session_id=hints.session_id,
            namespace=prompt["namespace"],
            block_keys=prompt["block_keys"][:num_blocks], adapter=prompt["adapter"],
        )  # fmt: skip

    def session_ended(self, request: Any) -> None:
        """Pass on what an ended request says of its session."""
        hints = read_hints(request)
        if hints.session_end and self.is_open:
            safely(self.manager.session_hint, hints.session_id, **hints.session_end)

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
