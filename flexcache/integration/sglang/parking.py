"""SGLang plugin that lets requests wait for pages that `FlexCacheLinker` has below DRAM.

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
* Requests say how much of them is stored, and for how long it is pinned.

Hooks need no copy of SGLang's tree, which changes with every release.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.integration.sglang.rank import RankCache
from flexcache.integration.sglang.requests import pin_ttl_s, store_limit
from flexcache.integration.sglang.weights import RANK

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SGLANG_VERSION = "0.5.23"
"""The version that was run. Others change what is called here, also by methods that stay."""


_HOOKS: list[tuple[str, Callable[..., Any], str]] = []
"""Full names of methods, hooks, and SGLang's names of their kinds."""


def install() -> None:
    """Register the hooks, which SGLang applies when all plugins are installed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def register(name: str, hook: Callable[..., Any], kind: str) -> None:
        HookRegistry.register(name, hook, HookType(kind))

    for hook in _HOOKS:
        register(*hook)
    register(f"{_REPORTER}._log_hicache_stats", _metrics_logged, "after")
    RANK.install(register)


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


def _of_wrapper(wrapper: Any) -> Any:
    """Return our linker behind SGLang's wrapper; None if there is none."""
    linker = None if wrapper is None else wrapper.cache_linker
    return linker if hasattr(linker, "requests") else None


def _of_tree(tree: Any) -> Any:
    return _of_wrapper(getattr(tree, "linker", None))


def _of_scheduler(scheduler: Any) -> Any:
    return _of_tree(scheduler.tree_cache)


def _after(name: str, linker_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Call what is decorated after a method of SGLang, with our linker, if there is one, first."""

    def register(hook: Callable[..., None]) -> Callable[..., None]:
        @wraps(hook)
        def call(result: object, owner: Any, *arguments: Any, **options: Any) -> None:
            if (linker := linker_of(owner)) is not None:
                hook(linker, owner, *arguments, **options)

        _HOOKS.append((name, call, "after"))
        return hook

    return register


def _around(name: str, linker_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Call what is decorated instead of a method of SGLang, with our linker and it, if there is
    one."""

    def register(hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def call(original: Callable[..., Any], owner: Any, *rest: Any, **options: Any) -> Any:
            if (linker := linker_of(owner)) is None:
                return original(owner, *rest, **options)
            return hook(linker, original, owner, *rest, **options)

        _HOOKS.append((name, call, "around"))
        return hook

    return register


@_after(f"{_SCHEDULER}.__init__", _of_scheduler)
def _scheduler_made(linker: Any, scheduler: Any, *arguments: object, **options: object) -> None:
    scheduler.enable_lmcache = True
    scheduler.tree_cache.has_pending_cache_operations = linker.requests.is_busy


@_around(f"{_SCHEDULER}._prefetch_kvcache", _of_scheduler)
def _queued(
    linker: Any, original: Any, scheduler: Any, request: Any, *rest: Any, **options: Any
) -> None:
    linker.requests.arrived(request)
    # Has the linker look up the pages.
    request.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
    linker.requests.park(linker.events.describe)


@_after(f"{_SCHEDULER}.close_session", _of_scheduler)
def _session_closed(linker: Any, scheduler: Any, closing: Any) -> None:
    linker.requests.closed(closing.session_id)


@_after(f"{_SCHEDULER}.process_batch_result", _of_scheduler)
def _batch_ended(linker: Any, scheduler: Any, batch: Any, *arguments: object) -> None:
    if batch.launch_ts is None:
        return
    is_prefill = batch.forward_mode.is_extend_without_speculative()
    for request in batch.reqs if is_prefill else ():
        linker.requests.ended(request.rid)  # what was found and not needed; offloads name sessions
    if linker.prefill_rate is None:
        return
    only_computed = is_prefill and not any(r.host_loaded_length for r in batch.reqs)
    num_tokens = batch.extend_num_tokens if only_computed else 0
    rate = linker.prefill_rate.batch_ended(num_tokens, batch.launch_ts, time.monotonic())
    if rate is not None:
        linker.requests.report_prefill(rate)


@_around(f"{_TREE}.check_prefetch_progress", _of_tree)
def _is_ready(linker: Any, original: Any, tree: Any, request: Any) -> Any:
    # Ranks that admit different requests would wait for each other for ever.
    return linker.agree(linker.requests.is_ready(request.rid))


@_around(f"{_WRAPPER}._tail_hashes", _of_wrapper)
def _tail_hashes(
    linker: Any, original: Any, wrapper: Any, key: Any, result: Any, device_hit_len: int
) -> Any:
    node = result.last_device_node
    linker.parent_key = wrapper.cache.get_last_hash_value(node) if device_hit_len > 0 else None
    linker.num_before = device_hit_len // wrapper.cache.page_size
    linker.events.looks_up(key, linker.num_before)
    return original(wrapper, key, result, device_hit_len)


@_around(f"{_WRAPPER}._offload_node", _of_wrapper)
def _offload_node(linker: Any, original: Any, wrapper: Any, node_id: Any, transfers: Any) -> Any:
    before = wrapper.cache.get_prefix_hash_values(node_id)
    linker.parent_key = before[-1] if before else None
    linker.num_before = len(before)
    linker.events.stores(len(before))
    slots = wrapper.cache.path_device_indices
    linker.path = (lambda: (before, slots(node_id))) if before else None
    return original(wrapper, node_id, transfers)


@_around(f"{_WRAPPER}.release_request", _of_wrapper)
def _release(linker: Any, original: Any, wrapper: Any, rid: str) -> Any:
    linker.requests.ended(rid)
    return original(wrapper, rid)


@_around(f"{_TREE}.checkpoint_into_tree", _of_tree)
def _request_inserted(
    linker: Any, original: Any, tree: Any, request: Any, *, up_to: int, **options: Any
) -> None:
    linker.store_limit = store_limit(request)
    try:
        original(tree, request, up_to=up_to, **options)
    finally:
        linker.store_limit = sys.maxsize
    # Once: at its end it is inserted again, with its answer.
    if up_to < len(request.origin_input_ids) or getattr(request, "flexcache_is_pinned", False):
        return
    request.flexcache_is_pinned = True
    if (ttl_s := pin_ttl_s(request)) is not None:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        key = RadixKey(
            request.origin_input_ids, request.extra_key, is_bigram=tree.tree_core.is_eagle,
            cache_salt=request.cache_salt,
        ).page_aligned(tree.page_size)  # fmt: skip
        if len(key):
            keys = get_storage_hash_str(key, page_size=tree.page_size)
            linker.pin(keys, ttl_s, request.session_id)


@_around(f"{_TREE}.insert", _of_tree)
def _insert(linker: Any, original: Any, tree: Any, params: Any) -> Any:
    with linker.events.inserting(params.key):
        return original(tree, params)


@_around(f"{_TREE}.take_events", _of_tree)
def _take_events(linker: Any, original: Any, tree: Any) -> Any:
    return [*original(tree), *linker.events.take()]


def _metrics_logged(result: object, reporter: Any) -> None:
    """Add our counters to SGLang's metrics, with its linker and with HiCache alike."""
    tree = reporter.scheduler.tree_cache
    owner = _of_tree(tree)
    if owner is None:
        backend = getattr(getattr(tree, "cache_controller", None), "storage_backend", None)
        owner = getattr(backend, "_backend", backend)
    cache = getattr(owner, "cache", None)
    if isinstance(cache, RankCache):
        cache.report_metrics(reporter.metrics_collector.labels)
