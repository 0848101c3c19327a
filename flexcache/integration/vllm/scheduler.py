"""Scheduler side of the connector: turns vLLM's queries into FlexCache tasks.

A request has at most one open get, however often vLLM asks; the get's life:

    matched --blocks allocated--> launched --workers report--> gone
       |
       +--(other prefix, no blocks wanted, request ends)--> cancelled, gone

Puts are in `puts`.

A get that runs within the step (`layerwise`) is gone when its step begins. vLLM counts its blocks
as computed, and shares them, as soon as they are allocated. Hence no request that shares them is
admitted to the same step, and if the load is lost vLLM is made to forget them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexcache.config import CacheConfig
from flexcache.errors import InternalError, RegistrationError
from flexcache.ids import TierName
from flexcache.integration.layerwise_rule import LayerwiseRule
from flexcache.integration.vllm.calls import CacheCalls, NoMatch
from flexcache.integration.vllm.early_lookups import EarlyLookUps
from flexcache.integration.vllm.engine import (
    Place,
    read_cache_config,
    read_key_namespace,
    read_model_config,
    read_place,
)
from flexcache.integration.vllm.groups import read_keys_per_position, read_position
from flexcache.integration.vllm.kv_events import to_vllm_events
from flexcache.integration.vllm.layerwise import find_obstacle
from flexcache.integration.vllm.metadata import FlexCacheMetadata, Load
from flexcache.integration.vllm.prefill import PrefillMeter
from flexcache.integration.vllm.puts import Puts
from flexcache.integration.vllm.requests import Get, RequestRecord, StepLoad
from flexcache.integration.vllm.siblings import is_served_by_sibling, read_transfer_config
from flexcache.integration.vllm.stats import FlexCacheStats
from flexcache.logs import log_event
from flexcache.manager import KVManager

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_IDLE_WAIT_S = 0.001
_STATS_INTERVAL_S = 1.0  # if reading them costs a round trip


@dataclass(slots=True)
class _Step:
    """Content of the next step's metadata; ``by_layer`` names the loads that run within it."""

    loads: list[Load] = field(default_factory=list)
    by_layer: dict[str, None] = field(default_factory=dict)


class FlexCacheScheduler:
    """Owns the `KVManager` of one engine. Called by vLLM's scheduler on its one thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._block_size = read_position(vllm_config, kv_cache_config)
        keys_per_position = read_keys_per_position(vllm_config, kv_cache_config)
        model = read_model_config(vllm_config, kv_cache_config)
        config = read_cache_config(vllm_config, self._block_size)
        self._match_ttl_s = config.match_ttl_s
        self._lookup_timeout_s = config.remote_lookup_timeout_s
        self._early = EarlyLookUps(config.remote_lookup_timeout_s)
        self._has_store = config.remote_url is not None
        """In a shared cache, not known before the store is first waited for."""
        transfer = read_transfer_config(vllm_config)
        self._has_siblings = transfer is not vllm_config.kv_transfer_config
        obstacle = find_obstacle(vllm_config, transfer.kv_load_failure_policy)
        self._layerwise = LayerwiseRule(config.layerwise_load, obstacle)
        place = read_place(vllm_config, config)
        self.manager = KVManager(
            model, config, endpoint=place.endpoint, dp_rank=place.dp_rank, engine_id=place.engine_id
        )
        _start(self.manager)
        _warn_of_surprises(transfer.kv_load_failure_policy, config, place)
        namespace = read_key_namespace(vllm_config)
        self._cache = CacheCalls(self.manager, self._block_size, namespace, keys_per_position)
        self.puts = Puts(self._cache, self._block_size)
        self._publishes = config.kv_events and place.endpoint is None
        self._requests: dict[str, RequestRecord] = {}
        self._step = _Step()
        self._computing: dict[str, None] = {}
        """Requests with a load within the step that is being computed."""
        self._prefill = PrefillMeter()
        self.forget_blocks: Callable[[set[int]], None] | None = None
        """vLLM's function to drop blocks from its prefix cache, once bound."""
        self._reported: Mapping[str, float] = {}
        self._has_news = False
        self._stats_interval_s = 0.0 if place.endpoint is None else _STATS_INTERVAL_S
        self._stats_due_s = 0.0

    def arrived(self, request: Any) -> None:
        """Begin to look a new request up, before vLLM has room for it."""
        if self._may_load(request) and self._has_store:
            self._early.arrived(request)
            self._look_up_early()

    def _look_up_early(self) -> None:
        for request in self._early.take_due(time.monotonic()):
            self._cache.look_up(request)

    def _may_load(self, request: Any) -> bool:
        """Return whether loads are to be offered to a request."""
        is_anothers = self._has_siblings and is_served_by_sibling(request)
        return not is_anothers and not getattr(request, "skip_reading_prefix_cache", False)

    def num_matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first ``num_computed`` can be loaded (None: unknown
        yet), and whether the request waits for them (between steps).

        vLLM asks repeatedly for a waiting request: the answer is kept until vLLM acts on it, the
        engine's own prefix changes, or the match has become too old.
        """
        if self._shares_a_load(request, num_computed):
            return None, False
        if not self._may_load(request):
            return 0, False
        self._early.asked(request.request_id)
        record = self._requests.setdefault(request.request_id, RequestRecord())
        get = self._open_get(request, record, num_computed)
        if get is None:
            return (0 if record.asked_s is None else None), False
        if get.launched or get.num_tokens == 0:
            return 0, False
        get.by_layer = (
            self.forget_blocks is not None
            and get.sources.keys() == {TierName.CPU}
            and num_computed + get.num_tokens < request.num_tokens  # there is something to compute
            and self._layerwise.allows(request.request_id)
        )
        return get.num_tokens, not get.by_layer

    def _open_get(self, request: Any, record: RequestRecord, num_computed: int) -> Get | None:
        """Return the request's get for the tokens after ``num_computed``, if it has one."""
        get = record.get
        if get is not None:
            is_fresh = time.monotonic() - get.matched_s < self._match_ttl_s / 2
            if get.launched or (get.num_computed == num_computed and is_fresh):
                return get
            self._cancel_get(record)
        if record.has_lost_load:
            return None
        record.get = self._match(request, record, num_computed, request.num_tokens)
        return record.get

    def _shares_a_load(self, request: Any, num_computed: int) -> bool:
        """Return whether the engine's own prefix of the request is being loaded in this step."""
        for request_id in self._step.by_layer:
            load = self._requests[request_id].step_load
            if (
                load is not None
                and num_computed > load.first * self._block_size
                and request.block_hashes[load.first] == load.key
            ):
                return True
        return False

    def _match(
        self, request: Any, record: RequestRecord, num_computed: int, num_tokens: int
    ) -> Get | None:
        """Open a get; None if the call failed, or the remote store has yet to answer."""
        now = time.monotonic()
        asked_s = now if record.asked_s is None else record.asked_s
        look_up = now - asked_s <= self._lookup_timeout_s  # steps may take longer
        found = self._cache.match(request, num_computed, num_tokens, look_up)
        record.asked_s = asked_s if found is NoMatch.UNDECIDED else None
        self._has_store |= found is NoMatch.UNDECIDED
        if isinstance(found, NoMatch):
            return None
        self._has_news = True
        task_id, num_found, sources = found
        return Get(task_id, num_computed, num_found, sources, time.monotonic())

    def _cancel_get(self, record: RequestRecord) -> None:
        if record.get is not None:
            self._cache.cancel(record.get.task_id)
            record.get = None

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """Launch the load of ``num_external`` tokens into the blocks that vLLM allocated."""
        request_id = request.request_id
        self.puts.admitted(request)
        record = self._requests.setdefault(request_id, RequestRecord())
        get = record.get
        if get is not None and get.launched:
            return  # the second call for the same load
        if num_external == 0:
            self._cancel_get(record)
            return
        by_layer = get is not None and get.by_layer
        if get is None or get.num_tokens != num_external:
            num_computed = 0 if get is None else get.num_computed
            self._cancel_get(record)
            get = self._match(request, record, num_computed, num_computed + num_external)
        first = 0 if get is None else get.num_computed // self._block_size
        wanted = list(block_ids[first : first + num_external // self._block_size])
        task_id = self._launch(get, wanted)
        if get is None or task_id is None:
            record.get, record.has_lost_load = None, True
        else:
            record.get, get.launched = get, True
        self._step.loads.append(Load(request_id, task_id, wanted, by_layer))
        if by_layer:
            key = request.block_hashes[first]
            record.step_load = StepLoad(first, key, list(block_ids[first:]))
            self._step.by_layer[request_id] = None

    def _launch(self, get: Get | None, block_ids: list[int]) -> int | None:
        """Start a get; None if there is none, or it failed."""
        if get is None or get.num_tokens == 0:
            return None
        blocks = block_ids[: get.num_tokens // self._block_size]
        return get.task_id if self._cache.launch(get.task_id, blocks) else None

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """End a request, whose blocks vLLM may reuse from now on."""
        request_id = request.request_id
        record = self._requests.get(request_id, RequestRecord())
        self._layerwise.finished(request_id)
        self._early.ended(request_id)
        record.has_ended = True
        was_loading = record.get is not None and record.get.launched
        self._cancel_get(record)
        if record.step_load is None:
            self._requests.pop(request_id, None)
        status = request.status.name
        has_unknown_blocks = (
            was_loading  # aborted; the workers report the load's end
            or (record.step_load is not None and status == "FINISHED_ABORTED")
            or status == "FINISHED_ERROR"
        )
        self.puts.finished(request, () if has_unknown_blocks else block_ids)

    def take_step(self, scheduled: Any) -> FlexCacheMetadata:
        """Return the metadata for the step that vLLM has scheduled."""
        num_scheduled_tokens: Mapping[str, int] = scheduled.num_scheduled_tokens
        self._layerwise.step(num_scheduled_tokens)
        self._look_up_early()
        num_tokens = sum(num_scheduled_tokens.values())
        rate = self._prefill.step(num_tokens, time.monotonic())
        if rate is not None:
            self._cache.report_prefill(rate)
        idle = num_tokens == 0
        if idle and any(record.asked_s is not None for record in self._requests.values()):
            time.sleep(_IDLE_WAIT_S)  # spinning would delay the store's answer
        step, self._step = self._step, _Step()
        self._computing |= step.by_layer
        for request_id in step.by_layer:
            self._requests[request_id].get = None
        self._has_news |= self.puts.release()
        stores = self.puts.launch()
        blocks = getattr(scheduled, "kv_connector_block_state", None)
        if blocks is not None:  # vLLM 0.32 and later
            self.puts.scheduled(num_scheduled_tokens, blocks.get_block_ids)
        return FlexCacheMetadata(step.loads, stores, idle)

    def transfers_ended(self, received: Collection[str], bad_blocks: Collection[int]) -> None:
        """End a step. On all ranks, the gets between steps of the requests ``received`` have ended;
        ``bad_blocks`` were not loaded."""
        self._has_news |= bool(received or self._computing) | self.puts.release()
        if bad_blocks:
            self.puts.withdraw(bad_blocks)
        self._end_step_loads(bad_blocks)
        for request_id in received:
            record = self._requests.get(request_id)
            if record is None or record.get is None:
                continue
            get, record.get = record.get, None
            record.has_lost_load |= not self._cache.has_arrived(get.task_id, get.num_tokens)

    def _end_step_loads(self, bad_blocks: Collection[int]) -> None:
        """End the loads within the step that was computed, and make vLLM forget the lost ones.

        vLLM recomputes lost blocks, but would share them until then, and permanently if the request
        was aborted while its step ran.
        """
        computed, self._computing = self._computing, {}
        for request_id in computed:
            record = self._requests[request_id]
            load, record.step_load = record.step_load, None
            if record.has_ended:
                del self._requests[request_id]
            if load is None or self.forget_blocks is None:
                continue
            if not set(load.block_ids).isdisjoint(bad_blocks):
                log_event(
                    logger, logging.WARNING, "load_lost", request=request_id,
                    effect="vLLM computes it",
                )  # fmt: skip
                record.has_lost_load = True
                self.forget_blocks(set(load.block_ids))

    def hit_sources(self, request_id: str) -> dict[TierName, int]:
        """Return how many tokens each tier supplies to the request's load."""
        record = self._requests.get(request_id)
        return {} if record is None or record.get is None else record.get.sources

    def reset(self) -> bool:
        """Drop everything cached and unused."""
        for record in self._requests.values():
            if record.get is not None and not record.get.launched:
                self._cancel_get(record)
        self.puts.cancel()
        return self._cache.reset()

    def take_stats(self) -> FlexCacheStats | None:
        """Return what has happened since the last report; None if nothing has."""
        now = time.monotonic()
        if not self._has_news or now < self._stats_due_s:
            return None
        self._has_news, self._stats_due_s = False, now + self._stats_interval_s
        counters = self._cache.read_counters()
        if counters is None:
            return None
        counters = {
            **counters,
            "early_look_ups": self._early.num_begun,
            "cancelled_look_ups": self._early.num_cancelled,
        }
        stats = FlexCacheStats.between(self._reported, counters)
        self._reported = counters
        return stats

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what the tiers stored and lost, for vLLM to publish with its own events."""
        return to_vllm_events(self.manager.take_changes()) if self._publishes else ()

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        if self._requests or self._computing:
            raise InternalError(f"ended requests are still remembered: {list(self._requests)}")
        self.puts.check_idle()

    def shutdown(self) -> None:
        self.manager.shutdown()


def _start(manager: KVManager) -> None:
    """Start the cache. An engine whose ranks are missing or refused runs without one."""
    manager.start()
    try:
        # vLLM creates the workers and lets them register before it creates the scheduler.
        manager.wait_ready(_READY_TIMEOUT_S)
    except TimeoutError as error:
        log_event(
            logger, logging.ERROR, "workers_missing", error=error, effect="starts without them"
        )
    except RegistrationError as error:
        log_event(
            logger, logging.ERROR, "cache_refused", error=error, effect="runs without a cache"
        )
    except BaseException:
        manager.shutdown()
        raise


def _warn_of_surprises(failure_policy: str, config: CacheConfig, place: Place) -> None:
    """Log what a user of these settings may not expect."""
    if failure_policy != "recompute":
        log_event(
            logger, logging.WARNING, "requests_may_fail",
            kv_load_failure_policy=failure_policy,
            effect="a request fails if its KV cannot be read back",
            remedy="set kv_load_failure_policy to recompute",
        )  # fmt: skip
    if config.kv_events and place.endpoint is not None:
        log_event(
            logger, logging.INFO, "kv_events_elsewhere",
            effect="the server of a shared cache publishes its events, at kv_events_endpoint",
        )  # fmt: skip
