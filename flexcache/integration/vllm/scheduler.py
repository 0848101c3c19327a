"""The scheduler's side of the connector: turns vLLM's questions into FlexCache tasks.

For each request at most one get is open, however often vLLM asks; its life here:

    matched --blocks allocated--> launched --workers report--> gone
       |
       +--(other prefix, no blocks wanted, request ends)--> cancelled, gone

and at its end at most one put, during which vLLM keeps the request's blocks.

A get that runs within the step (`layerwise`) is gone when its step begins. vLLM counts its blocks
as computed, and shares them, from the moment that they are allocated: so nobody who shares them is
let into the same step, and if the load is lost vLLM is made to forget them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexcache.errors import FlexCacheError, RegistrationError
from flexcache.ids import KVStatus, TierName
from flexcache.integration.vllm.engine import (
    read_block_size,
    read_cache_config,
    read_key_namespace,
    read_model_config,
    read_place,
)
from flexcache.integration.vllm.kv_events import read_request_info, to_vllm_events
from flexcache.integration.vllm.layerwise import LayerwiseRule, find_obstacle
from flexcache.integration.vllm.metadata import FlexCacheMetadata, Load, Store
from flexcache.integration.vllm.prefill import PrefillMeter
from flexcache.integration.vllm.stats import FlexCacheStats, read_counters
from flexcache.logs import log_event
from flexcache.manager import KVManager
from flexcache.request_info import RequestInfo

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_ANSWER_PATIENCE_S = 0.1
_IDLE_WAIT_S = 0.001
_STATS_INTERVAL_S = 1.0  # where they cost a round trip
_HIGHEST_PRIORITY = 100  # that a request may ask for
_LONGEST_TTL_S = 7 * 86400.0


@dataclass(slots=True)
class _Get:
    """A request's open get. ``num_tokens`` is 0 where nothing was found."""

    task_id: int
    num_computed: int
    num_tokens: int
    sources: dict[TierName, int]
    matched_s: float
    launched: bool = False
    by_layer: bool = False
    """What vLLM was told last: that the load runs within the request's first step."""


@dataclass(slots=True)
class _InStep:
    """A load within a step: its first block's place and key, and all blocks from there on."""

    first: int
    key: bytes
    block_ids: list[int]
    has_ended: bool = False
    """Its request has, before it was known whether the load has come."""


@dataclass(slots=True)
class _Step:
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    by_layer: dict[str, _InStep] = field(default_factory=dict)


class FlexCacheScheduler:
    """Owns the `KVManager` of one engine. Called by vLLM's scheduler on its one thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._block_size = read_block_size(kv_cache_config)
        model = read_model_config(vllm_config, kv_cache_config)
        config = read_cache_config(vllm_config, self._block_size)
        self._namespace = read_key_namespace(vllm_config)
        self._match_ttl_s = config.match_ttl_s
        obstacle = find_obstacle(vllm_config)
        place = read_place(vllm_config, config)
        self.manager = KVManager(
            model, config, endpoint=place.endpoint, dp_rank=place.dp_rank, engine_id=place.engine_id
        )
        self.manager.start()
        try:
            # vLLM makes the workers and has them register before it makes the scheduler.
            self.manager.wait_ready(_READY_TIMEOUT_S)
        except TimeoutError as error:
            log_event(
                logger, logging.ERROR, "workers_missing", error=error, effect="starts without them"
            )
        except RegistrationError as error:
            log_event(
                logger, logging.ERROR, "cache_refused", error=error, effect="runs without a cache"
            )
        except BaseException:
            self.manager.shutdown()
            raise
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log_event(
                logger, logging.WARNING, "requests_may_fail",
                kv_load_failure_policy=vllm_config.kv_transfer_config.kv_load_failure_policy,
                effect="a request whose KV cannot be read back fails",
                remedy="set kv_load_failure_policy to recompute",
            )  # fmt: skip
        self._publishes = config.kv_events and place.endpoint is None
        if config.kv_events and place.endpoint is not None:
            log_event(
                logger, logging.INFO, "kv_events_elsewhere",
                effect="a shared cache's are published by its server, at kv_events_endpoint",
            )  # fmt: skip
        self._gets: dict[str, _Get] = {}
        self._puts: dict[str, int] = {}
        self._failed: set[str] = set()  # lost a load: to offer another could go on for ever
        self._undecided: dict[str, float] = {}
        """Requests for which the remote store was asked, and when first."""
        self._lookup_timeout_s = config.remote_lookup_timeout_s
        self._prefill = PrefillMeter()
        self._step = _Step()
        self._in_step: dict[str, _InStep] = {}
        self._layerwise = LayerwiseRule(config.layerwise_load, obstacle)
        self.forget_blocks: Callable[[set[int]], None] | None = None
        """vLLM's way to drop blocks from its prefix cache, once it has said so."""
        self._reported: dict[str, float] = {}
        self._has_news = False
        self._stats_interval_s = 0.0 if place.endpoint is None else _STATS_INTERVAL_S
        self._stats_due_s = 0.0

    def num_matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first ``num_computed`` can be loaded; None: not known yet. And
        whether the request waits for them (between steps).

        Asked again and again for a waiting request: the answer is kept until it is acted upon, the
        engine's own prefix changes, or the match has grown old.
        """
        if self._shares_a_load(request, num_computed):
            return None, False
        get = self._open_get(request, num_computed)
        if get is None:
            return (None if request.request_id in self._undecided else 0), False
        if get.launched or get.num_tokens == 0:
            return 0, False
        get.by_layer = (
            self.forget_blocks is not None
            and get.sources.keys() == {TierName.CPU}
            and num_computed + get.num_tokens < request.num_tokens  # there is something to compute
            and self._layerwise.allows(request.request_id)
        )
        return get.num_tokens, not get.by_layer

    def _open_get(self, request: Any, num_computed: int) -> _Get | None:
        """The request's get for what follows ``num_computed`` tokens; None if there is none."""
        get = self._gets.get(request.request_id)
        if get is not None:
            is_fresh = time.monotonic() - get.matched_s < self._match_ttl_s / 2
            if get.launched or (get.num_computed == num_computed and is_fresh):
                return get
            self._cancel_get(request.request_id)
        if request.request_id in self._failed or getattr(
            request, "skip_reading_prefix_cache", False
        ):
            return None
        get = self._match(request, num_computed, request.num_tokens)
        if get is not None:
            self._gets[request.request_id] = get
        return get

    def _shares_a_load(self, request: Any, num_computed: int) -> bool:
        """Whether the engine's own prefix of the request is yet to be loaded, by this very step."""
        return any(
            num_computed > load.first * self._block_size
            and request.block_hashes[load.first] == load.key
            for load in self._step.by_layer.values()
        )

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """vLLM has blocks for the request and wants ``num_external`` tokens loaded into them."""
        request_id = request.request_id
        get = self._gets.get(request_id)
        if get is not None and get.launched:
            return  # the second call for the same load
        if num_external == 0:
            if get is not None:
                self._cancel_get(request_id)
            return
        by_layer = get is not None and get.by_layer
        if get is None or get.num_tokens != num_external:
            num_computed = get.num_computed if get is not None else 0
            self._cancel_get(request_id)
            get = self._match(request, num_computed, num_computed + num_external)
        first = get.num_computed // self._block_size if get is not None else 0
        wanted = list(block_ids[first : first + num_external // self._block_size])
        task_id = self._launch(get, wanted)
        if get is None or task_id is None:
            self._failed.add(request_id)
            self._gets.pop(request_id, None)
        else:
            get.launched = True
            self._gets[request_id] = get
        self._step.loads.append(Load(request_id, task_id, wanted, by_layer))
        if by_layer:
            key = request.block_hashes[first]
            self._step.by_layer[request_id] = _InStep(first, key, list(block_ids[first:]))

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """The request ends. Whether vLLM must keep its blocks until a put of them is done."""
        request_id = request.request_id
        self._failed.discard(request_id)
        self._undecided.pop(request_id, None)
        self._layerwise.finished(request_id)
        in_step = self._in_step.get(request_id)
        if in_step is not None:
            in_step.has_ended = True
        get = self._gets.get(request_id)
        self._cancel_get(request_id)
        if get is not None and get.launched:  # aborted while loading; the workers report its end
            return False
        if in_step is not None and request.status.name == "FINISHED_ABORTED":
            return False  # what its blocks hold is not known yet
        # What is certain to be computed: not a step in flight, nor the token just sampled.
        num_tokens = min(
            request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
            request.num_tokens - 1,
        )
        num_blocks = min(num_tokens // self._block_size, len(block_ids), len(request.block_hashes))
        if num_blocks <= 0 or request.status.name == "FINISHED_ERROR":
            return False
        task_id = self._put(request, block_ids, num_blocks)
        if task_id is None:
            return False
        self._puts[request_id] = task_id
        self._step.stores.append(Store(request_id, task_id))
        return True

    def take_step(self, num_scheduled_tokens: Mapping[str, int]) -> FlexCacheMetadata:
        """What the workers need to know for this step, which computes so many tokens of each."""
        self._layerwise.step(num_scheduled_tokens)
        num_tokens = sum(num_scheduled_tokens.values())
        rate = self._prefill.step(num_tokens, time.monotonic())
        if rate is not None:
            self._safely(self.manager.report_prefill, rate)
        idle = num_tokens == 0
        if idle and self._undecided:  # spinning would keep the store's answer from being taken in
            time.sleep(_IDLE_WAIT_S)
        step, self._step = self._step, _Step()
        self._in_step = step.by_layer
        for request_id in step.by_layer:
            self._gets.pop(request_id, None)
        return FlexCacheMetadata(step.loads, step.stores, idle)

    def transfers_ended(
        self, sent: Iterable[str], received: Iterable[str], bad_blocks: Collection[int]
    ) -> None:
        """A step is over. Puts and gets between steps have ended on all ranks for these requests;
        these blocks were not loaded."""
        sent, received = list(sent), list(received)
        self._has_news |= bool(sent or received or self._in_step)
        self._forget_lost_loads(bad_blocks)
        for request_id in sent:
            self._puts.pop(request_id, None)
        for request_id in received:
            get = self._gets.pop(request_id, None)
            if get is not None and not self._arrived(get):
                self._failed.add(request_id)

    def _forget_lost_loads(self, bad_blocks: Collection[int]) -> None:
        """vLLM has the requests compute the blocks anew, but until then would share them, and for
        good if the request was aborted while its step ran."""
        in_step, self._in_step = self._in_step, {}
        for request_id, load in in_step.items():
            if self.forget_blocks is None or not set(load.block_ids).intersection(bad_blocks):
                continue
            log_event(
                logger, logging.WARNING, "load_lost", request=request_id, effect="vLLM computes it"
            )
            if not load.has_ended:
                self._failed.add(request_id)
            self.forget_blocks(set(load.block_ids))

    def hit_sources(self, request_id: str) -> dict[TierName, int]:
        """Tokens that each tier supplies to the request's load."""
        get = self._gets.get(request_id)
        return {} if get is None else get.sources

    def reset(self) -> bool:
        """Drop all that is cached and not in use."""
        for request_id in [r for r, get in self._gets.items() if not get.launched]:
            self._cancel_get(request_id)
        return self._safely(self.manager.reset)

    def take_stats(self) -> FlexCacheStats | None:
        """What has happened since the last report; None in a step in which nothing did."""
        now = time.monotonic()
        if not self._has_news or now < self._stats_due_s:
            return None
        self._has_news, self._stats_due_s = False, now + self._stats_interval_s
        try:
            counters = read_counters(self.manager.stats(), self._block_size)
        except FlexCacheError:
            return None
        stats = FlexCacheStats.between(self._reported, counters)
        self._reported = counters
        return stats

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the tiers have stored and lost, for vLLM to publish with its own events."""
        return to_vllm_events(self.manager.take_changes()) if self._publishes else ()

    def shutdown(self) -> None:
        self.manager.shutdown()

    def _match(self, request: Any, num_computed: int, num_tokens: int) -> _Get | None:
        """Open a get; None if that cannot be, now or (`_undecided`) yet."""
        now = time.monotonic()
        asked_s = self._undecided.pop(request.request_id, now)
        mask = np.zeros(request.num_tokens, dtype=np.bool_)
        mask[num_computed:num_tokens] = True
        try:
            matched = self.manager.get_match_by_tier(
                request.all_token_ids,
                mask,
                namespace=self._namespace,
                block_keys=request.block_hashes,
                request_info=self._info(request),
                look_up=now - asked_s <= self._lookup_timeout_s,  # steps may take longer
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "match_failed", request=request.request_id, error=error
            )
            return None
        if matched is None:  # the remote store has yet to answer
            self._undecided[request.request_id] = asked_s
            return None
        task_id, found, sources = matched
        self._has_news = True
        return _Get(task_id, num_computed, int(found.sum()), sources, time.monotonic())

    def _info(self, request: Any) -> RequestInfo | None:
        """What KV events and traces shall say of the request, where there are any."""
        if not self.manager.wants_request_info:
            return None
        try:
            return read_request_info(request, self._block_size)
        except (
            Exception
        ) as error:  # much of vLLM's inside is looked at; no request is to fail by it
            log_event(
                logger, logging.WARNING, "request_not_described", request=request.request_id,
                error=error,
            )  # fmt: skip
            return None

    def _launch(self, get: _Get | None, block_ids: list[int]) -> int | None:
        """Start a get; None if it cannot be."""
        if get is None or get.num_tokens == 0:
            return None
        return self._start(get.task_id, block_ids[: get.num_tokens // self._block_size])

    def _arrived(self, get: _Get) -> bool:
        """Whether all that was matched was loaded.

        The workers have seen the end; a server's answer to us may still be on its way.
        """
        try:
            response = self.manager.wait([get.task_id], _ANSWER_PATIENCE_S)[get.task_id]
        except (FlexCacheError, KeyError):
            return False
        if response.status is KVStatus.TIMEOUT:
            return True  # nothing is known against it
        if int(response.mask.sum()) == get.num_tokens:
            return True
        log_event(
            logger, logging.WARNING, "load_lost", task=get.task_id, error=response.error,
            effect="vLLM computes it",
        )  # fmt: skip
        return False

    def _put(self, request: Any, block_ids: Sequence[int], num_blocks: int) -> int | None:
        mask = np.zeros(request.num_tokens, dtype=np.bool_)
        mask[: num_blocks * self._block_size] = True
        try:
            task_id, wanted = self.manager.put_match(
                request.all_token_ids,
                mask,
                namespace=self._namespace,
                block_keys=request.block_hashes,
                request_info=self._info(request),
                **_retention(request),
            )
        except (FlexCacheError, ValueError) as error:
            log_event(
                logger, logging.WARNING, "put_failed", request=request.request_id, error=error
            )
            return None
        if not wanted.any():
            return None
        first = int(wanted.argmax()) // self._block_size
        count = int(wanted.sum()) // self._block_size
        return self._start(task_id, block_ids[first : first + count])

    def _start(self, task_id: int, block_ids: Sequence[int]) -> int | None:
        """Launch a matched task; None, and nothing is left of it, if that fails."""
        try:
            self.manager.launch([task_id], [self._slots(block_ids)], gated=True)
            # What had ended before (the server was lost, say) was not launched at all.
            response = self.manager.try_wait([task_id]).get(task_id)
        except (FlexCacheError, ValueError, KeyError) as error:
            log_event(logger, logging.WARNING, "launch_failed", task=task_id, error=error)
            self._safely(self.manager.cancel, [task_id])
            return None
        has_failed = response is not None and response.status is not KVStatus.SUCCESS
        return None if has_failed else task_id

    def _slots(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        blocks = np.asarray(block_ids, dtype=np.int64)
        grid = blocks[:, None] * self._block_size + np.arange(self._block_size)
        return grid.ravel()

    def _cancel_get(self, request_id: str) -> None:
        get = self._gets.pop(request_id, None)
        if get is not None:
            self._safely(self.manager.cancel, [get.task_id])

    def _safely(self, call: Any, *arguments: Any, **options: Any) -> bool:
        """The cache may fail, the request may not."""
        try:
            call(*arguments, **options)
        except (FlexCacheError, ValueError, KeyError) as error:
            log_event(logger, logging.WARNING, "call_failed", call=call.__name__, error=error)
            return False
        return True


def _retention(request: Any) -> dict[str, Any]:
    """The hints that a request carries in ``kv_transfer_params``, as `KVManager.put_match` has
    them. They come from whoever sent the request: what makes no sense is left out."""
    params = getattr(request, "kv_transfer_params", None) or {}
    hints: dict[str, Any] = {}
    for name, kind, lowest, highest in (
        ("priority", int, -_HIGHEST_PRIORITY, _HIGHEST_PRIORITY),
        ("ttl_s", float, 0.0, _LONGEST_TTL_S),
    ):
        hint = params.get(f"flexcache_{name}")
        try:
            if hint is not None and lowest <= (value := kind(hint)) <= highest:
                hints[name] = value
        except (TypeError, ValueError, OverflowError):
            log_event(
                logger, logging.DEBUG, "hint_ignored", request=request.request_id,
                hint=f"flexcache_{name}", reason="is no number",
            )  # fmt: skip
    return hints
