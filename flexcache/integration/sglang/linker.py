"""FlexCacheLinker: FlexCache as the cache behind SGLang's radix tree, without HiCache.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "FlexCacheLinker",
        "linker_module_path": "flexcache.integration.sglang", "linker_extra_config": {...}}'

SGLang calls it on the thread that schedules and computes, so no call waits, except for the layers
of a load that the model has come to, and `load` for the server. A failed load ends its request:
only what DRAM has, pinned, is offered, and only what the rank holds is loaded, which ends even if
the server dies. `parking` brings the rest to DRAM while a request waits.

    lookup --> pinned --load--> queued --start_layer_wise_loading--> loading --finish--> gone
                  |               +--cancel_queued_load, reset--> gone
                  +--other pages wanted, the request ends, too old--> gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from flexcache.config import ModelConfig
from flexcache.config.values import reject
from flexcache.integration.adapter import PrefillRate
from flexcache.integration.checkpoint import identify_now
from flexcache.integration.sglang.device_pages import DevicePages
from flexcache.integration.sglang.identity import read_model_id
from flexcache.integration.sglang.kv_events import TreeEvents, publishes_events
from flexcache.integration.sglang.layer_waits import LayerWaits, Load
from flexcache.integration.sglang.offloads import Offloads
from flexcache.integration.sglang.page_calls import PageCalls, Pages
from flexcache.integration.sglang.page_tables import Blocks, PageTables
from flexcache.integration.sglang.parked import ParkedRequests
from flexcache.integration.sglang.parking import check_allowed
from flexcache.integration.sglang.pinned_pages import PinnedPages
from flexcache.integration.sglang.rank_cache import RankCache
from flexcache.integration.sglang.rank_weights import RANK
from flexcache.integration.sglang.ranks import (
    all_agree,
    common_seed,
    lookup_groups,
    read_cache_config,
    read_rank,
)
from flexcache.integration.sglang.request_sessions import RequestSessions, valid_session_id
from flexcache.integration.sglang.whole_load import WholeLoad
from flexcache.tasks.instructions import PromisedLoad


class Queued(NamedTuple):
    """A load that the rank holds, and whose gate is shut.

    ``pages``: those on the GPU that it fills, if it was ``promised``.
    """

    task_id: int
    num_pages: int
    promised: PromisedLoad | None
    pages: Blocks


class Asked(NamedTuple):
    """What SGLang has looked up: pages that its tree lacks."""

    rid: str
    pages: Pages


class FlexCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's linker, with a cache of its own, or one that ranks with the same KV share.

    Attributes:
        parent_key: Key of the page before those of the next call; set by `parking`'s hooks, since
            SGLang names only the pages that its tree lacks.
        num_before: How many pages are before them; set likewise.
        path: Set likewise before an offload that has pages before it: returns their keys, and the
            slots of all pages up to its end.
        asked: The last look-up.
        events: KV events of the cache, for SGLang's own stream.
        layer_done_counter: What the KV pool waits with, before it hands out a layer.
        pools: SGLang's pools that are stored.
        sessions: Whose prompts the requests are.

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
        check_allowed()
        if params.pp_size > 1:
            raise reject(
                "pp_size",
                params.pp_size,
                "must be 1: SGLang's pipeline stages do not agree on what their linkers find",
            )
        self.forward_stream = forward_stream
        pages = DevicePages(params, components)
        rank = read_rank(get_parallel(), getattr(server_args, "dp_size", 1), pages.is_replicated)
        config = read_cache_config(
            dict(extra_config), params.page_size, rank, publishes_events(server_args)
        )
        model_id, config = identify_now(partial(read_model_id, server_args, rank.part), config)
        model = ModelConfig(
            model_id,
            num_layers=pages.num_layers,
            num_kv_heads=1,
            head_size=pages.bytes_per_token,
            dtype=pages.dtype,
            sized_by_ranks=True,
            groups=pages.groups,
        )
        self.cache = RankCache(
            model, config, pages.tensors, pages.description, pages.num_blocks,
            pages.group_names if pages.groups else None,
        )  # fmt: skip
        seed = common_seed(lookup_groups(params)) if rank.num_replicas > 1 else None
        RANK.watch(self.cache, seed)
        publishes = config.kv_events and config.endpoint is None  # else the server does
        self.events = TreeEvents(self.cache.manager, params, publishes)
        self.pools = pages.pools
        self.layer_done_counter = LayerWaits(pages.names_by_layer, config.server_timeout_s)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.parking = ParkedRequests(
            self.cache, config.remote_lookup_timeout_s, config.op_timeout_s
        )
        self.sessions = RequestSessions(self.cache.manager)
        self.prefill_rate = PrefillRate() if config.skip_slow_loads else None
        self.parent_key: str | None = None
        self.num_before = 0
        self.path: Callable[[], tuple[Sequence[str], torch.Tensor]] | None = None
        self.asked: Asked | None = None
        self._params = params
        self._has_peers = rank.has_peers
        self._patience_s = config.server_timeout_s
        self._stores = rank.stores
        self._device = next(iter(pages.tensors.values())).device
        allocator = params.token_to_kv_pool_allocator
        to_window = getattr(allocator, "translate_loc_from_full_to_swa", None)
        self._tables = PageTables(pages.groups, params.page_size, to_window)
        self._calls = PageCalls(self.cache)
        self._pinned = PinnedPages(
            self._calls, self._tables.has_tails, rank.has_peers, config.match_ttl_s / 2
        )
        self._queued: dict[str, Queued] = {}
        self._offloads = Offloads(self.cache)

    # -- loads -----------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the numbers of pages that can be loaded: those in DRAM, which are pinned."""
        keys, session_id = _of(PoolName.KV, transfers).keys or [], self.sessions.of(rid)
        pages = Pages(keys, self.parent_key, self.num_before, session_id=session_id)
        self.asked = Asked(rid, pages)
        return self._pinned.find(rid, pages)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of pages that `lookup` has found.

        False lets SGLang compute them, on all ranks or none. A load that every rank holds ends,
        even if the server dies.
        """
        num_pages = len(_of(PoolName.KV, transfers).keys or ())
        taken = self._pinned.take(rid, num_pages)
        if taken is None:
            return self.agree(False)
        task_id, pages = taken
        blocks = self._tables.to_load(transfers, pages.num_before)
        # A reset ends what is only held; models with tails load in several ops.
        promised = None if self._tables.has_tails else self._calls.promise(task_id)
        is_sure = promised is not None or self._calls.hold(task_id, blocks, self._patience_s)
        will_load = self.agree(is_sure)
        if will_load:
            self._queued[rid] = Queued(task_id, num_pages, promised, blocks[0])
        else:
            self._calls.drop(task_id)
            self._let_leave()
        return will_load

    def start_layer_wise_loading(self) -> int:
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        with self._behind_forward():
            return self.layer_done_counter.add([self._begin(load) for load in queued.values()])

    def _begin(self, queued: Queued) -> Load:
        task_id, num_pages, promised, pages = queued
        if promised is not None:
            return self.cache.client.load_promised(promised, pages.tolist())
        if self._tables.has_tails:
            return WholeLoad(self.cache.client, task_id, self._calls.cancel)
        return self.cache.client.load_by_layer(task_id, num_pages)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        has_landed = self.layer_done_counter.finish(counter_index)
        self._let_leave()
        return has_landed

    def cancel_queued_load(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self._calls.drop(queued.task_id)
            self._let_leave()
        return queued is not None

    def _let_leave(self) -> None:
        """Let the rank leave a server that is lost, unless a promised load has not ended."""
        if not self._queued and not self.layer_done_counter.is_busy:
            self._calls.end_promises()

    def release(self, rid: str) -> None:
        """Unpin what was found for a request."""
        self._pinned.release(rid)

    def park_asked(self) -> None:
        """Bring to DRAM what the last look-up missed there; its request waits until `is_ready`."""
        if self.asked is None:
            return
        rid, pages = self.asked
        if self._pinned.longest(rid) < len(pages.keys):
            content = self.events.describe(rid)
            self.parking.arrived(rid, pages.keys, pages.parent_key, content, self.sessions.of(rid))

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
        self.sessions.ended(rid)
        self.release(rid)

    def agree(self, answer: bool) -> bool:
        """Return whether all ranks say yes. Each of them must ask, in the same order."""
        return all_agree(self._params, answer) if self._has_peers else answer

    # -- stores ----------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages off the GPU, those that are not cached yet. SGLang keeps them until then."""
        task_id = self._store(transfers, session_id) if self._stores else None
        if task_id is not None:
            with self._behind_forward():
                self.cache.client.open_gates([task_id])
        self._offloads.add(task_id)
        return True

    def _store(self, transfers: Sequence[PoolTransfer], session_id: str | None) -> int | None:
        """Launch a put of a node of SGLang's tree; return its task, None if nothing is to copy."""
        kv = _of(PoolName.KV, transfers)
        content = self.events.describe()
        session_id = valid_session_id(session_id)
        pages = Pages(kv.keys or [], self.parent_key, self.num_before, content, session_id)
        end = pages.num_before + len(pages.keys)
        slots, path = kv.device_indices, self.path
        if path is not None and self._tables.num_window_pages(end) > len(pages.keys):
            slots = path()[1]
        states = {transfer.name: transfer.device_indices for transfer in transfers}
        tail = self._tables.tail(states, slots, end) if self._tables.has_tails else None
        task_id = self._calls.put(pages, self._tables.pages(kv.device_indices), tail)
        if task_id is None and path is not None and not self._calls.are_in_dram(pages):
            before, slots = path()  # pages before have left DRAM, which keeps none without
            content = self.events.describe(is_whole=True)
            whole = Pages([*before, *pages.keys], content=content, session_id=session_id)
            task_id = self._calls.put(whole, self._tables.pages(slots), tail)
        return task_id

    def num_completed_offloads(self) -> int:
        return self._offloads.num_completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

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
        self._pinned.reset()
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        self._let_leave()
        self._offloads.reset()

    def close(self) -> None:
        self.reset()
        self.cache.close()


def _of(name: PoolName, transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name is name)
