"""FlexCacheHiCacheStorage: FlexCache below SGLang's HiCache, which manages GPU and host memory.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"interface_v1": 1,
        "backend_name": "flexcache", "module_path": "flexcache.integration.sglang",
        "class_name": "FlexCacheHiCacheStorage", "hicache_storage_pass_prefix_keys": true, ...}'

HiCache calls it on threads of its own, so calls may wait. Pages are copied between HiCache's host
pool and FlexCache's without a buffer in between.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_parallel, get_server_args

from flexcache.config import ModelConfig
from flexcache.errors import ConfigError, UnsupportedLayoutError
from flexcache.integration.adapter import safely
from flexcache.integration.checkpoint import identify_now
from flexcache.integration.sglang.parking import check_allowed
from flexcache.integration.sglang.rank import (
    Pages,
    RankCache,
    common_seed,
    read_cache_config,
    read_model_id,
    read_rank,
)
from flexcache.integration.sglang.weights import RANK
from flexcache.logs import log_event

logger = logging.getLogger(__name__)


def page_tensors(pool: Any) -> dict[str, torch.Tensor]:
    """Return the pool's pieces of pages by name; page ``n`` has the slots from ``n * page_size``.

    A page has one or several pieces, which may lie anywhere in the pool:

        page_first_direct   page 0: K, V     of all layers
        layer_first         page 0: K, V     of layer 0, of layer 1, ...
        MLA                 page 0: the latent vectors of all layers

    The pool knows the address of every piece in every layout, also in a new one, which the shapes
    of its tensors do not tell. Whatever the layout, a piece of the next page is a fixed distance
    further on. So each piece becomes a tensor ``[page, byte]`` over the pool's own memory, and
    nothing is copied on the way.

    Raises:
        UnsupportedLayoutError: Pages do not lie at fixed distances.
    """
    num_pages = pool.size // pool.page_size
    starts, sizes = _pieces(pool, 0)
    seconds, _ = _pieces(pool, 1) if num_pages > 1 else (starts, sizes)
    lasts, _ = _pieces(pool, num_pages - 1)
    strides = [second - start for start, second in zip(starts, seconds, strict=True)]
    expected = [
        start + stride * (num_pages - 1) for start, stride in zip(starts, strides, strict=True)
    ]
    if expected != lasts or (num_pages > 1 and any(map(int.__lt__, strides, sizes))):
        raise UnsupportedLayoutError(
            f"{type(pool).__name__} with layout {pool.layout!r}: its pages do not lie at fixed "
            "distances"
        )
    return {
        f"piece {number}": _view(start, num_pages, stride, size)
        for number, (start, stride, size) in enumerate(zip(starts, strides, sizes, strict=True))
    }


def describe_pool(pool: Any) -> str:
    """Name what determines the order of a page's bytes."""
    return f"{type(pool).__name__} {pool.layout} {pool.dtype}"


def _pieces(pool: Any, page: int) -> tuple[list[int], list[int]]:
    """Return the addresses and sizes of a page's pieces."""
    first = page * pool.page_size
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(first, first + pool.page_size))
    return [int(address) for address in addresses], [int(size) for size in sizes]


def _view(start: int, num_pages: int, stride: int, size: int) -> torch.Tensor:
    """Return memory that the pool keeps mapped as ``[page, byte]``."""
    length = stride * (num_pages - 1) + size
    memory = (ctypes.c_uint8 * length).from_address(start)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((num_pages, size), (stride, 1))


_SGLANGS_OWN = {"backend_name", "module_path", "class_name", "interface_v1"}
"""Keys of the extra config that are not settings of FlexCache."""


class FlexCacheHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's storage backend, with a cache of its own.

    Args:
        storage_config: SGLang's; its ``extra_config`` has settings of `CacheConfig`.

    Raises:
        ConfigError: A setting is missing, unknown or wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        check_allowed()
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError(
                f"interface_v1 = {extra.get('interface_v1')!r}: must be 1 in "
                "--hicache-storage-backend-extra-config; without it SGLang copies every page twice"
            )
        self._server_args = get_server_args()
        self._settings = {k: v for k, v in extra.items() if k not in _SGLANGS_OWN}
        self._rank = read_rank(
            get_parallel(), getattr(self._server_args, "dp_size", 1), storage_config.is_mla_model
        )
        self.cache: RankCache | None = None
        self._has_warned = False

    # -- the host pool ---------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the cache over the pool's pages."""
        super().register_mem_pool_host(mem_pool_host)
        anchor = getattr(mem_pool_host, "anchor_entry", None)  # of a group of pools
        pool = mem_pool_host if anchor is None else anchor.host_pool
        config = read_cache_config(self._settings, pool.page_size, self._rank)
        tensors = page_tensors(pool)
        read = partial(read_model_id, self._server_args, self._rank.part)
        model_id, config = identify_now(read, config)
        model = ModelConfig(
            model_id,
            num_layers=pool.layer_num,
            num_kv_heads=getattr(pool, "head_num", 1),
            head_size=getattr(pool, "head_dim", None) or tensors["piece 0"].shape[1],
            dtype=pool.dtype,
            sized_by_ranks=True,
        )
        self.cache = RankCache(model, config, tensors, describe_pool(pool))
        groups = [get_parallel().tp_group.cpu_group] if self._rank.num_replicas > 1 else []
        RANK.watch(self.cache, common_seed(groups) if groups else None)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Accept the KV pool.

        Raises:
            ConfigError: The model has another pool, which this backend does not store.
        """
        if host_pool_name is not PoolName.KV:
            raise ConfigError(
                f"the model has a pool of its own for {host_pool_name}: not supported as HiCache's "
                "storage"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # -- pages -----------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many pages are there, from the first on without a gap."""
        return self._answer(self._count, keys, extra_info)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages into the host pool; return which have arrived. No copy runs afterwards."""
        num_ok = self._answer(self._load, keys, extra_info, host_indices)
        return [index < num_ok for index in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages out of the host pool; return which are stored, now or before."""
        self._warn_of_lone_pages(extra_info)
        num_ok = self._answer(self._store, keys, extra_info, host_indices)
        return [index < num_ok for index in range(len(keys))]

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._for_each(self.batch_get_v1, transfers, extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._for_each(self.batch_set_v1, transfers, extra_info)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _unsupported(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse the interface that copies pages through tensors. Not called with v1."""
        raise NotImplementedError("set interface_v1 to 1 in the extra config")

    get = batch_get = set = batch_set = _unsupported

    # -- the backend as a whole ------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything cached and unused."""
        if self.cache is not None:
            safely(self.cache.reset)

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()

    # -- calls of the cache ----------------------------------------------------------------------

    def _count(self, cache: RankCache, pages: Pages) -> int:
        def count(prompt: dict[str, Any], start: int) -> int:
            task_id, mask = cache.manager.get_match(**prompt)
            cache.manager.cancel([task_id])
            return cache.num_pages(mask)

        return _by_pieces(count, cache, pages)

    def _load(self, cache: RankCache, pages: Pages, host_indices: torch.Tensor) -> int:
        slots = host_indices.numpy()
        cache.computes()

        def load(prompt: dict[str, Any], start: int) -> int:
            wanted = slots[start * cache.page_size :]
            task_id, _ = cache.manager.get_async(slot_mapping=wanted, **prompt)
            return cache.num_pages(cache.manager.wait([task_id])[task_id].mask)

        return _by_pieces(load, cache, pages)

    def _store(self, cache: RankCache, pages: Pages, host_indices: torch.Tensor) -> int:
        """Store pages, behind their prefix or else apart from it: a HiCache that writes back hands
        over the end of a prompt before its beginning."""
        for prompt in cache.places(pages):
            task_id, _ = cache.manager.put_async(slot_mapping=host_indices.numpy(), **prompt)
            mask = cache.manager.wait([task_id])[task_id].mask
            if mask.size and mask[-1]:
                return len(pages.keys)
            num_stored = self._count(cache, pages)  # now or before
            if num_stored:
                return num_stored
        return 0

    def _answer(
        self,
        call: Callable[..., int],
        keys: Sequence[str],
        extra_info: HiCacheStorageExtraInfo | None,
        *arguments: Any,
    ) -> int:
        """Call the cache about some pages; 0 if that fails, since the request must not."""
        if self.cache is None or not keys:
            return 0
        before = extra_info.prefix_keys if extra_info is not None else None
        parent = bytes.fromhex(before[-1]) if before else None
        pages = Pages([bytes.fromhex(key) for key in keys], parent)
        num_pages: int = safely(call, self.cache, pages, *arguments, if_failed=0)
        return num_pages

    def _for_each(
        self,
        call: Callable[..., list[bool]],
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: call(transfer.keys or [], transfer.host_indices, extra_info)
            for transfer in transfers
        }

    def _warn_of_lone_pages(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        if self._has_warned or (extra_info is not None and extra_info.prefix_keys is not None):
            return
        self._has_warned = True
        log_event(
            logger, logging.WARNING, "prefix_keys_missing",
            effect="prompts that SGLang stores in pieces are not found whole",
            remedy="hicache_storage_pass_prefix_keys: true in the extra config",
        )  # fmt: skip


def _by_pieces(call: Callable[[dict[str, Any], int], int], cache: RankCache, pages: Pages) -> int:
    """Go along a prompt's pages, which may have been stored in pieces; return how many are there.

    Args:
        call: Handles the pages from an index on, at one place; returns how many it found.
    """
    done = 0
    while done < len(pages.keys):
        before = pages.keys[done - 1] if done else pages.parent_key
        places = cache.places(Pages(pages.keys[done:], before))
        num_found = next(filter(None, (call(prompt, done) for prompt in places)), 0)
        if not num_found:
            break
        done += num_found
    return done
