"""FlexCache below the DRAM tier of vLLM's OffloadingConnector, in real engines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DidNotRun, DrivenEngine, running
from engines import Settings, make_prompt
from loop_disk import loop_disk
from make_models import make_adapter
from paths import MODELS
from probe_offloading import read_digests
from safetensors.torch import load_file, save_file

from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.integration.vllm.secondary_tier import TierHost
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.shards import KVIdentity
from flexcache.storage.slot_index import locate_slot

pytestmark = pytest.mark.newest
PROMPT = make_prompt(700, 1)
CHUNKS = 21  # whole blocks of 32
CACHED = CHUNKS * 32
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 32 << 20,
    "seed": 0,
}
TIER = {
    "type": "FlexCacheSecondaryTier",
    "module_path": "flexcache.integration.vllm.secondary_tier",
}


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    from make_models import make_model

    make_model(MODELS, "tiny")


@contextmanager
def offloading_engine(
    tmp_path: Path, block_size: int = 32, engine: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[DrivenEngine]:
    """An engine whose DRAM tier has this below; ready when the tier's workers are.

    Args:
        block_size: Tokens of a chunk.
        engine: Further arguments of `vllm.LLM`.
    """
    (tmp_path / "probe").mkdir(exist_ok=True)
    offloading = Settings(
        "offloading", "tiny", dram_gb=0.02, engine={**ENGINE, **(engine or {})}, num_threads=1,
        more={"secondary_tiers": [{**TIER, **settings}], "block_size": block_size},
        probe_dir=str(tmp_path / "probe"),
    )  # fmt: skip
    log = tmp_path / "log"
    try:
        with running(DrivenEngine(offloading, log)) as driven:
            driven.tier("until_up")
            yield driven
    finally:
        # vLLM leaves its region in /dev/shm if it is killed or does not start.
        said = log.read_text(errors="replace") if log.exists() else ""
        for region in re.findall(r"Created mmap file (/dev/shm/vllm_offload_\S+\.mmap)", said):
            Path(region).unlink(missing_ok=True)


def test_an_adapter_retrained_in_place_and_weights_of_before_a_reset_are_not_found(
    tmp_path: Path,
) -> None:
    config = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    adapter = tmp_path / "adapter"
    shutil.copytree(make_adapter(MODELS, 1), adapter)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with offloading_engine(tmp_path, engine=lora, **config) as engine:
        old, _ = engine.generate(PROMPT, adapter=str(adapter))
        plain, _ = engine.generate(PROMPT)
        engine.settle()
    with offloading_engine(tmp_path, engine=lora, **config) as engine:
        assert engine.generate(PROMPT, adapter=str(adapter)) == (old, CACHED)
    shutil.copy(make_adapter(MODELS, 2) / "adapter_model.safetensors", adapter)
    with offloading_engine(tmp_path, engine=lora, **config) as engine:
        new, cached = engine.generate(PROMPT, adapter=str(adapter))
        assert cached == 0
        assert new != old
        assert engine.generate(PROMPT) == (plain, CACHED)
        engine.settle()
        engine.reset()
        assert engine.generate(PROMPT) == (plain, 0)


@pytest.mark.whole
def test_what_is_computed_after_an_update_without_a_reset_is_not_found_by_the_old_weights(
    tmp_path: Path,
) -> None:
    config = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    before, after = (shutil.copytree(MODELS / "tiny", tmp_path / name) for name in ("old", "new"))
    weights = load_file(after / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**weights, name: -weights[name]}, after / "model.safetensors", {"format": "pt"})
    late = make_prompt(700, 2)
    with offloading_engine(tmp_path, engine={"model": str(before)}, **config) as engine:
        old, _ = engine.generate(PROMPT)
        engine.settle()
        engine.update(str(after))
        engine.generate(late)
        engine.settle()
    with offloading_engine(tmp_path, engine={"model": str(before)}, **config) as engine:
        assert engine.generate(PROMPT) == (old, CACHED)
        assert engine.generate(late)[1] == 0


def prompt_digests(tmp_path: Path) -> list[list[str]]:
    """Return the digests of each of the prompt's blocks, from request to request."""
    return list(read_digests(tmp_path / "probe").values())[:CHUNKS]


def flip_byte(directory: Path) -> None:
    """Flip a byte in the slot of one chunk."""
    size = (directory / DATA_FILE).stat().st_size - 4096
    num_slots = 64
    pool = DiskPool([str(directory)], size // num_slots, num_slots, direct_io=False)
    slot = int(sorted(pool.load()["slot"])[CHUNKS // 2])
    _, offset = locate_slot(slot, pool.data_fds, pool.slot_bytes)
    pool.close()
    with (directory / DATA_FILE).open("r+b") as file:
        file.seek(offset + 1234)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_chunks_survive_on_ssd_and_bad_or_unreachable_ones_are_computed(tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    config = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(ssd)]}
    with offloading_engine(tmp_path, **config) as engine:
        cold, cached = engine.generate(PROMPT)
        assert cached == 0
        engine.settle()
        assert engine.tier("hits") == {}

    with offloading_engine(tmp_path, **config) as engine:  # restarted: all is on SSD
        assert engine.generate(PROMPT) == (cold, CACHED)
        assert engine.tier("hits") == {"disk": CHUNKS}
        engine.forget("DRAM")
        engine.tier("lose_disk_worker_in_a_job")
        assert engine.generate(PROMPT) == (cold, 0)
        engine.tier("have_disk_worker_again")
        engine.forget("DRAM")
        assert engine.generate(PROMPT) == (cold, CACHED)
        assert engine.tier("hits") == {"disk": 2 * CHUNKS}
        assert engine.metric("vllm:kv_offload_flexcache_loaded_chunks") == 2 * CHUNKS
        engine.kill()

    flip_byte(ssd)
    with offloading_engine(tmp_path, **config) as engine:
        tokens, cached = engine.generate(PROMPT)
        assert tokens == cold
        assert cached < CACHED
        engine.settle()
        engine.forget("DRAM")
        assert engine.generate(PROMPT) == (cold, CACHED)  # what was bad has been stored again

    digests = prompt_digests(tmp_path)
    assert all(len(set(seen[:4])) == 1 for seen in digests)
    # What was computed in pieces may differ in its last bits; what was loaded may not.
    assert all(seen[4] == seen[0] for seen in digests[: cached // 32])


@pytest.mark.whole
def test_a_full_disk_keeps_what_fits_and_costs_no_answer(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 1 << 20) as disk:
        config = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(disk.path)]}
        with offloading_engine(tmp_path, **config) as engine:
            cold, _ = engine.generate(PROMPT)
            engine.settle()
            num_lost = engine.tier("dropped")["not_written"]
            assert 0 < num_lost < CHUNKS
            engine.forget("DRAM")
            tokens, cached = engine.generate(PROMPT)
            assert tokens == cold
            assert cached <= (CHUNKS - num_lost) * 32
    digests = prompt_digests(tmp_path)
    assert all(seen[1] == seen[0] for seen in digests[: cached // 32])


@pytest.mark.whole
def test_chunks_reach_another_engine_through_a_remote_store(tmp_path: Path) -> None:
    config = {
        "remote_url": f"file://{tmp_path}/store",
        # A busy machine is no slow store.
        "remote_lookup_timeout_s": 20.0,
        "remote_timeout_s": 60.0,
        "server_timeout_s": 60.0,
    }
    with offloading_engine(tmp_path, **config) as engine:
        cold, _ = engine.generate(PROMPT)
        engine.settle()
    with offloading_engine(tmp_path, **config) as engine:
        assert engine.generate(PROMPT) == (cold, CACHED)
        assert engine.tier("hits") == {"remote": CHUNKS}
    assert all(len(set(seen)) == 1 for seen in prompt_digests(tmp_path))


@pytest.mark.whole
def test_a_model_with_windows_comes_back_after_a_restart(tmp_path: Path) -> None:
    tier = {**TIER, "num_ssd_blocks": 128, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    offloading = Settings(
        "offloading", "gemma3", dram_gb=0.1, engine={**ENGINE, "dtype": "float32"}, num_threads=1,
        more={"secondary_tiers": [tier]}, has_groups=True,
    )  # fmt: skip
    prompt = make_prompt(1200, 1)
    with running(DrivenEngine(offloading, tmp_path / "log")) as engine:
        engine.tier("until_up")
        cold, _ = engine.generate(prompt)
        engine.settle()
    with running(DrivenEngine(offloading, tmp_path / "log")) as engine:
        engine.tier("until_up")
        assert engine.generate(prompt) == (cold, 1152)
        assert engine.tier("hits")["disk"] >= 1152 // 128


@pytest.mark.whole
def test_an_engine_does_not_start_on_another_layouts_chunks(tmp_path: Path) -> None:
    config = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    with offloading_engine(tmp_path, **config) as engine:
        engine.generate(PROMPT)
        engine.settle()
    with (
        pytest.raises(DidNotRun, match="its slots have"),
        offloading_engine(tmp_path, block_size=64, **config),
    ):
        pass


@pytest.mark.whole
def test_a_model_whose_pooling_needs_whole_prompts_is_refused_by_name(tmp_path: Path) -> None:
    pooling = {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}}
    directories = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path / "ssd")]}
    with (
        pytest.raises(DidNotRun, match=r"tiny: .* pooling \(MEAN"),
        offloading_engine(tmp_path, engine=pooling, **directories),
    ):
        pass


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("retention_s", 60.0),
        ("store_shards", 2),
        ("ssd_write_mb_s", 60.0),
        ("remote_write_mb_s", 60.0),
        ("quotas", "a=1"),
    ],
)
def test_a_limit_that_such_a_tier_does_not_keep_is_refused_by_name(
    limit: str, value: float | str, tmp_path: Path
) -> None:
    config = CacheConfig(
        num_cpu_blocks=2, num_ssd_blocks=2, ssd_cache_dirs=[str(tmp_path)],
        **{limit: value},  # type: ignore[arg-type]
    )  # fmt: skip
    memory = HostSegment.create(4096, 2)
    try:
        with pytest.raises(ConfigError, match=limit):
            TierHost(config, memory, KVIdentity.of("a model", "a layout"), "an-engine")
    finally:
        memory.close()
