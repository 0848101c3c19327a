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
from collections.abc import Callable
from typing import Any

from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.integration.sglang.rank_cache import RankCache
from flexcache.integration.sglang.rank_weights import RANK

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
