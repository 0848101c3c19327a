"""Plugin of SGLang that lets requests wait for pages that `FlexCacheLinker` has below DRAM.

SGLang finds `install` by the entry point ``sglang.srt.plugins`` in each of its processes. Without
the linker its hooks do nothing. They close what the interface of linkers leaves open:

* SGLang names only the pages that its tree lacks: the key before them is handed over too, and with
  an offload, where to find all pages before it.
* SGLang publishes KV events of its tree, and metrics: those of the tiers below join them.
* A linker cannot say "not yet". For HiCache's storage and for LMCache, SGLang prefetches when a
  request enters the queue, and then asks the tree in every pass whether that is done. With
  ``enable_lmcache`` set after the tree was made, it asks for the linker as well.
* How fast the engine computes decides how long requests wait.
* Sessions have names, and close.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flexcache.cache.block_keys import PromptContent
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.ids import TierName
from flexcache.integration.adapter import safely
from flexcache.integration.sglang.rank import RankCache
from flexcache.integration.sglang.weights import RANK
from flexcache.tasks.model import load_patience_s


@dataclass(slots=True)
class _Parked:
    """A request that waits; ``task_id`` is that of its prefetch, None while the store is asked."""

    keys: Sequence[bytes]
    parent_key: bytes | None
    content: PromptContent | None
    session_id: str | None
    give_up_s: float
    task_id: int | None = None


class ParkedRequests:
    """The waiting requests of one rank.

        arrived --nothing below DRAM--> ready
           |
           +--the store is asked--> asked --answered, or too late--> ready, or:
           +--found below DRAM, faster than computing--> fetching --ended, or too late--> ready

        What has come is kept until the request is computed, or gone.

    A request waits for its pages no longer than computing them would take, and not at all if their
    tier has been slower than that lately (`LoadCost`).

    Args:
        lookup_timeout_s: How long a request waits for the remote store's answer.
        fetch_timeout_s: How long it waits for its pages at most.
    """

    def __init__(
        self,
        cache: RankCache,
        lookup_timeout_s: float,
        fetch_timeout_s: float,
    ) -> None:
        self._cache = cache
        self._lookup_timeout_s = lookup_timeout_s
        self._fetch_timeout_s = fetch_timeout_s
        self._parked: dict[str, _Parked] = {}
        self._ready: dict[str, int] = {}
        """Prefetches of requests that wait no longer."""
        self.prefill_pages_per_s = 0.0

    def report_prefill(self, tokens_per_s: float) -> None:
        """Report how fast the engine computes prompts."""
        self.prefill_pages_per_s = tokens_per_s / self._cache.page_size
        safely(self._cache.manager.report_prefill, tokens_per_s)

    def __contains__(self, rid: str) -> bool:
        return rid in self._parked

    def arrived(
        self,
        rid: str,
        keys: Sequence[str],
        parent_key: str | None,
        content: PromptContent | None = None,
        session_id: str | None = None,
    ) -> None:
        """Begin to bring pages to DRAM that a new request needs."""
        parent = None if parent_key is None else bytes.fromhex(parent_key)
        give_up_s = time.monotonic() + self._lookup_timeout_s
        parked = _Parked(
            [bytes.fromhex(key) for key in keys], parent, content, session_id, give_up_s
        )
        if self._advance(parked):
            self._parked[rid] = parked

    def is_ready(self, rid: str) -> bool:
        """Return whether a request has nothing to wait for."""
        parked = self._parked.get(rid)
        if parked is None:
            return True
        if self._advance(parked):
            return False
        del self._parked[rid]
        if parked.task_id is not None:  # what comes too late tells how slow the tier is
            self._ready[rid] = parked.task_id
        return True

    def ended(self, rid: str) -> None:
        """Forget a request; bring nothing more for it, and pin nothing."""
        parked = self._parked.pop(rid, None)
        task_id = self._ready.pop(rid, None) if parked is None else parked.task_id
        if task_id is not None:
            safely(self._cache.manager.cancel, [task_id])

    def is_busy(self) -> bool:
        """Return whether any request waits."""
        return bool(self._parked)

    def reset(self) -> None:
        for rid in [*self._parked, *self._ready]:
            self.ended(rid)

    def _advance(self, parked: _Parked) -> bool:
        """Take the next step of a request, if it is due; return whether it still waits."""
        now = time.monotonic()
        if parked.task_id is not None:
            ended = safely(self._cache.manager.try_wait, [parked.task_id])
            return ended == {} and now < parked.give_up_s
        prompt = self._cache.prompt(parked.keys, parked.parent_key)
        found = safely(
            self._cache.manager.get_match_by_tier, look_up=now < parked.give_up_s,
            session_id=parked.session_id, **prompt,
        )  # fmt: skip
        if found is None:
            return now < parked.give_up_s  # not answered yet, or failed
        task_id, mask, sources = found
        safely(self._cache.manager.cancel, [task_id])
        num_pages = self._cache.num_pages(mask)
        if sources.keys() <= {TierName.CPU}:
            return False
        num_below = num_pages - sources.get(TierName.CPU, 0) // self._cache.page_size
        keys = parked.keys[:num_pages]
        prompt = self._cache.prompt(keys, parked.parent_key, content=parked.content)
        parked.task_id = safely(
            self._cache.manager.prefetch_async, session_id=parked.session_id, **prompt
        )
        parked.give_up_s = now + load_patience_s(
            max(1, num_below), self.prefill_pages_per_s, self._fetch_timeout_s
        )
        return parked.task_id is not None


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SGLANG_VERSION = "0.5.23"
"""The version that was run. Others change what is called here, also by methods that stay."""


def install() -> None:
    """Register the hooks, which SGLang applies when all plugins are installed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.__init__", _scheduler_made, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}._prefetch_kvcache", _queued, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.close_session", _session_closed, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", _batch_ended, HookType.AFTER)
    HookRegistry.register(f"{_TREE}.check_prefetch_progress", _is_ready, HookType.AROUND)
    HookRegistry.register(f"{_WRAPPER}._tail_hashes", _tail_hashes, HookType.AROUND)
    HookRegistry.register(f"{_WRAPPER}._offload_node", _offload_node, HookType.AROUND)
    HookRegistry.register(f"{_WRAPPER}.release_request", _release, HookType.AROUND)
    HookRegistry.register(f"{_TREE}.insert", _insert, HookType.AROUND)
    HookRegistry.register(f"{_TREE}.take_events", _take_events, HookType.AROUND)
    HookRegistry.register(f"{_REPORTER}._log_hicache_stats", _metrics_logged, HookType.AFTER)
    RANK.install(lambda name, hook, kind: HookRegistry.register(name, hook, HookType(kind)))


def check_version() -> None:
    """Check that this SGLang was run with FlexCache.

    Raises:
        ConfigError: It is another version.
    """
    from sglang.version import __version__ as found

    if found.partition("+")[0] != SGLANG_VERSION:  # behind it is how it was built
        raise ConfigError(
            f"SGLang {found} is installed, with which FlexCache has not been run: it would load "
            f"wrong KV where SGLang differs. Install sglang=={SGLANG_VERSION}, or start SGLang "
            "without FlexCache"
        )


def check_allowed() -> None:
    """Check that SGLang is one that was run, and may install the plugin.

    Raises:
        ConfigError: It is another one. Or ``SGLANG_PLUGINS`` leaves the plugin out: updates of the
            weights would go unnoticed, and behind SGLang's tree pages below DRAM never be read.
    """
    check_version()
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "flexcache" not in (name.strip() for name in allowed.split(",")):
        raise reject("SGLANG_PLUGINS", allowed, "must name flexcache, which needs its hooks")


def _linker_of(wrapper: Any) -> Any:
    """Return our linker behind SGLang's wrapper; None if there is none."""
    linker = None if wrapper is None else wrapper.cache_linker
    return linker if hasattr(linker, "parking") else None


def _scheduler_made(result: object, scheduler: Any, *arguments: object, **options: object) -> None:
    tree = scheduler.tree_cache
    linker = _linker_of(getattr(tree, "linker", None))
    if linker is not None:
        scheduler.enable_lmcache = True
        tree.has_pending_cache_operations = linker.parking.is_busy


def _queued(
    original: Callable[..., Any], scheduler: Any, request: Any, *arguments: Any, **options: Any
) -> Any:
    tree = scheduler.tree_cache
    linker = _linker_of(getattr(tree, "linker", None))
    if linker is None:
        return original(scheduler, request, *arguments, **options)
    linker.asked = None
    linker.sessions.arrived(request)
    request.init_next_round_input(tree, cow_mamba=False)  # has the linker look up the pages
    linker.park_asked()
    return None


def _session_closed(result: object, scheduler: Any, closing: Any) -> None:
    linker = _linker_of(getattr(scheduler.tree_cache, "linker", None))
    if linker is not None:
        linker.sessions.closed(closing.session_id)


def _batch_ended(result: object, scheduler: Any, batch: Any, *arguments: object) -> None:
    linker = _linker_of(getattr(scheduler.tree_cache, "linker", None))
    if linker is None or batch.launch_ts is None:
        return
    is_prefill = batch.forward_mode.is_extend_without_speculative()
    for request in batch.reqs if is_prefill else ():
        linker.release(request.rid)  # what was found and not needed
        linker.sessions.ended(request.rid)  # its offloads name their session
        linker.parking.ended(request.rid)
    if linker.prefill_rate is None:
        return
    only_computed = is_prefill and not any(r.host_loaded_length for r in batch.reqs)
    num_tokens = batch.extend_num_tokens if only_computed else 0
    rate = linker.prefill_rate.batch_ended(num_tokens, batch.launch_ts, time.monotonic())
    if rate is not None:
        linker.parking.report_prefill(rate)


def _is_ready(original: Callable[..., Any], tree: Any, request: Any) -> Any:
    linker = _linker_of(tree.linker)
    if linker is None:
        return original(tree, request)
    # Ranks that admit different requests would wait for each other for ever.
    return linker.agree(linker.is_ready(request.rid))


def _tail_hashes(
    original: Callable[..., Any], wrapper: Any, key: Any, result: Any, device_hit_len: int
) -> Any:
    linker = _linker_of(wrapper)
    if linker is not None:
        has_prefix = device_hit_len > 0
        node = result.last_device_node
        linker.parent_key = wrapper.cache.get_last_hash_value(node) if has_prefix else None
        linker.num_before = device_hit_len // wrapper.cache.page_size
        linker.events.looks_up(key, device_hit_len // wrapper.cache.page_size)
    return original(wrapper, key, result, device_hit_len)


def _offload_node(original: Callable[..., Any], wrapper: Any, node_id: Any, transfers: Any) -> Any:
    linker = _linker_of(wrapper)
    if linker is not None:
        before = wrapper.cache.get_prefix_hash_values(node_id)
        linker.parent_key = before[-1] if before else None
        linker.num_before = len(before)
        linker.events.stores(len(before))
        slots = wrapper.cache.path_device_indices
        linker.path = (lambda: (before, slots(node_id))) if before else None
    return original(wrapper, node_id, transfers)


def _release(original: Callable[..., Any], wrapper: Any, rid: str) -> Any:
    linker = _linker_of(wrapper)
    if linker is not None:
        linker.ended(rid)
    return original(wrapper, rid)


def _insert(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    linker = _linker_of(tree.linker)
    if linker is None:
        return original(tree, params)
    with linker.events.inserting(params.key):
        return original(tree, params)


def _take_events(original: Callable[..., Any], tree: Any) -> Any:
    linker = _linker_of(tree.linker)
    events = original(tree)
    return events if linker is None else [*events, *linker.events.take()]


def _metrics_logged(result: object, reporter: Any) -> None:
    """Add our counters to SGLang's metrics, with its linker and with HiCache alike."""
    tree = reporter.scheduler.tree_cache
    owner = _linker_of(getattr(tree, "linker", None))
    if owner is None:
        backend = getattr(getattr(tree, "cache_controller", None), "storage_backend", None)
        owner = getattr(backend, "_backend", backend)
    cache = getattr(owner, "cache", None)
    if isinstance(cache, RankCache):
        cache.metrics.report(reporter.metrics_collector.labels)
