"""FlexCacheLinker: FlexCache as the cache behind SGLang's radix tree, without HiCache.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "FlexCacheLinker",
        "linker_module_path": "flexcache.integration.sglang", "linker_extra_config": {...}}'

SGLang calls it on the thread that schedules and computes, so no call waits, except for the layers
of a load that the model has come to. A failed load ends its request: only what DRAM has, pinned, is
offered; `parking` brings the rest there while a request waits.

    lookup --> pinned --load--> queued --start_layer_wise_loading--> loading --finish--> gone
                  |               +--cancel_queued_load, reset--> gone
                  +--other pages wanted, the request ends, too old--> gone
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from flexcache.config import ModelConfig
from flexcache.errors import FlexCacheError
from flexcache.ids import KVStatus, TierName
from flexcache.integration.safe_calls import safely
from flexcache.integration.sglang.device_pages import DevicePages
from flexcache.integration.sglang.identity import read_model_id
from flexcache.integration.sglang.layer_waits import LayerWaits
from flexcache.integration.sglang.parked import ParkedRequests
from flexcache.integration.sglang.prefill_rate import PrefillRate
from flexcache.integration.sglang.rank_cache import RankCache
from flexcache.integration.sglang.ranks import read_cache_config, read_rank
from flexcache.logs import log_event
from flexcache.transfer.workers.layer_load import LayerLoad

logger = logging.getLogger(__name__)

_FLUSH_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pages that a matched task pins in DRAM for a request."""

    task_id: int
    keys: Sequence[str]
    parent_key: str | None
    num_pages: int
    matched_s: float


class Queued(NamedTuple):
    """A launched load whose gate is shut; without a task it is lost."""

    task_id: int | None
    num_pages: int


class Asked(NamedTuple):
    """What SGLang has looked up: pages that its tree lacks."""

    rid: str
    keys: Sequence[str]
    parent_key: str | None


class FlexCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's linker, with a cache of its own.

    Attributes:
        has_peers: Whether the engine has other ranks, which must decide alike.
        parent_key: Key of the page before those of the next call; set by `parking`'s hooks, since
            SGLang names only the pages that its tree lacks.
        path: Set likewise before an offload that has pages before it: returns their keys, and the
            slots of all pages up to its end.
        asked: The last look-up.
        layer_done_counter: What the KV pool waits with, before it hands out a layer.

    Raises:
        ConfigError: A setting is unknown or wrong, or the model has pools that are not supported.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        pages = DevicePages(params, components)
        rank = read_rank(get_parallel(), getattr(server_args, "dp_size", 1), False)
        config = read_cache_config(dict(extra_config), params.page_size, rank)
        model = ModelConfig(
            read_model_id(server_args, rank.part),
            num_layers=pages.num_layers,
            num_kv_heads=1,
            head_size=pages.bytes_per_token,
            dtype=pages.dtype,
            sized_by_ranks=True,
        )
        self.cache = RankCache(model, config, pages.tensors, pages.description)
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self.layer_done_counter = LayerWaits(pages.names_by_layer, config.server_timeout_s)
        self.parking = ParkedRequests(
            self.cache, config.remote_lookup_timeout_s, config.op_timeout_s
        )
        self.prefill_rate = PrefillRate()
        self.parent_key: str | None = None
        self.path: Callable[[], tuple[Sequence[str], torch.Tensor]] | None = None
        self.asked: Asked | None = None
        self.has_peers = rank.count > 1
        self._page_size = params.page_size
        self._device = next(iter(pages.tensors.values())).device
        self._pin_s = config.match_ttl_s / 2
        self._pinned: dict[str, Pinned] = {}
        self._queued: dict[str, Queued] = {}
        self._offloads: deque[int | None] = deque()
        """Tasks of the offloads that SGLang has not collected; None where nothing was copied."""
        self._ended: dict[int, bool] = {}

    # -- loads -----------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the numbers of pages that can be loaded: those in DRAM, which are pinned."""
        keys = _kv_of(transfers).keys or []
        self.asked = Asked(rid, keys, self.parent_key)
        pinned = self._pinned.get(rid)
        now = time.monotonic()
        if pinned is not None and (pinned.keys != keys or now - pinned.matched_s > self._pin_s):
            self.release(rid)
            pinned = None
        if pinned is None and keys:
            pinned = self._pin(keys, self.parent_key, len(keys), now)
            if pinned is not None:
                self._pinned[rid] = pinned
        return [] if pinned is None else list(range(1, pinned.num_pages + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of pages that `lookup` has found.

        False lets SGLang compute them. All ranks must say the same: beside others, a rank that
        cannot load queues a lost load.
        """
        kv = _kv_of(transfers)
        num_pages = len(kv.keys or ())
        pinned = self._pinned.pop(rid, None)
        if pinned is not None and pinned.num_pages != num_pages:  # another rank has fewer
            wider = pinned
            pinned = self._pin(wider.keys, wider.parent_key, num_pages, wider.matched_s)
            self._cancel(wider.task_id)
            if pinned is not None and pinned.num_pages != num_pages:
                self._cancel(pinned.task_id)
                pinned = None
        if pinned is not None and not self._launch(pinned.task_id, _slots(kv)):
            pinned = None
        if pinned is None and not self.has_peers:
            return False
        self._queued[rid] = Queued(None if pinned is None else pinned.task_id, num_pages)
        return True

    def start_layer_wise_loading(self) -> int:
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        with self._behind_forward():
            return self.layer_done_counter.add([self._begin(load) for load in queued.values()])

    def _begin(self, queued: Queued) -> LayerLoad:
        if queued.task_id is not None:
            return self.cache.client.load_by_layer(queued.task_id, queued.num_pages)
        lost = LayerLoad({}, queued.num_pages)
        lost.end()
        return lost

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is not None and queued.task_id is not None:
            self._cancel(queued.task_id)
        return queued is not None

    def release(self, rid: str) -> None:
        """Unpin what was found for a request."""
        pinned = self._pinned.pop(rid, None)
        if pinned is not None:
            self._cancel(pinned.task_id)

    def park_asked(self) -> None:
        """Bring to DRAM what the last look-up missed there; its request waits until `is_ready`."""
        if self.asked is None:
            return
        rid, keys, parent_key = self.asked
        pinned = self._pinned.get(rid)
        if pinned is None or pinned.num_pages < len(keys):
            self.parking.arrived(rid, keys, parent_key)

    def is_ready(self, rid: str) -> bool:
        """Return whether a request has nothing to wait for."""
        if rid not in self.parking:
            return True
        if not self.parking.is_ready(rid):
            return False
        self.release(rid)  # since then more has come
        return True

    def ended(self, rid: str) -> None:
        """Forget a request that has ended, or was aborted."""
        self.parking.ended(rid)
        self.release(rid)

    def _pin(
        self, keys: Sequence[str], parent_key: str | None, num_pages: int, now: float
    ) -> Pinned | None:
        """Match the first pages and pin those in DRAM."""
        for _ in range(2):
            matched = self._match(keys[:num_pages], parent_key)
            if matched is None:
                return None
            task_id, num_found, num_in_dram = matched
            if num_found == num_in_dram and num_found:
                return Pinned(task_id, keys, parent_key, num_found, now)
            self._cancel(task_id)
            if not num_in_dram:
                return None
            num_pages = num_in_dram
        return None

    def _match(self, keys: Sequence[str], parent_key: str | None) -> tuple[int, int, int] | None:
        """Match pages; return the task, how many there are, and how many of them in DRAM."""
        prompt = self._prompt(keys, parent_key)
        found = safely(self.cache.manager.get_match_by_tier, look_up=False, **prompt)
        if found is None:
            return None
        task_id, mask, sources = found
        in_dram = sources.get(TierName.CPU, 0) // self._page_size
        return task_id, self.cache.num_pages(mask), in_dram

    # -- stores ----------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages off the GPU, those that are not cached yet. SGLang keeps them until then."""
        kv = _kv_of(transfers)
        keys, parent_key = kv.keys or [], self.parent_key
        task_id = self._put(keys, parent_key, _slots(kv))
        if task_id is None and self.path is not None and not self._are_in_dram(keys, parent_key):
            before, slots = self.path()  # pages before have left DRAM, which keeps none without
            task_id = self._put([*before, *keys], None, slots.cpu().numpy())
        self._offloads.append(task_id)
        return True

    def _put(
        self, keys: Sequence[str], parent_key: str | None, slots: np.ndarray[Any, Any]
    ) -> int | None:
        """Begin to copy those of some pages that are not cached; None if there are none."""
        found = safely(self.cache.manager.put_match, **self._prompt(keys, parent_key))
        if found is None or not found[1].any():
            return None
        task_id: int = found[0]
        if not self._launch(task_id, slots[found[1]]):
            return None
        with self._behind_forward():
            self.cache.client.open_gates([task_id])
        return task_id

    def _are_in_dram(self, keys: Sequence[str], parent_key: str | None) -> bool:
        if (matched := self._match(keys, parent_key)) is None:
            return False
        task_id, _, num_in_dram = matched
        self._cancel(task_id)
        return num_in_dram == len(keys)

    def num_completed_offloads(self) -> int:
        running = [t for t in self._offloads if t is not None and t not in self._ended]
        if running:
            ended = safely(self.cache.manager.try_wait, running)
            if ended is None:  # the cache was closed: it has let go of the GPU
                self._ended.update(dict.fromkeys(running, False))
            else:
                self._ended.update({t: r.status is KVStatus.SUCCESS for t, r in ended.items()})
        count = 0
        for task_id in self._offloads:
            if task_id is not None and task_id not in self._ended:
                break
            count += 1
        return count

    def pop_completed_offload(self) -> bool:
        task_id = self._offloads.popleft()
        return True if task_id is None else self._ended.pop(task_id)

    @contextmanager
    def _behind_forward(self) -> Iterator[None]:
        """Let copies that are begun here wait for the forward passes begun so far, which write and
        read the pages."""
        if self._device.type == "cpu":
            yield
            return
        stream = torch.cuda.Stream(self._device)
        for event in self.record_offload_ready():
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    # -- the cache as a whole --------------------------------------------------------------------

    def reset(self) -> None:
        """End all that was begun. What is cached stays."""
        self.parking.reset()
        for rid in list(self._pinned):
            self.release(rid)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        running = [task_id for task_id in self._offloads if task_id is not None]
        safely(self.cache.manager.wait, running, _FLUSH_PATIENCE_S)
        safely(self.cache.manager.cancel, running)
        safely(self.cache.manager.wait, running)
        self._offloads.clear()
        self._ended.clear()

    def close(self) -> None:
        self.reset()
        self.cache.close()

    # -- calls -----------------------------------------------------------------------------------

    def _prompt(self, keys: Sequence[str], parent_key: str | None) -> dict[str, Any]:
        parent = None if parent_key is None else bytes.fromhex(parent_key)
        return self.cache.prompt([bytes.fromhex(key) for key in keys], parent)

    def _launch(self, task_id: int, slots: np.ndarray[Any, Any]) -> bool:
        """Launch a task behind a gate; if that fails, it has ended."""
        try:
            self.cache.manager.launch([task_id], [slots], gated=True)
        except (FlexCacheError, ValueError, KeyError) as error:
            log_event(logger, logging.WARNING, "launch_failed", task=task_id, error=error)
            self._cancel(task_id)
            return False
        return True

    def _cancel(self, task_id: int) -> None:
        safely(self.cache.manager.cancel, [task_id])


def _kv_of(transfers: list[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name is PoolName.KV)


def _slots(transfer: PoolTransfer) -> np.ndarray[Any, Any]:
    slots: np.ndarray[Any, Any] = transfer.device_indices.cpu().numpy()
    return slots
