"""Weights and adapters of one rank of SGLang: when they change, and what files adapters are of.

SGLang tells neither linkers nor storages. So the plugin (`parking`) watches its methods, those of
0.5.23, in the process of each rank:

    WeightUpdater   update_weights_from_disk, update_weights_from_tensor, update_weights_from_ipc,
                    load_weights_from_distributed, begin_weight_update, end_weight_update
    its manager     resume_memory_occupation of weights, unless a copy was kept on the host
    ModelRunner     check_weights, which can overwrite them
    LoRAManager     the methods that load an adapter
    Req             its key, which has SGLang's number of the adapter
    Scheduler       run_batch, and the tree's reset: which weights SGLang's own cache is of

All of them run on the scheduler's thread, so no batch begins meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import pkgutil
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from flexcache.integration.checkpoint import LoadedAdapter
from flexcache.integration.file_digests import ANY_TIME, FileDigests
from flexcache.integration.sglang.rank import RankCache
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

_UPDATES = (
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc",
    "load_weights_from_distributed", "begin_weight_update", "end_weight_update",
)  # fmt: skip
_REQUESTED = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
)  # fmt: skip
"""The scheduler's methods that call those above: they say that there is an update even if another
SGLang lacks one of them."""
_READS_WEIGHTS = ("snapshot", "compare", "checksum")
"""Actions of ``check_weights`` that leave the weights alone."""
_KEPT_ON_HOST = "enable_weights_cpu_backup"


class SglangWeights:
    """Watches the one rank of an SGLang engine that is in this process."""

    def __init__(self) -> None:
        self._caches: weakref.WeakKeyDictionary[RankCache, str | None] = weakref.WeakKeyDictionary()
        self._missing: list[str] = []
        self._is_watched = False
        self._num_changes = 0
        self._has_pages = False
        """Whether SGLang's own cache has pages, or some are being computed."""
        self._has_old_pages = False
        self._adapters: dict[str, LoadedAdapter] = {}
        """By SGLang's number."""
        self._digests = FileDigests(since_ns=ANY_TIME, waits=False)

    def install(self, register: Callable[[str, Callable[..., Any], str], None]) -> None:
        """Register the hooks.

        Args:
            register: Takes the full name of a method, a hook, and SGLang's name of its kind.
        """

        def watch(owner: str, name: str, hook: Callable[..., Any], kind: str = "before") -> bool:
            try:
                pkgutil.resolve_name(f"{owner}.{name}")
            except (ImportError, AttributeError):
                return False
            register(f"{owner}.{name}", hook, kind)
            return True

        needed: dict[tuple[str, str], Callable[..., Any]] = {
            **{(_UPDATER, name): partial(self._update_begins, name) for name in _UPDATES},
            (_MANAGER, "resume_memory_occupation"): self._memory_resumed,
            (_RUNNER, "check_weights"): self._weights_checked,
            (_SCHEDULER, "run_batch"): self._batch_begins,
        }
        self._missing = [
            name for (owner, name), hook in needed.items() if not watch(owner, name, hook)
        ]
        requested = [watch(_MANAGER, name, self._update_requested) for name in _REQUESTED]
        self._is_watched = any(requested) or not self._missing
        watch(_TREE, "reset", self._tree_reset, "after")
        watch(_ADAPTERS, "_load_lora_adapter", self._load_adapter, "around")
        watch(_ADAPTERS, "_load_lora_adapter_from_tensors", self._load_tensors, "around")
        watch(_REQUEST, "__init__", self._request_made, "after")

    def watch(self, cache: RankCache, seed: str | None) -> None:
        """Tell a cache of this rank from now on, and what it has missed: SGLang can attach a
        storage while it serves.

        Args:
            seed: Common to ranks that share the cache: they call the same weights the same.
        """
        self._caches[cache] = seed
        for adapter in self._adapters.values():
            adapter.identify(self._digests)
        if self._num_changes:
            self._tell(cache, seed)
        if self._has_pages:
            cache.computes(are_present=not self._has_old_pages)
        if not self._is_watched:
            log_event(
                logger, logging.WARNING, "weights_unwatched",
                reason="FlexCache's plugin of SGLang is not installed, or SGLang has other methods",
                remedy="call POST /cache/weights before and after each update of the weights",
            )  # fmt: skip

    # -- weights ---------------------------------------------------------------------------------

    def _update_begins(self, by: str, *arguments: Any, **options: Any) -> None:
        if not self._num_changes and self._caches:
            log_event(logger, logging.INFO, "weights_changed", by=by)
        self._num_changes += 1
        self._has_old_pages = self._has_pages
        for cache, seed in self._caches.items():
            self._tell(cache, seed)

    def _tell(self, cache: RankCache, seed: str | None) -> None:
        if self._missing:
            cache.client.weights_unknown(f"this SGLang has no {', '.join(self._missing)}")
        else:
            # Ranks that have counted otherwise, since an update failed on some, share nothing.
            cache.client.weights_changed(None if seed is None else f"{seed}-{self._num_changes}")

    def _update_requested(self, *arguments: Any, **options: Any) -> None:
        if self._missing:
            self._update_begins("a request")

    def _memory_resumed(self, manager: Any, request: Any) -> None:
        from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
        from sglang.srt.runtime_context import get_server_args

        is_kept = bool(getattr(get_server_args(), _KEPT_ON_HOST, False))
        if (not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags) and not is_kept:
            self._update_begins("resume_memory_occupation")

    def _weights_checked(self, runner: Any, action: str, *arguments: Any, **options: Any) -> None:
        if action not in _READS_WEIGHTS:
            self._update_begins(f"check_weights({action!r})")

    def _batch_begins(self, *arguments: Any, **options: Any) -> None:
        self._has_pages = True
        for cache in self._caches:
            cache.computes()

    def _tree_reset(self, *arguments: Any, **options: Any) -> None:
        self._has_pages = self._has_old_pages = False
        for cache in self._caches:
            cache.emptied()

    # -- adapters --------------------------------------------------------------------------------

    def _load_adapter(self, original: Callable[..., Any], manager: Any, adapter: Any) -> Any:
        loading = LoadedAdapter(adapter.lora_path or "")
        result = original(manager, adapter)
        if result.success:
            self._adapters[adapter.lora_id] = loading
            if self._caches:
                loading.identify(self._digests)
        return result

    def _load_tensors(
        self, original: Callable[..., Any], manager: Any, adapter: Any, *rest: Any, **options: Any
    ) -> Any:
        result = original(manager, adapter, *rest, **options)
        if result.success:
            # The number is random here, and the same on all ranks.
            self._adapters[adapter.lora_id] = LoadedAdapter("", adapter.lora_id)
        return result

    def _request_made(self, result: object, request: Any, *rest: Any, **options: Any) -> None:
        """Name the request's adapter by its content in the key from which SGLang hashes pages,
        instead of by a number, which is random, or made from name and path."""
        number = request.lora_id
        if number is None or not self._caches or not request.extra_key.endswith(number):
            return
        adapter = self._adapters.get(number)
        if adapter is None:  # loaded by a method that this SGLang has and we do not watch
            adapter = self._adapters[number] = LoadedAdapter("")
        # As long as the number, so that salts before it remain distinct.
        name = hashlib.blake2b(adapter.name.encode(), digest_size=16).hexdigest()
        request.extra_key = request.extra_key.removesuffix(number) + name


RANK = SglangWeights()
"""What this process has loaded."""
