"""Scheduler side of the connector: turns vLLM's queries into FlexCache tasks.

`gets` loads prompts, `puts` stores them; what belongs to a whole engine is here.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import RegistrationError
from flexcache.ids import TierName
from flexcache.integration.adapter import VLLM_COUNTERS, LayerwiseRule, PrefillRate, increases
from flexcache.integration.checkpoint import when_identified
from flexcache.integration.vllm.calls import CacheCalls, to_vllm_events
from flexcache.integration.vllm.engine import (
    UNREAD,
    Place,
    find_caller,
    read_cache_config,
    read_key_namespace,
    read_model_config,
    read_place,
    read_transfer_config,
)
from flexcache.integration.vllm.gets import Gets
from flexcache.integration.vllm.groups import (
    BlockTables,
    Tables,
    cached_group_ids,
    read_keys_per_position,
    read_position,
)
from flexcache.integration.vllm.puts import PutPoints, Puts, tail_interval
from flexcache.integration.vllm.step_loads import StepBudget, find_obstacle, recovers_in_steps
from flexcache.integration.vllm.weights import read_model_id
from flexcache.integration.vllm.worker import FlexCacheMetadata
from flexcache.logs import log_event
from flexcache.manager import KVManager

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


@dataclass
class FlexCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Increases since the last report, by counter name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        data = self.data
        hits = sum(value for name, value in data.items() if name.endswith("_hit_tokens"))
        looked_up = hits + data.get("missed_tokens", 0)
        shown = {k: round(v, 4) for k, v in data.items() if not k.endswith(("_bytes", "_seconds"))}
        shown["external_hit_rate"] = round(hits / looked_up, 4) if looked_up else 0.0
        for way, seconds in (("loaded", "load_seconds"), ("stored", "store_seconds")):
            if data.get(seconds):  # failed ops take time but may move nothing
                moved = data.get(f"{way}_bytes", 0)
                shown[f"{way}_GB_per_s"] = round(moved / data[seconds] / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class FlexCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter per statistic, labelled like vLLM's own. All are ``vllm:flexcache_*``:
    vLLM's own reader of metrics ignores other prefixes."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:flexcache_{name}", text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in VLLM_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if value > 0:
                self._counters[name][engine_idx].inc(value)


logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_STATS_INTERVAL_S = 5.0  # reading and passing them on takes longer than a put
_LOADS_INTERVAL_S = 0.1  # between readings of how fast loads are, where that takes no round trip


class FlexCacheScheduler:
    """Owns the `KVManager` of one engine. Called by vLLM's scheduler on its one thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        block_size = read_position(vllm_config, kv_cache_config)
        model = read_model_config(vllm_config, kv_cache_config)
        keys_per_position = read_keys_per_position(vllm_config, kv_cache_config)
        config = read_cache_config(vllm_config, block_size)
        transfer = read_transfer_config(vllm_config)
        obstacle = find_obstacle(vllm_config, bool(model.groups))
        layerwise = LayerwiseRule(config.layerwise_load, obstacle)
        place = read_place(vllm_config, config)
        _warn_of_surprises(transfer.kv_load_failure_policy, config, place)
        _tell_about_states(vllm_config, model)
        namespace = read_key_namespace(vllm_config)
        can_lose_loads = not model.groups and recovers_in_steps(vllm_config)
        self._cache = CacheCalls(None, block_size, namespace, keys_per_position, can_lose_loads)
        self._tables = BlockTables(model.groups, cached_group_ids(kv_cache_config), block_size)
        self._has_siblings = transfer is not vllm_config.kv_transfer_config
        self._is_shared = place.endpoint is not None
        interval_s = _STATS_INTERVAL_S if self._is_shared else _LOADS_INTERVAL_S
        budget = StepBudget(self._cache.read_loads, interval_s)
        self.gets = Gets(
            self._cache, block_size, self._tables, layerwise, budget, config, self._has_siblings
        )
        interval = tail_interval(model.groups, block_size, config.tail_interval_tokens)
        speculative = vllm_config.speculative_config
        num_drafts = getattr(speculative, "num_speculative_tokens", None) or 0
        points = PutPoints(block_size, interval, config.answer_interval_tokens, 1 + num_drafts)
        self.puts = Puts(self._cache, self._tables, points)
        self._publishes = config.kv_events and place.endpoint is None
        self._prefill = PrefillRate() if config.skip_slow_loads else None
        self.counts: Counter[str] = Counter()  # by hooks of the connector, as `VLLM_COUNTERS`
        self._reported: Mapping[str, float] = {}
        self._has_news = False
        self._stats_due_s = 0.0
        self._admitted: set[str] = set()
        """Requests that have GPU blocks."""
        self._life = threading.Lock()  # held while the manager is made
        self._is_over = False
        self._opened: KVManager | None = None
        self._model, self._place = model, place
        if not when_identified(partial(read_model_id, vllm_config), config, self._open):
            self._make_manager(UNREAD, config)  # what is wrong with the settings is said at once

    @property
    def manager(self) -> KVManager:
        """The engine's cache, once it is open."""
        return self._cache.manager

    def _make_manager(self, model_id: str, config: CacheConfig) -> KVManager:
        model, place = dataclasses.replace(self._model, model_id=model_id), self._place
        return KVManager(
            model, config, endpoint=place.endpoint, dp_rank=place.dp_rank, engine_id=place.engine_id
        )

    def _open(self, model_id: str, config: CacheConfig) -> None:
        """Open the cache: the model is known by now."""
        with self._life:
            if self._is_over:
                return
            self._opened = self._make_manager(model_id, config)
        _start(self._opened)
        self._cache.open(self._opened)

    def bind(self, pool: Any) -> None:
        """Use vLLM's pool of GPU blocks from now on."""
        reset = pool.reset_prefix_cache

        def note_reset() -> bool:
            if not self._has_siblings:
                _free_deferred_blocks(pool)
            is_reset: bool = reset()
            if is_reset:
                self._cache.names.gpu_reset()
            return is_reset

        pool.reset_prefix_cache = note_reset
        self.puts.bind(pool)
        self.gets.early_loads.block_pool = pool

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        """Launch the load of ``num_external`` tokens into the blocks that vLLM allocated.

        Args:
            tables: The request's blocks, for each of vLLM's groups.
        """
        self._admitted.add(request.request_id)
        self.puts.admitted(request)
        self.gets.allocated(request, self._tables.select(tables), num_external)

    def finished(self, request: Any, tables: Tables) -> None:
        """End a request, whose blocks vLLM may reuse from now on."""
        self._admitted.discard(request.request_id)
        has_unknown_blocks = self.gets.finished(request)
        self.puts.finished(request, () if has_unknown_blocks else self._tables.select(tables))
        self._cache.session_ended(request)
        self._cache.names.ended(request)

    def take_step(self, scheduled: Any) -> FlexCacheMetadata:
        """Return the metadata for the step that vLLM has scheduled."""
        step = self.gets.take_step(scheduled.num_scheduled_tokens)
        self._has_news |= self.puts.release()
        stores = self.puts.launch()
        self.puts.scheduled(scheduled)
        # vLLM clears blocks while it prepares the inputs of the step, and other connectors save
        # what is in blocks before they are reused: copies have to wait until then.
        clears = bool(getattr(scheduled, "new_block_ids_to_zero", None))
        begins_late = self._has_siblings or clears
        return FlexCacheMetadata(step.loads, stores, not step.num_tokens, begins_late, step.started)

    def adapters_loaded(self, digests: Mapping[int, str]) -> None:
        """Take what adapters the last step was computed with."""
        self._cache.names.adapters_loaded(digests)

    def transfers_ended(self, received: Collection[str], bad_blocks: Collection[int]) -> None:
        """End a step. On all ranks, the gets between steps of the requests ``received`` have ended;
        ``bad_blocks`` were not loaded."""
        self._has_news |= bool(received) or self.gets.is_counting_on_ranks
        self._has_news |= self.puts.release()
        if bad_blocks:
            self.puts.withdraw(bad_blocks)
        self.gets.transfers_ended(received)

    def hit_sources(self, request_id: str) -> dict[TierName, int]:
        """Return how many tokens each tier supplies to the request's load."""
        return self.gets.hit_sources(request_id)

    def reset(self) -> bool:
        """Drop everything cached and unused."""
        self.gets.cancel()
        self.puts.cancel()
        return self._cache.reset()

    def take_stats(self) -> FlexCacheStats | None:
        """Return what has happened since the last report; None if nothing has, or if the last
        report is not long ago and more steps follow."""
        now = time.monotonic()
        has_news = self._has_news or self.gets.has_matched
        may_wait = self._is_shared or bool(self._admitted)
        if not has_news or (may_wait and now < self._stats_due_s):
            return None
        self._has_news = self.gets.has_matched = False
        self._stats_due_s = now + _STATS_INTERVAL_S
        counters = self._cache.read_counters()
        if counters is None:
            return None
        own = {
            **self.counts,
            "early_look_ups": self.gets.early.num_begun,
            "early_loads": self.gets.early_loads.num_begun,
            "cancelled_look_ups": self.gets.early.num_cancelled,
        }
        before, self._reported = self._reported, {**counters, **own}
        return FlexCacheStats(increases(before, counters) | increases(before, own))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what the tiers stored and lost, for vLLM to publish with its own events. vLLM
        calls it once at the end of each step."""
        now = time.monotonic()
        step = self.gets.step_ended(now)
        if step is not None and self._prefill is not None:
            num_tokens = 0 if step.loads else step.num_tokens
            rate = self._prefill.batch_ended(num_tokens, step.launched_s, now)
            if rate is not None:
                self._cache.report_prefill(rate)
        if not self._publishes or not self._cache.is_open:
            return ()
        return to_vllm_events(self.manager.take_changes(), self._cache.hashes)

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        self.gets.check_idle()
        self.puts.check_idle()
        self._cache.names.check_idle()

    def shutdown(self) -> None:
        with self._life:
            self._is_over = True
        if self._opened is not None:
            self._opened.shutdown()


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


def _free_deferred_blocks(pool: Any) -> None:
    """Free what vLLM keeps until a step in flight has ended. Must be called by vLLM's scheduler.

    vLLM keeps the blocks of ended and preempted requests for the sake of connectors whose loads do
    not wait for that step, and so its prefix cache could not be reset. Ours wait (their gates).
    """
    scheduler = find_caller("deferred_frees")
    if scheduler is None:  # before vLLM 0.32
        return
    while scheduler.deferred_frees:
        pool.free_blocks(reversed(scheduler.deferred_frees.popleft()[1]))


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


def _tell_about_states(vllm_config: Any, model: ModelConfig) -> None:
    """Log where vLLM keeps states: only there can they be stored, and prompts resumed."""
    interval = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None)
    if model.has_states and interval is not None:
        log_event(
            logger, logging.INFO, "states_are_sparse",
            prefix_cache_retention_interval=interval,
            effect="vLLM keeps states at the end of prompts and where it has seen prompts part"
            + (f", and every {interval} tokens" if interval else ""),
            remedy="for hits elsewhere set prefix_cache_retention_interval to some multiple of the "
            "block size, or None",
        )  # fmt: skip
