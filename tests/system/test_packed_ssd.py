"""`ssd_compression`: blocks are packed on SSD, come back byte for byte, and damage is found."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import Cluster, joined_kv, kill, ops, running_cluster, until
from disk_io import refuse_direct
from typer.testing import CliRunner

from flexcache import CacheConfig, ModelConfig
from flexcache.cli import app
from flexcache.errors import ConfigError
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import HEADER_BYTES, RECORD, SlotIndex

TOKENS = np.arange(24 * 16)
SLOT_BYTES = 2 * 3 * 16 * 4 * 32 * 2  # K and V, layers, tokens, heads, size of a head, bfloat16
SOURCE, TARGET = list(range(24)), list(range(24, 48))


def noise_in_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    """Make KV tensors with normally distributed numbers of few bits, which both codecs shorten."""
    tensors = joined_kv(model, tokens)
    for layer, tensor in enumerate(tensors.values()):
        tensor.normal_(generator=torch.Generator().manual_seed(layer)).round_()
    return tensors


def comes_back(cluster: Cluster, expected: list[bytes]) -> None:
    """Check that the prompt comes from SSD, byte for byte."""
    cluster.manager.clear("CPU")
    cluster.wipe(TARGET)
    assert cluster.get(TOKENS, TARGET).mask.all()
    assert cluster.read(TARGET) == expected


def doctor(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_packed_blocks_survive_a_killed_worker_and_a_restart(codec: str, tmp_path: Path) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    with running_cluster(dirs, make_kv=noise_in_kv, ssd_compression=codec) as cluster:
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        written = cluster.manager.stats()["ops"]["H2DISK"]
        assert 0 < written["device_bytes"] < 0.95 * written["bytes"]
        comes_back(cluster, expected)
        worker = cluster.manager.stats()["workers"]["disk"]
        kill(worker)
        until(lambda: cluster.manager.stats()["workers"].get("disk", worker) != worker)
        until(lambda: cluster.manager.stats()["tiers"]["SSD"]["available"])
        comes_back(cluster, expected)
    code, said = doctor(*dirs, "--verify")
    assert code == 0
    assert re.search(r"24 recorded, 24 of them packed into \d\d% of their size", said)
    with running_cluster(dirs, make_kv=noise_in_kv) as cluster:  # which packs nothing itself
        comes_back(cluster, expected)
        read = cluster.manager.stats()["ops"]["DISK2H"]
        assert read["device_bytes"] == written["device_bytes"]


def test_a_flipped_bit_costs_the_blocks_behind_it_and_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    with running_cluster([tmp_path], make_kv=noise_in_kv, ssd_compression="zstd") as cluster:
        expected = cluster.read(SOURCE)
        cluster.put(TOKENS, SOURCE)
    content = bytearray((tmp_path / DATA_FILE).read_bytes())
    slots = range(HEADER_BYTES, len(content), SLOT_BYTES)
    used = [slot for slot in slots if any(content[slot : slot + 4096])]
    content[used[10] + 1000] ^= 1
    (tmp_path / DATA_FILE).write_bytes(content)
    assert "1 slots do not match their records" in doctor(tmp_path, "--verify")[1]
    with running_cluster([tmp_path], make_kv=noise_in_kv, ssd_compression="zstd") as cluster:
        cluster.wipe(TARGET)
        num_blocks = int(cluster.get(TOKENS, TARGET).mask.sum()) // 16
        assert num_blocks < 24
        served = cluster.read(TARGET[:num_blocks])
        assert served == [
            data for layer in range(3) for data in expected[layer * 24 : layer * 24 + num_blocks]
        ]
        assert cluster.put(TOKENS, SOURCE).mask.sum() == (24 - num_blocks) * 16


@pytest.mark.parametrize("settings", [{"ssd_past_dram": "always"}, {"num_cpu_blocks": 0}])
def test_ranks_that_read_the_ssd_themselves_do_not_find_packed_blocks(
    settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_cluster([tmp_path], make_kv=noise_in_kv, ssd_compression="zstd") as cluster:
        cluster.put(TOKENS, SOURCE)
    with (
        caplog.at_level(logging.WARNING),
        running_cluster([tmp_path], make_kv=noise_in_kv, **settings) as cluster,
    ):
        assert "ssd_packed_blocks_not_used" in caplog.text
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 0
        expected = cluster.read(SOURCE)
        assert cluster.put(TOKENS, SOURCE).mask.all()
        comes_back(cluster, expected)
        assert ops(cluster)["DISK2D"] == 24


def test_a_codec_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    with running_cluster([tmp_path], make_kv=noise_in_kv, ssd_compression="zstd") as cluster:
        cluster.put(TOKENS, SOURCE)
    pool = DiskPool([str(tmp_path)], SLOT_BYTES, 96, direct_io=False)
    index = SlotIndex(pool.index_fds, pool.record_id)
    found = index.load(96).records
    found["codec"] = 77
    index.write(found["slot"], found.view(RECORD))
    pool.close()
    with pytest.raises(ConfigError, match="codec 77"), running_cluster([tmp_path]):
        pass


@pytest.mark.parametrize("settings", [{"ssd_past_dram": "always"}, {"num_cpu_blocks": 0}])
def test_compression_is_refused_where_ranks_use_the_ssd_themselves(
    settings: dict[str, object], tmp_path: Path
) -> None:
    ssd = {"num_ssd_blocks": 8, "ssd_cache_dirs": [str(tmp_path)], "ssd_compression": "lz4"}
    with pytest.raises(ConfigError, match="DRAM"):
        CacheConfig(**{"num_cpu_blocks": 8, **ssd, **settings})  # type: ignore[arg-type]


def test_doctor_says_that_the_codec_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster([tmp_path], make_kv=noise_in_kv, ssd_compression="lz4") as cluster:
        assert cluster.put(TOKENS, SOURCE).mask.all()
    for module in ("lz4", "lz4.block", "lz4.frame"):
        monkeypatch.setitem(sys.modules, module, None)
    code, said = doctor(tmp_path, "--verify")
    assert code == 1
    assert "lz4 is not installed" in said
