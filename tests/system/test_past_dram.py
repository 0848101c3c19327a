"""Blocks that go between KV tensors and the SSD past DRAM: a cache without a DRAM tier, and loads
beside one. Kills, flips, restarts and full disks included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import Cluster, kill, ops, running_cluster, until
from disk_io import refuse_direct
from loop_disk import loop_disk
from test_stopped_ranks import TOKENS as LONG
from test_stopped_ranks import stored_prompt

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.errors import ConfigError
from flexcache.storage.pool_directory import DATA_FILE

TOKENS = np.arange(24 * 16)
SOURCE, TARGET = list(range(24)), list(range(24, 48))


def indexed(cluster: Cluster, tier: str = "SSD") -> int:
    return int(cluster.manager.stats()["tiers"][tier]["indexed"])


def flip(path: Path, at: bytes) -> None:
    """Flip a bit of the block that begins with these bytes, on the device."""
    data = bytearray((path / DATA_FILE).read_bytes())
    place = data.index(at)
    data[place + 5] ^= 1
    (path / DATA_FILE).write_bytes(data)


# -- SSD alone -------------------------------------------------------------------------------------


def test_a_cache_of_ssd_alone_keeps_every_byte(tmp_path: Path) -> None:
    with running_cluster([tmp_path / "a", tmp_path / "b"], num_cpu_blocks=0) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        assert ops(cluster) == {"D2DISK": 24, "COMMIT": 24, "DISK2D": 24}
        assert (indexed(cluster), indexed(cluster, "CPU"), cluster.num_leased()) == (24, 0, 0)


def test_ranks_that_share_their_kv_write_it_once_and_all_read_it(tmp_path: Path) -> None:
    model = ModelConfig("mla", 3, 1, 128, torch.bfloat16, use_mla=True, tp_size=2)

    def same(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
        seeded = torch.Generator().manual_seed(5)
        shape = (64, tokens, model.head_size)
        return {f"layer.{i}": torch.randn(shape, generator=seeded).bfloat16() for i in range(3)}

    with running_cluster([tmp_path], model=model, make_kv=same, num_cpu_blocks=0) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        assert ops(cluster)["D2DISK"] == 24


def test_what_ssd_alone_has_stored_survives_a_kill_of_its_worker_and_a_restart(
    tmp_path: Path,
) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=0) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        worker = cluster.manager.stats()["workers"]["disk"]
        kill(worker)
        until(lambda: cluster.manager.stats()["workers"].get("disk", worker) != worker)
        until(lambda: cluster.manager.stats()["tiers"]["SSD"]["available"])
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        kv = cluster.kv
    with running_cluster([tmp_path], num_cpu_blocks=0, make_kv=lambda *_: kv[0]) as cluster:
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
    with running_cluster([tmp_path], make_kv=lambda *_: kv[0]) as cluster:  # now with DRAM
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        assert ops(cluster)["DISK2H"] == 24


@pytest.mark.parametrize("num_cpu_blocks", [0, 48], ids=["SSD alone", "beside DRAM"])
def test_a_flipped_bit_costs_the_blocks_behind_it_and_is_never_served(
    num_cpu_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    settings = {"num_cpu_blocks": num_cpu_blocks, "ssd_past_dram": "always"}
    with running_cluster([tmp_path], **settings) as cluster:
        expected = cluster.read(SOURCE[:9])
        assert cluster.put(TOKENS, SOURCE).mask.all()
        cluster.manager.clear("CPU")
        flip(tmp_path, cluster.read([9])[0])
        response = cluster.get(TOKENS, TARGET)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == 9 * 16
        assert "checksum mismatch" in (response.error or "")
        assert cluster.read(TARGET[:9]) == expected
        assert indexed(cluster) == 9
        assert cluster.manager.stats()["dropped_blocks"]["ssd_bad_block"] == 1
        assert cluster.put(TOKENS, SOURCE).mask[9 * 16 :].all()  # stored again
        assert cluster.get(TOKENS, TARGET).mask.all()


def test_a_disk_without_room_keeps_what_fits(tmp_path: Path) -> None:
    with (
        loop_disk(tmp_path, 1 << 19) as disk,
        running_cluster([disk.path], num_cpu_blocks=0) as cluster,
    ):
        expected = cluster.read(SOURCE)
        response = cluster.put(TOKENS, SOURCE)
        kept = indexed(cluster)
        assert 0 < kept < 24
        assert response.mask.sum() >= kept * 16
        assert cluster.manager.stats()["dropped_blocks"]["ssd_write_failed"] >= 24 - kept
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.sum() == kept * 16
        assert cluster.read(TARGET[:kept]) == cluster.read(SOURCE[:kept])
        assert cluster.read(SOURCE) == expected
        assert cluster.num_leased() == 0


def test_continuations_build_on_what_ssd_alone_has(tmp_path: Path) -> None:
    keys = [bytes([i]) * 32 for i in range(8)]
    with running_cluster([tmp_path], num_cpu_blocks=0) as cluster:
        manager, size = cluster.manager, 16
        whole, half = cluster.slots(SOURCE[:8]), 4 * size
        for tokens, slots, own, parent in (
            (TOKENS[:half], whole[:half], keys[:4], None),
            (TOKENS[half : 2 * half], whole[half:], keys[4:], keys[3]),
        ):
            task, mask = manager.put_async(tokens, slots, block_keys=own, parent_key=parent)
            assert mask.all()
            assert manager.wait([task], 60, completely=True)[task].mask.all()
        task, mask = manager.get_match(TOKENS[: 2 * half], block_keys=keys)
        assert mask.all()


@pytest.mark.whole
def test_the_next_server_waits_for_a_rank_that_may_still_write(tmp_path: Path) -> None:
    sizes = {"num_cpu_blocks": 0, "num_ssd_blocks": len(LONG) // 16}
    config = CacheConfig(ssd_cache_dirs=[str(tmp_path)], **sizes)  # type: ignore[arg-type]
    with stored_prompt(config) as (manager, rank):
        rank.stop()
        manager.shutdown()
        with pytest.raises(ConfigError, match="in use"):
            KVManager(ModelConfig("m", 16, 8, 128, torch.bfloat16), config).start()


# -- beside a DRAM tier ----------------------------------------------------------------------------


def test_a_load_beside_dram_comes_from_both(tmp_path: Path) -> None:
    with running_cluster([tmp_path], ssd_past_dram="always") as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        cluster.manager.clear("CPU")
        assert cluster.put(TOKENS[: 10 * 16], SOURCE[:10]).mask.all()
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.all()
        assert cluster.read(TARGET) == expected
        moved = ops(cluster)
        assert (moved["H2D"], moved["DISK2D"]) == (10, 14)
        assert "DISK2H" not in moved


TWO_PARTS = ModelConfig("two parts", 3, 4, 32, torch.bfloat16, tp_size=2)


@pytest.mark.parametrize(
    "settings",
    [{"model": TWO_PARTS}, {"ssd_past_dram": "never"}, {"ssd_past_dram": "auto"}],
    ids=["ranks with parts of a block", "never", "tensors in DRAM"],
)
def test_otherwise_loads_go_through_dram(settings: dict[str, object], tmp_path: Path) -> None:
    with running_cluster([tmp_path], **{"ssd_past_dram": "always", **settings}) as cluster:
        assert cluster.put(TOKENS, SOURCE).mask.all()
        for _ in range(6):
            cluster.manager.clear("CPU")
            cluster.wipe(TARGET)
            assert cluster.get(TOKENS, TARGET).mask.all()
        moved = ops(cluster)
        assert moved["DISK2H"] == 6 * 24
        assert "DISK2D" not in moved


def test_ranks_that_cannot_go_past_dram_use_the_staging_pool(tmp_path: Path) -> None:
    """Without a DRAM tier as well: as much of a prompt as can be staged."""
    with running_cluster([tmp_path], model=TWO_PARTS, num_cpu_blocks=0) as cluster:
        capacity = cluster.manager.stats()["tiers"]["CPU"]["capacity"]
        assert 0 < capacity < 24
        expected = cluster.read(SOURCE[:capacity])
        assert cluster.put(TOKENS, SOURCE).mask.sum() == capacity * 16
        cluster.wipe(TARGET)
        assert cluster.get(TOKENS, TARGET).mask.sum() == capacity * 16
        assert cluster.read(TARGET[:capacity]) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ssd": True, "remote_url": "file:///tmp"},
        {"ssd": True, "ssd_write_policy": "write_back"},
        {"ssd": True, "ssd_past_dram": "never"},
    ],
)
def test_no_dram_tier_is_refused_where_it_is_needed(
    settings: dict[str, object], tmp_path: Path
) -> None:
    if settings.pop("ssd", False):
        settings |= {"num_ssd_blocks": 8, "ssd_cache_dirs": [str(tmp_path)]}
    with pytest.raises(ConfigError, match="DRAM"):
        CacheConfig(num_cpu_blocks=0, **settings)  # type: ignore[arg-type]


def test_a_rank_that_ends_loads_without_the_server_goes_through_dram(tmp_path: Path) -> None:
    with running_cluster([tmp_path], ssd_past_dram="always") as cluster:
        cluster.clients[0].close()
        with KVTPClient(cluster.manager.endpoint, keeps_loads=True) as client:
            client.register_kv_caches(cluster.kv[0])
            client.wait_registered(60)
            until(cluster.manager.is_ready)
            assert cluster.put(TOKENS, SOURCE).mask.all()
            cluster.manager.clear("CPU")
            assert cluster.get(TOKENS, TARGET).mask.all()
            assert "DISK2D" not in ops(cluster)
