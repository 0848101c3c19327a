"""Real vLLM engines of two tensor-parallel sizes that read what each other has stored."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, serving
from engines import PROBED_FLEXCACHE, make_prompt
from paths import MODELS
from ports import free_range
from test_processes import _cpu_flags, run

pytestmark = pytest.mark.whole

SIZES = [1, 2, 1]
PROMPTS = [700, 900, 333]
Heads = dict[tuple[str, int], set[str]]
"""Digests of a block's bytes, by its hash and the number of the KV head in the model."""


def read_probe(directory: Path, event: str, *, alike: bool) -> Heads:
    """Read what all ranks have stored or loaded.

    Args:
        alike: Whether they hold the same heads.
    """
    found: Heads = defaultdict(set)
    for path in directory.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for row in map(json.loads, path.read_text().splitlines()):
            first = 0 if alike else rank * len(row["heads"])
            if row["event"] == event:
                for number, digest in enumerate(row["heads"], first):
                    found[row["key"], number].add(digest)
    return found


@pytest.mark.parametrize("model", ["tiny", "mla"])
def test_each_tensor_parallel_size_reads_what_the_other_has_stored(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from make_models import make_model

    make_model(MODELS, model)
    monkeypatch.setenv("KV_PROBE_HEADS", "1")
    is_alike = model == "mla"
    block = 16 if is_alike and "amx_tile" not in _cpu_flags() else 32
    extra: dict[str, Any] = {
        "remote_url": f"file://{tmp_path}/store", "remote_lookup_timeout_s": 10.0,
        "remote_timeout_s": 30.0, "server_timeout_s": 60.0,
    }  # fmt: skip
    if not is_alike:
        extra["store_shards"] = 2
    stored: Heads = {}
    for number, tp_size in enumerate(SIZES):
        # The second reads the first one's SSD, the third has the store alone.
        probe_dir, ssd_dir = tmp_path / f"probe-{number}", tmp_path / f"ssd-{number // 2}"
        options = {
            "model": model,
            "prompts": PROMPTS[: number + 1],
            "cpu_blocks": 512,
            "settle": True,
            "extra": extra,
            "ssd_dir": str(ssd_dir),
            "probe_dir": str(probe_dir),
            "engine": {"tensor_parallel_size": tp_size, "block_size": block,
                       "kv_cache_memory_bytes": 64 << 20},
        }  # fmt: skip
        seen = run(options)
        assert seen["errors"] == []
        assert seen["probes"]["ranks"] == tp_size
        assert seen["cached"] == [length // block * block for length in PROMPTS[: number + 1]]
        loaded = read_probe(probe_dir, "loaded", alike=is_alike)
        of_others = loaded.keys() & stored.keys()
        num_blocks = sum(length // block for length in PROMPTS[:number])
        assert len(of_others) == num_blocks * (1 if is_alike else 2)
        assert {key: loaded[key] for key in of_others} == {key: stored[key] for key in of_others}
        stored = {**read_probe(probe_dir, "stored", alike=is_alike), **stored}


@pytest.mark.parametrize("model", ["tiny", "mla"])
def test_each_tensor_parallel_size_reads_the_dram_of_the_other(model: str, tmp_path: Path) -> None:
    from make_models import make_model

    make_model(MODELS, model)
    is_alike = model == "mla"
    block = 16 if is_alike and "amx_tile" not in _cpu_flags() else 32
    addresses = [f"127.0.0.1:{free_range(2)}" for _ in SIZES[:2]]

    def server(number: int, tp_size: int) -> ApiServer:
        probe_dir = tmp_path / str(number)
        probe_dir.mkdir()
        variables = {
            "KV_PROBE_DIR": str(probe_dir), "KV_PROBE_HEADS": "1", "FLEXCACHE_CPU_CACHE_GB": "0.3",
            "FLEXCACHE_PEER_ENDPOINT": f"tcp://{addresses[number]}",
            "FLEXCACHE_SKIP_SLOW_LOADS": "false",
            **({} if is_alike else {"FLEXCACHE_STORE_SHARDS": "2"}),
        }  # fmt: skip
        return ApiServer(
            tmp_path / f"log-{number}", variables, ["--tensor-parallel-size", str(tp_size)],
            model=model, transfer=PROBED_FLEXCACHE, block_size=block,
        )  # fmt: skip

    servers = [server(*each) for each in enumerate(SIZES[:2])]
    with serving(*servers):
        for number, length in enumerate(PROMPTS * 2):
            there, here = number % 2, (number + 1) % 2
            prompt = make_prompt(length, number)
            told = {"flexcache_hands_over": True}
            servers[there].complete(prompt, max_tokens=1, kv_transfer_params=told)
            waits = {"flexcache_source": addresses[there], "flexcache_wait_s": 60}
            _, cached = servers[here].complete(prompt, kv_transfer_params=waits)
            assert cached == (length - 1) // block * block
    num_blocks = [
        sum(length // block for length in (PROMPTS * 2)[first::2]) * (1 if is_alike else 2)
        for first in (1, 0)
    ]
    for number, expected in enumerate(num_blocks):
        loaded = read_probe(tmp_path / str(number), "loaded", alike=is_alike)
        stored = read_probe(tmp_path / str(1 - number), "stored", alike=is_alike)
        assert len(loaded) == expected
        assert all(stored[key] == digests for key, digests in loaded.items())


@pytest.mark.newest
def test_windows_are_found_by_another_tensor_parallel_size(tmp_path: Path) -> None:
    from make_models import make_model

    make_model(MODELS, "gemma3")
    answers, hits = [], []
    for tp_size in (1, 2):
        options = {
            "model": "gemma3",
            "has_groups": True,
            "prompts": [1200, 900],
            "cpu_blocks": 64,
            "settle": True,
            "extra": {"store_shards": 2},
            "ssd_dir": str(tmp_path),
            "engine": {"kv_cache_memory_bytes": 64 << 20, "block_size": None,
                       "tensor_parallel_size": tp_size},
        }  # fmt: skip
        seen = run(options)
        assert seen["errors"] == []
        assert seen["cached"] == [1152, 896]
        answers.append(seen["tokens"])
        hits.append(seen["ssd_hit_tokens"])
    assert hits == [0, sum(seen["cached"])]
    assert answers[0] == answers[1]
