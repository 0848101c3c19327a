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

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.disaggregation.kv_events import KVEventsConfig, is_kv_publisher_rank
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from flexcache.cache.block_keys import PromptContent
from flexcache.cache.journal import Change, Cleared
from flexcache.config import ModelConfig
from flexcache.config.values import reject
from flexcache.events.wire import Event, describe
from flexcache.ids import KVStatus, RequestInfo
from flexcache.integration.adapter import PrefillRate, safely
from flexcache.integration.checkpoint import identify_now
from flexcache.integration.sglang.loads import (
    LayerWaits,
    Load,
    PageCalls,
    WholeLoad,
)
from flexcache.integration.sglang.parking import check_allowed
from flexcache.integration.sglang.pools import Blocks, DevicePages, PageTables
from flexcache.integration.sglang.rank import (
    Pages,
    RankCache,
    all_agree,
    common_seed,
    lookup_groups,
    read_cache_config,
    read_model_id,
    read_rank,
)
from flexcache.integration.sglang.requests import RankRequests, valid_session_id
from flexcache.integration.sglang.weights import RANK
from flexcache.manager import KVManager
from flexcache.tasks.instructions import PromisedLoad

_FLUSH_PATIENCE_S = 5.0


class Offloads:
    """The offloads of one rank that SGLang has not collected."""

    def __init__(self, cache: RankCache) -> None:
        self._manager = cache.manager
        self._client = cache.client
        self._tasks: deque[int | None] = deque()
        """None where nothing was copied."""
        self._ended: dict[int, bool] = {}
        self._gated: set[int] = set()
        """Tasks whose end the client keeps, with an open gate, until it is taken."""
        self._are_whole: deque[bool] = deque()
        """Whether they have all pages of their nodes."""
        self._num_collected = 0
        self._pins: deque[tuple[int, Callable[[], object]]] = deque()

    def add(self, task_id: int | None, is_whole: bool = True) -> None:
        self._tasks.append(task_id)
        self._are_whole.append(is_whole)
        if task_id is not None:
            self._gated.add(task_id)

    def pin(self, call: Callable[[], object]) -> None:
        """Make a call that pins, once all that was added has ended."""
        self._pins.append((self._num_collected + len(self._tasks), call))

    def num_completed(self) -> int:
        """Return how many have ended of those that were added first."""
        running = [t for t in self._tasks if t is not None and t not in self._ended]
        if running:
            ended = safely(self._manager.try_wait, running)
            if ended is None:  # the cache was closed: it has let go of the GPU
                self._ended.update(dict.fromkeys(running, False))
            else:
                self._ended.update({t: r.status is KVStatus.SUCCESS for t, r in ended.items()})
        self._gated.difference_update(self._client.take_ended(self._gated))
        count = 0
        for task_id in self._tasks:
            if task_id is not None and task_id not in self._ended:
                break
            count += 1
        self._make_calls(self._num_collected + count)
        return count

    def _make_calls(self, num_ended: int) -> None:
        while self._pins and self._pins[0][0] <= num_ended:
            self._pins.popleft()[1]()

    def pop(self) -> bool:
        """Collect the first one; return whether all of its node is stored."""
        task_id, is_whole = self._tasks.popleft(), self._are_whole.popleft()
        self._num_collected += 1
        return (True if task_id is None else self._ended.pop(task_id)) and is_whole

    def reset(self) -> None:
        """End all of them."""
        running = [task_id for task_id in self._tasks if task_id is not None]
        safely(self._manager.wait, running, _FLUSH_PATIENCE_S)
        safely(self._manager.cancel, running)
        safely(self._manager.wait, running)
        self._num_collected += len(self._tasks)
        self._make_calls(self._num_collected)
        self._tasks.clear()
        self._ended.clear()
        self._are_whole.clear()


def publishes_events(server_args: Any) -> bool:
    """Return whether SGLang publishes the KV events of this rank's cache."""
    config = server_args.kv_events_config
    if not is_kv_publisher_rank(config):
        return False
    return bool(KVEventsConfig.from_cli(config).publisher != "null")


class TreeEvents:
    """The KV events of one rank's cache, for the stream of its radix tree.

    SGLang names the pages that a linker shall store, but not their tokens, which routers need:
    hooks remember the prompt that is being inserted into the radix tree.

    Args:
        params: SGLang's ``CacheInitParams``.
        publishes: Whether SGLang's publisher takes them.
    """

    def __init__(self, manager: KVManager, params: Any, publishes: bool) -> None:
        self._manager = manager
        self._page_size = params.page_size
        self._adapter_of = params.kv_event_lora_names.resolve
        self._publishes = publishes
        self._inserted: Any = None
        self._key: Any = None
        self._first = 0

    @contextmanager
    def inserting(self, key: Any) -> Iterator[None]:
        """Remember the prompt that SGLang inserts meanwhile, a ``RadixKey``."""
        self._inserted = key
        try:
            yield
        finally:
            self._inserted = None

    def stores(self, first: int) -> None:
        """Note that pages of the inserted prompt are stored next, from page ``first`` on."""
        self._key, self._first = self._inserted, first

    def looks_up(self, key: Any, first: int) -> None:
        """Note that pages of a prompt are looked up next, from page ``first`` on."""
        self._key, self._first = key, first

    def describe(self, request_id: str = "", is_whole: bool = False) -> PromptContent | None:
        """Describe these pages for KV events and traces; None without such, or if their tokens do
        not tell their KV: those of EAGLE's pairs, or of a caller's own ``extra_key``.

        Args:
            is_whole: Describe the prompt from its first page on.
        """
        key, first = self._key, 0 if is_whole else self._first
        if key is None or not self._manager.wants_request_info:
            return None
        adapter = self._adapter_of(key.extra_key)
        if key.is_bigram or (key.extra_key and adapter is None):
            return None
        tokens = key.raw_token_ids()[first * self._page_size :]
        extra_keys: list[Any] | None = None
        if key.cache_salt and not first:
            extra_keys = [[key.cache_salt], *[None] * (len(tokens) // self._page_size - 1)]
        info = RequestInfo(request_id, lora_name=adapter, extra_keys=extra_keys)
        return PromptContent(tokens, info)

    def take(self) -> list[Event]:
        """Take what the tiers stored and lost since the last call."""
        if not self._publishes:
            return []
        changes = safely(self._manager.take_changes, if_failed=())
        return list(_events(changes, self._manager.cache_config.kv_events_hashes))


def _events(changes: Iterable[Change], hashes: str) -> Iterator[Event]:
    for change in changes:
        if isinstance(change, Cleared):  # readers would apply "all cleared" to the GPU's blocks too
            yield from _events(change.removed, hashes)
        else:
            yield describe(change, hashes)


class Queued(NamedTuple):
    """A load that the rank holds, and whose gate is shut.

    ``pages``: those on the GPU that it fills, if it was ``promised``.
    """

    task_id: int
    num_pages: int
    promised: PromisedLoad | None
    pages: Blocks


class FlexCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's linker, with a cache of its own, or one that ranks with the same KV share.

    Attributes:
        parent_key: Key of the page before those of the next call; set by `parking`'s hooks, since
            SGLang names only the pages that its tree lacks.
        num_before: How many pages are before them; set likewise.
        path: Set likewise before an offload that has pages before it: returns their keys, and the
            slots of all pages up to its end.
        store_limit: How many tokens of the prompt that is being inserted may be stored.
        events: KV events of the cache, for SGLang's own stream.
        layer_done_counter: What the KV pool waits with, before it hands out a layer.
        pools: SGLang's pools that are stored.
        requests: What is pinned for each request, and what it waits for.

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
        self.prefill_rate = PrefillRate() if config.skip_slow_loads else None
        self.parent_key: str | None = None
        self.num_before = 0
        self.store_limit = sys.maxsize
        self.path: Callable[[], tuple[Sequence[str], torch.Tensor]] | None = None
        self._params = params
        self._has_peers = rank.has_peers
        self._patience_s = config.server_timeout_s
        self._stores = rank.stores
        self._device = next(iter(pages.tensors.values())).device
        allocator = params.token_to_kv_pool_allocator
        to_window = getattr(allocator, "translate_loc_from_full_to_swa", None)
        self._tables = PageTables(pages.groups, params.page_size, to_window)
        self._calls = PageCalls(self.cache)
        self.requests = RankRequests(self._calls, self._tables.has_tails, rank.has_peers)
        self._queued: dict[str, Queued] = {}
        self._offloads = Offloads(self.cache)

    # -- loads -----------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the numbers of pages that can be loaded: those in DRAM, which are pinned."""
        keys, session_id = _of(PoolName.KV, transfers).keys, self.requests.session_of(rid)
        return self.requests.find(rid, self._pages(keys, None, session_id))

    def _pages(
        self, keys: Sequence[str] | None, content: PromptContent | None, session_id: str | None
    ) -> Pages:
        """Return pages behind those that the hooks have named."""
        parent = None if self.parent_key is None else bytes.fromhex(self.parent_key)
        own = [bytes.fromhex(key) for key in keys or ()]
        return Pages(own, parent, self.num_before, content, session_id)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of pages that `lookup` has found.

        False lets SGLang compute them, on all ranks or none. A load that every rank holds ends,
        even if the server dies.
        """
        num_pages = len(_of(PoolName.KV, transfers).keys or ())
        taken = self.requests.take(rid, num_pages)
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
        self.requests.release(rid)

    def agree(self, answer: bool) -> bool:
        """Return whether all ranks say yes. Each of them must ask, in the same order."""
        return all_agree(self._params, answer) if self._has_peers else answer

    # -- stores ----------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Copy pages off the GPU, those that are not cached yet. SGLang keeps them until then.

        False, or later a failure, has SGLang offer the node again with the next prompt that has it.
        """
        num_pages = len(_of(PoolName.KV, transfers).keys or ())
        num_stored = min(num_pages, self.store_limit // self.cache.page_size - self.num_before)
        if num_stored < num_pages and (num_stored <= 0 or self._tables.has_tails):
            return False  # a tail is at the end of a node
        task_id = self._store(transfers, num_stored, session_id) if self._stores else None
        if task_id is not None:
            with self._behind_forward():
                self.cache.client.open_gates([task_id])
        self._offloads.add(task_id, num_stored == num_pages)
        return True

    def pin(self, keys: Sequence[str], ttl_s: float, session_id: object) -> None:
        """Pin a prompt's pages once what was offloaded until now is stored."""
        if self._stores:  # else another rank does both
            own = [bytes.fromhex(key) for key in keys]
            self._offloads.pin(partial(self.cache.pin, own, ttl_s, valid_session_id(session_id)))

    def _store(
        self, transfers: Sequence[PoolTransfer], num_pages: int, session_id: str | None
    ) -> int | None:
        """Launch a put of the first pages of a node of SGLang's tree; return its task, None if
        nothing is to copy."""
        kv = _of(PoolName.KV, transfers)
        pages = self._pages(kv.keys, self.events.describe(), valid_session_id(session_id))
        pages = pages.first(num_pages)
        end = pages.num_before + num_pages
        slots, path = kv.device_indices, self.path
        if path is not None and self._tables.num_window_pages(end) > len(pages.keys):
            slots = path()[1]
        states = {transfer.name: transfer.device_indices for transfer in transfers}
        tail = self._tables.tail(states, slots, end) if self._tables.has_tails else None
        blocks = self._tables.pages(kv.device_indices)[:num_pages]
        task_id = self._calls.put(pages, blocks, tail)
        if task_id is None and path is not None and not self._calls.are_in_dram(pages):
            before, slots = path()  # pages before have left DRAM, which keeps none without
            whole = Pages(
                [*map(bytes.fromhex, before), *pages.keys],
                content=self.events.describe(is_whole=True), session_id=pages.session_id,
            )  # fmt: skip
            task_id = self._calls.put(whole, self._tables.pages(slots)[:end], tail)
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
        self.requests.reset()
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
