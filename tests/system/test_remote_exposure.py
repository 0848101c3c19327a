"""A stranger who reaches the ports of Mooncake's client changes nothing that a cache serves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster import Cluster, running_cluster, until
from load import SETTINGS, remote, under_load
from stores import missing, store_server

from flexcache import KVStatus, ModelConfig

pytestmark = [
    pytest.mark.skipif(
        bool(missing("mooncake", "mooncake_master")), reason="Mooncake is not installed"
    ),
    pytest.mark.whole,
]
BLOCKS = list(range(64))
TOKENS = np.arange(16 * len(BLOCKS))
MODEL = ModelConfig("model", 3, 4, 32, torch.bfloat16)
BOUNCE_MEMORY = "/dev/zero"  # how the kernel names memory without a file
STRANGER = Path(__file__).parents[1] / "support" / "mooncake_stranger.py"


@contextmanager
def stranger_at(cluster: Cluster, *pattern: str) -> Iterator[dict[str, list[str]]]:
    """Let a stranger overwrite the worker's memory; return what it could read and write to."""
    pid = cluster.manager.stats()["workers"]["remote"]
    process = subprocess.Popen(
        [sys.executable, str(STRANGER), str(pid), *pattern], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith(b"{"):
            assert line, "the stranger ended"
        yield json.loads(line)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def url() -> Iterator[str]:
    with store_server("mooncake") as server:
        yield server.url


def put_into_the_store(cluster: Cluster) -> list[bytes]:
    expected = cluster.read(BLOCKS)

    def is_stored() -> bool:
        cluster.put(TOKENS, BLOCKS)
        return remote(cluster, "stored_blocks") >= len(BLOCKS)

    until(is_stored)
    return expected


def test_a_stranger_changes_no_block_in_dram_and_reads_none(url: str) -> None:
    with running_cluster(model=MODEL, remote_url=url, **SETTINGS) as cluster:
        expected = put_into_the_store(cluster)
        with stranger_at(cluster) as found:
            cluster.wipe(BLOCKS)
            response = cluster.get(TOKENS, BLOCKS)
            assert (response.status, response.mask.all()) == (KVStatus.SUCCESS, True)
            assert cluster.read(BLOCKS) == expected
            assert cluster.manager.stats()["hit_blocks"] == {"CPU": len(BLOCKS)}
        # The host pool is a file in memory: it is under neither.
        assert [name.split()[0] for name in found["written"]] == [BOUNCE_MEMORY]
        assert found["read"] == found["written"]


def test_what_a_stranger_overwrites_on_its_way_is_not_served(url: str) -> None:
    """Every byte of what the cache serves meanwhile is compared."""
    with under_load(url) as loaded:
        loaded.work_until_it_grows("stored_blocks", "read_bytes")
        with stranger_at(loaded.cluster, BOUNCE_MEMORY) as found:
            assert found["written"]

            def is_noticed() -> bool:
                loaded.engine.step()
                dropped = loaded.cluster.manager.stats()["dropped_blocks"]
                return int(dropped.get("remote_bad_block", 0)) >= 10

            until(is_noticed)
        loaded.work_until_it_grows("stored_blocks", "read_bytes")
