"""FlexCache as HiCache's storage in a real SGLang engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from sglang_engine import PAGE, TinyEngine, apart, options, prompt

LAYOUTS = ["page_first_direct", "layer_first"]


def storage_options(
    layout: str, ssd: str = "", flexcache: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> dict[str, Any]:
    """Return SGLang's settings for a HiCache with FlexCache below it.

    Args:
        flexcache: Further settings of FlexCache.
        more: Further settings of SGLang.
    """
    tiers = {"num_cpu_blocks": 400}
    if ssd:
        tiers = {"num_cpu_blocks": 64, "num_ssd_blocks": 400, "ssd_cache_dirs": [ssd]}
    extra = {
        "backend_name": "flexcache",
        "module_path": "flexcache.integration.sglang",
        "class_name": "FlexCacheHiCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        "hicache_storage_pass_prefix_keys": True,
        **tiers,
        **flexcache,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        **more,
    }


def engine_with_storage(layout: str, ssd: str = "", **more: Any) -> TinyEngine:
    return TinyEngine(**storage_options(layout, ssd, **more))


def manager_of(engine: TinyEngine) -> Any:
    backend = engine.tree.cache_controller.storage_backend
    return getattr(backend, "_backend", backend).cache.manager


def settle(engine: TinyEngine) -> None:
    """Step until HiCache has handed everything to its storage, and that is stored."""
    manager, controller = manager_of(engine), engine.tree.cache_controller

    def is_done() -> bool:
        tree = engine.tree
        return not (
            tree.ongoing_write_through or tree.ongoing_backup or controller.backup_queue.qsize()
        )

    engine.step_until(is_done)
    server = manager._transport.server
    with server.lock, server.session() as tasks:
        while tasks.sessions.num_open:
            server.state.changed.wait(0.05)


def origins(request: Any) -> tuple[int, int, int]:
    """Return the tokens that came from the GPU, from HiCache's host pool and from its storage."""
    return request.cached_tokens_device, request.cached_tokens_host, request.cached_tokens_storage


def check_tiers(layout: str, ssd: str) -> None:
    engine = engine_with_storage(layout, ssd)
    tokens = prompt(200)
    cold = engine.generate(tokens)
    assert origins(cold) == (0, 0, 0)
    settle(engine)
    kept = engine.kv_bytes(tokens[:192])
    engine.flush()
    from_storage = engine.generate(tokens)
    assert origins(from_storage) == (0, 0, 192)
    assert list(from_storage.output_ids) == list(cold.output_ids)
    assert engine.kv_bytes(tokens[:192]) == kept
    if ssd:
        settle(engine)
        engine.flush()
        manager_of(engine).clear("CPU")
        from_ssd = engine.generate(tokens)
        assert origins(from_ssd) == (0, 0, 192)
        assert list(from_ssd.output_ids) == list(cold.output_ids)
        assert engine.kv_bytes(tokens[:192]) == kept
        assert manager_of(engine).stats()["engine"]["hit_blocks"]["SSD"] >= 12
    manager_of(engine).check()


@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.whole)])
def test_pages_come_back_whole_from_dram_and_ssd(layout: str, tmp_path: Path) -> None:
    apart(check_tiers, layout, str(tmp_path))


def check_pieces(policy: str) -> None:
    engine = engine_with_storage("page_first_direct", hicache_write_policy=policy)
    short, whole = prompt(100), prompt(300)
    for _ in range(2):  # write_through_selective stores what is used again
        engine.generate(short)
        cold = engine.generate(whole)
        settle(engine)
    if policy == "write_back":  # stores what is evicted from the GPU
        for seed in range(1, 5):
            engine.generate(prompt(1500, seed), 2)
        settle(engine)
    engine.flush()
    again = engine.generate(whole)
    assert origins(again)[2] == 288
    assert list(again.output_ids) == list(cold.output_ids)


@pytest.mark.parametrize(
    "policy",
    [
        "write_through",
        pytest.param("write_through_selective", marks=pytest.mark.whole),
        pytest.param("write_back", marks=pytest.mark.whole),
    ],
)
def test_a_prompt_stored_in_pieces_is_found_whole(policy: str) -> None:
    apart(check_pieces, policy)


def check_restart(ssd: str, outputs: str) -> None:
    engine = engine_with_storage("page_first_direct", ssd)
    answer = engine.generate(prompt(200))
    if Path(outputs).exists():
        assert origins(answer) == (0, 0, 192)
        assert list(answer.output_ids) == json.loads(Path(outputs).read_text())
    Path(outputs).write_text(json.dumps(list(answer.output_ids)))
    settle(engine)
    engine.tree.cache_controller.detach_storage_backend()


def test_what_is_on_ssd_outlives_the_engine(tmp_path: Path) -> None:
    for _ in range(2):
        apart(check_restart, str(tmp_path / "ssd"), str(tmp_path / "outputs"))


def check_faults(prefetch_policy: str, layout: str, ssd: str) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    engine = engine_with_storage(layout, ssd, hicache_storage_prefetch_policy=prefetch_policy)
    assert isinstance(engine.tree.cache_controller.storage_backend, HiCacheStorageFailureInjector)
    prompts = [prompt(120 + 60 * seed, seed) for seed in range(6)]
    expected = [list(engine.generate(tokens).output_ids) for tokens in prompts]
    num_loaded = 0
    for _ in range(4):
        settle(engine)
        engine.flush()
        requests = [engine.add(tokens) for tokens in prompts]
        engine.step_until(lambda: all(request.finished() for request in requests))  # noqa: B023
        assert [list(request.output_ids) for request in requests] == expected
        num_loaded += sum(origins(request)[2] for request in requests)
    assert num_loaded > 0
    manager_of(engine).check()


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("wait_complete", LAYOUTS[1]),
        pytest.param("best_effort", LAYOUTS[0], marks=pytest.mark.whole),
        pytest.param("timeout", LAYOUTS[0], marks=pytest.mark.whole),
    ],
)
def test_no_token_is_wrong_while_the_storage_fails(
    policy: str, layout: str, tmp_path: Path
) -> None:
    apart(
        check_faults,
        policy,
        layout,
        str(tmp_path),
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY="0.02",
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE="0.3",
    )


def check_ranks(ssd: str) -> None:
    import sglang
    from make_models import make_model
    from paths import MODELS

    make_model(MODELS, "tiny")
    settings = storage_options("layer_first", ssd)
    engine = sglang.Engine(**options(**settings, tp_size=2))
    tokenizer = engine.tokenizer_manager
    sampling = {"temperature": 0, "max_new_tokens": 8}

    def generate() -> Any:
        return engine.generate(input_ids=prompt(200), sampling_params=sampling)

    def check_again() -> None:
        while not engine.flush_cache().success:  # refused until all is stored
            pass
        again = generate()
        details = again["meta_info"]["cached_tokens_details"]
        assert (details["device"], details["host"], details["storage"]) == (0, 0, 192), details
        assert again["output_ids"] == cold["output_ids"]

    cold = generate()
    check_again()
    while not engine.loop.run_until_complete(tokenizer.detach_hicache_storage()).success:
        pass
    config = {name: settings[name] for name in settings if name.startswith("hicache_storage")}
    config["hicache_storage_backend_extra_config_json"] = config.pop(
        "hicache_storage_backend_extra_config"
    )
    attached = engine.loop.run_until_complete(tokenizer.attach_hicache_storage(**config))
    assert attached.success, attached.message
    check_again()  # from SSD
    engine.shutdown()


@pytest.mark.whole
def test_two_ranks_load_from_dram_and_attached_again_from_ssd(
    tmp_path: Path,
) -> None:
    apart(check_ranks, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tp0", "tp1"]


def refuse(match: str, make: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=match):
        make()


def check_refused() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from flexcache.integration.sglang import FlexCacheHiCacheStorage

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m", extra_config={})
    refuse("interface_v1", lambda: FlexCacheHiCacheStorage(config, {}))


def test_the_interface_that_copies_twice_is_refused() -> None:
    apart(check_refused)
