"""SSD directories and remote stores that an earlier version wrote: this one serves what is there.

`tests/data/kept_contents.tar.xz` was written by `python tests/system/test_kept_contents.py FILE`,
as of November 2026, and is not made again: it stands for what users have. It covers SSD files of
two directories after a reset, plain and packed slots, objects of every compression, a version of
the weights, keys made of tokens and keys of the engine's own, a namespace, and tails.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import NUM_GPU_BLOCKS, Cluster, running_cluster, until
from load import remote
from tailed_engine import GEMMA_LIKE, PATIENCE_S, TailedEngine, tailed_engine

from flexcache import ModelConfig

KEPT = Path(__file__).parents[1] / "data" / "kept_contents.tar.xz"
MODEL = ModelConfig("meta-llama/Llama-3.1-8B-Instruct", 3, 4, 32, torch.bfloat16, tp_size=2)
VERSION = "first"
"""The version of the weights whose blocks were stored after a reset."""
CODECS = ["none", "zstd", "lz4"]
DIRECTORIES = {"none": ("a", "b"), "zstd": ("a",), "lz4": ("a",), "tails": ("a",)}
NUM_BLOCKS = 6
BLOCKS = list(range(NUM_BLOCKS))
TOKENS = np.arange(NUM_BLOCKS * 16) + 128_000
KEYS: dict[str, Any] = {
    "block_keys": [bytes([number]) * 32 for number in BLOCKS],
    "namespace": ["tenant", "salt"],
}
PROMPTS: list[dict[str, Any]] = [{}, KEYS]
TAILED = np.arange(32 * 4)
PATIENT = {"remote_lookup_timeout_s": 10.0, "server_timeout_s": 30.0}


def numbered_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    """Make KV tensors of numbers that follow from their places, and that codecs shorten."""
    shape = (NUM_GPU_BLOCKS, 2, tokens, model.num_kv_heads // model.tp_size, model.head_size)
    places = torch.arange(int(np.prod(shape))).reshape(shape)
    return {
        f"layer.{i}": (places * (i + 3) % 251 + places // 512).to(model.dtype)
        for i in range(model.num_layers)
    }


def fill(engine: TailedEngine) -> None:
    for i, tensor in enumerate(engine.kv.values()):
        places = torch.arange(tensor.numel()).reshape(tensor.shape)
        tensor.copy_(places * (i + 3) % 251 + places // 512)


@contextmanager
def cluster_with(**settings: Any) -> Iterator[Cluster]:
    with running_cluster(model=MODEL, make_kv=numbered_kv, **PATIENT, **settings) as cluster:
        until(lambda: all(t["available"] for t in cluster.manager.stats()["tiers"].values()))
        yield cluster


def tiers(root: Path, name: str) -> list[dict[str, Any]]:
    """Return the settings of the tiers that hold a content: the SSD, and the store."""
    paths = [str(root / name / each) for each in DIRECTORIES[name]]
    ssd = {"ssd_cache_dirs": paths, "num_ssd_blocks": 16}
    version = {"model_version": VERSION} if name == "none" else {}
    return [ssd | version, {"remote_url": f"file://{root / name / 'store'}"} | version]


def move(cluster: Cluster, kind: str, prompt: dict[str, Any]) -> int:
    """Get or put the prompt's blocks; return how many were moved."""
    call = cluster.manager.get_async if kind == "get" else cluster.manager.put_async
    task, _ = call(TOKENS, cluster.slots(BLOCKS), **prompt)
    moved = cluster.manager.wait([task], PATIENCE_S, completely=True)[task].mask
    return int(moved.sum()) // 16


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    with tarfile.open(KEPT) as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", ["ssd", "store"])
def test_blocks_of_an_earlier_version_come_back(tier: str, codec: str, contents: Path) -> None:
    with cluster_with(**tiers(contents, codec)[tier == "store"]) as cluster:
        expected = cluster.read(BLOCKS)
        for prompt in PROMPTS:
            cluster.wipe(BLOCKS)
            # The store's worker may still be connecting, so the first look-ups may miss.
            until(lambda prompt=prompt: move(cluster, "get", prompt) == NUM_BLOCKS)
            assert cluster.read(BLOCKS) == expected
        found = cluster.manager.stats()["ops"]["DISK2H" if tier == "ssd" else "REMOTE2H"]["blocks"]
        assert found == 2 * NUM_BLOCKS


@pytest.mark.parametrize("tier", ["ssd", "store"])
def test_tails_of_an_earlier_version_come_back(tier: str, contents: Path) -> None:
    settings = tiers(contents, "tails")[tier == "store"]
    with tailed_engine(GEMMA_LIKE, **PATIENT, **settings) as engine:
        fill(engine)
        tables = engine.tables(len(TAILED))
        expected = engine.read(tables)
        engine.wipe()

        def comes() -> bool:
            stop, came, _ = engine.get(TAILED)
            return stop == len(TAILED) and came == expected

        until(comes)


def write_contents(root: Path) -> None:
    """Write with the version at hand what the archive holds."""
    for codec in CODECS:
        ssd, store = tiers(root, codec)
        packing = {"ssd_compression": codec, "remote_compression": codec}
        with cluster_with(**{**ssd, **store, **packing}) as cluster:
            if codec == "none":  # a reset begins an era of the records
                assert move(cluster, "put", {}) == NUM_BLOCKS
                cluster.manager.reset()
                cluster.manager.new_weights(VERSION)
            for number, prompt in enumerate(PROMPTS, 1):
                assert move(cluster, "put", prompt) == NUM_BLOCKS

                def is_stored(count: int = number * NUM_BLOCKS, prompt: Any = prompt) -> bool:
                    move(cluster, "put", prompt)  # the store's worker may still be connecting
                    return remote(cluster, "stored_blocks") >= count

                until(is_stored)
    ssd, store = tiers(root, "tails")
    with tailed_engine(GEMMA_LIKE, **{**ssd, **store}) as engine:
        fill(engine)
        tables = engine.tables(len(TAILED))

        def are_stored() -> bool:
            engine.put(TAILED, tables)
            return int(engine.manager.stats()["tiers"]["REMOTE"]["stored_blocks"]) >= 6

        until(are_stored)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        write_contents(Path(made))
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(made, ".")
