"""The linker over SGLang's real pools: bytes of each pool come back, whichever rank loads them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_engine import apart

from flexcache.errors import ConfigError

pytestmark = pytest.mark.whole


NUM_PAGES = 5
KEYS = [bytes([number]).hex() * 32 for number in range(1, NUM_PAGES + 1)]


def transfer(pool: str, slots: torch.Tensor | None = None, keys: Any = KEYS) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(name=PoolName[pool], device_indices=slots, keys=keys)


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).ravel()


def store(linker: Any, transfers: list[Any]) -> None:
    """Offload, and wait until SGLang may collect it."""
    assert linker.offload(transfers)
    linker.cache.manager.wait([t for t in linker._offloads._tasks if t is not None], 60.0)
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload()


def load(linker: Any, transfers: list[Any]) -> None:
    found = linker.lookup("request", transfers)
    assert found[-1] == len(transfers[0].keys)
    assert linker.load("request", transfers)
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    linker.layer_done_counter.wait_until(0)
    assert linker.finish_layer_wise_loading(index)


def check_one_writer(make_pool: str, buffers: list[str], endpoint: str) -> None:
    import sglang_pools

    size = getattr(sglang_pools, make_pool)().page_size
    pools = [getattr(sglang_pools, make_pool)() for _ in range(2)]
    writer, reader = (
        sglang_pools.make_linker(
            sglang_pools.make_params(pool), tp_rank=rank, tp_size=2, endpoint=f"ipc://{endpoint}"
        )
        for rank, pool in enumerate(pools)
    )
    every = [[tensor for name in buffers for tensor in getattr(pool, name)] for pool in pools]
    for tensors in every:
        sglang_pools.fill(tensors, 1)  # the ranks hold the same
    pages, elsewhere = [3, 7, 4, 9, 2], [11, 12, 5, 6, 14]
    before = reader.cache.manager.stats()["tiers"]["CPU"]["written_bytes"]
    assert reader.offload([transfer("KV", slots_of(pages, size))])
    assert reader.num_completed_offloads() == 1 and reader.pop_completed_offload()
    assert reader.lookup("request", [transfer("KV")]) == []
    store(writer, [transfer("KV", slots_of(pages, size))])
    assert before == 0
    for tensors in every:
        sglang_pools.fill(tensors, 2)
    expected = [tensor.clone() for tensor in every[0]]
    originals = [tensor.clone() for tensor in expected]
    sglang_pools.fill(originals, 1)
    for linker, tensors in ((writer, every[0]), (reader, every[1])):
        load(linker, [transfer("KV", slots_of(elsewhere, size))])
        for tensor, after, original in zip(tensors, expected, originals, strict=True):
            rows = size if tensor.shape[0] > 40 else 1
            wanted = after.clone()
            for source, target in zip(pages, elsewhere, strict=True):
                part = slice(source * rows, (source + 1) * rows)
                wanted[target * rows : (target + 1) * rows] = original[part]
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))
    for linker in (writer, reader):
        linker.close()


def check_refused() -> None:
    import sglang_pools
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4

    from flexcache.errors import ConfigError

    params = sglang_pools.make_params(sglang_pools.mla_pool())
    with pytest.raises(ConfigError, match="endpoint = None"):
        sglang_pools.make_linker(params, tp_size=2)
    with pytest.raises(ConfigError, match="store_shards = 2: must be unset with SGLang"):
        sglang_pools.make_linker(params, store_shards=2)
    fp4 = MHATokenToKVPoolFP4.__new__(MHATokenToKVPoolFP4)
    fp4.page_size = 16
    with pytest.raises(ConfigError, match="MHATokenToKVPoolFP4"):
        sglang_pools.make_linker(sglang_pools.make_params(fp4))
    for draft in (fp4, sglang_pools.windows_pool()):
        params = sglang_pools.make_params(sglang_pools.mha_pool())
        drafting = replace(params, sidecar_draft_device_pools=(draft,))
        with pytest.raises(ConfigError, match=f"with a draft's {type(draft).__name__}"):
            sglang_pools.make_linker(drafting)
    staged = replace(sglang_pools.make_params(sglang_pools.mha_pool()), pp_size=2)
    with pytest.raises(ConfigError, match="pp_size = 2"):
        sglang_pools.make_linker(staged)


def check_replicated(directory: str) -> None:
    check_one_writer("mla_pool", ["kv_buffer"], f"{directory}/mla")
    check_one_writer("dsa_pool", ["kv_buffer", "index_k_with_scale_buffer"], f"{directory}/dsa")
    check_refused()


def test_one_rank_stores_latents_and_all_load_them(tmp_path: Path) -> None:
    apart(check_replicated, str(tmp_path))


def check_tails() -> None:
    import sglang_pools

    pool = sglang_pools.windows_pool()
    size = pool.page_size
    to_window = torch.zeros(sglang_pools.NUM_SLOTS + size, dtype=torch.int64)
    params = sglang_pools.make_params(
        pool, translate_loc_from_full_to_swa=lambda slots: to_window[slots]
    )
    linker = sglang_pools.make_linker(params, "FULL SWA", tp_size=2)
    full = [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer]
    window = [*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer]
    sglang_pools.fill([*full, *window], 1)
    # Two nodes: their ends are where a prompt may be resumed. The window has three pages.
    to_window[slots_of([3, 7, 4], size)] = slots_of([5, 1, 2], size)
    store(linker, [transfer("KV", slots_of([3, 7, 4], size), KEYS[:3])])
    to_window[slots_of([9, 2], size)] = slots_of([8, 3], size)
    linker.parent_key, linker.num_before = KEYS[2], 3
    linker.path = lambda: (KEYS[:3], slots_of([3, 7, 4, 9, 2], size))
    store(linker, [transfer("KV", slots_of([9, 2], size), KEYS[3:])])
    wanted = [tensor[slots_of([3, 7, 4], size)].clone() for tensor in full]
    wanted += [tensor[slots_of([5, 1, 2], size)].clone() for tensor in window]
    sglang_pools.fill([*full, *window], 2)

    linker.parent_key, linker.num_before = None, 0
    assert linker.lookup("request", [transfer("KV")]) == [3, 5]
    load = [
        transfer("KV", slots_of([11, 12, 13], size), KEYS[:3]),
        transfer("SWA", slots_of([7, 6, 4], size), KEYS[:3]),
    ]
    assert linker.load("request", load)  # another rank has no more
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    got = [tensor[slots_of([11, 12, 13], size)] for tensor in full]
    got += [tensor[slots_of([7, 6, 4], size)] for tensor in window]
    for after, before in zip(got, wanted, strict=True):
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))
    to_window[slots_of([4], size)] = 0  # SGLang has let the window pass
    linker.path = None
    others = ["f1" * 32, "f2" * 32, "f3" * 32]
    store(linker, [transfer("KV", slots_of([3, 7, 4], size), others)])
    assert linker.lookup("other", [transfer("KV", keys=others)]) == []
    linker.reset()
    assert linker.cache.manager.stats()["tiers"]["CPU"]["leased"] == 0
    linker.cache.manager.check()
    linker.close()


def test_look_ups_offer_the_other_ranks_every_place_with_a_tail() -> None:
    apart(check_tails)


def check_plugins_without_ours() -> None:
    import sglang_pools

    with pytest.raises(ConfigError, match="SGLANG_PLUGINS = 'another': must name flexcache"):
        sglang_pools.make_linker(sglang_pools.make_params(sglang_pools.mha_pool()))


def test_a_start_without_the_plugin_is_refused() -> None:
    apart(check_plugins_without_ours, SGLANG_PLUGINS="another")


def check_other_version() -> None:
    import importlib
    import sys

    import sglang.version
    import sglang_pools
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from flexcache.integration.sglang import FlexCacheHiCacheStorage

    params = sglang_pools.make_params(sglang_pools.mha_pool())
    vars(sglang.version)["__version__"] = "0.5.23+cu130"
    sglang_pools.make_linker(params).close()
    vars(sglang.version)["__version__"] = "0.5.24"
    wanted = r"SGLang 0\.5\.24 is installed.* sglang==0\.5\.23"
    with pytest.raises(ConfigError, match=wanted):
        sglang_pools.make_linker(params)
    with pytest.raises(ConfigError, match=wanted):
        FlexCacheHiCacheStorage(HiCacheStorageConfig.__new__(HiCacheStorageConfig), {})
    for name in [name for name in sys.modules if name.startswith("flexcache.integration.sglang")]:
        del sys.modules[name]
    vars(sys)["modules"]["sglang.srt.mem_cache.unified_cache.unified_cache_linker"] = None
    with pytest.raises(ConfigError, match=wanted):  # one without this module
        importlib.import_module("flexcache.integration.sglang")


def test_a_version_that_was_not_run_is_refused() -> None:
    apart(check_other_version)


def start_stages(log: str) -> None:
    import sglang
    from sglang_engine import linker_options, options

    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    sglang.Engine(**options(**linker_options(num_cpu_blocks=100), pp_size=2))


def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(AssertionError):
        apart(start_stages, str(log))
    assert "ConfigError: pp_size = 2: must be 1" in log.read_text()
