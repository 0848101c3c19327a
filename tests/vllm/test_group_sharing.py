"""Blocks and tails that another engine has stored: at one server, and in a remote store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
]
PATIENCE_S = 60.0
OPEN_STATES = ("created", "ready", "running")


def engine_of(model: str, path: Path, **config: Any) -> DrivenEngine:
    engine = {
        "dtype": "bfloat16", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "enable_prefix_caching": True,
        "mamba_ssm_cache_dtype": "float32",  # else it, and so the position, depends on the CPU
    }  # fmt: skip
    settings = Settings(
        "FlexCache", model, dram_gb=None, more={"skip_slow_loads": False, **config},
        engine=engine, probe_dir=str(path), num_threads=1, has_groups=True,
    )  # fmt: skip
    return DrivenEngine(settings, path / "log")


def until_stored(engine: DrivenEngine) -> None:
    """Wait until what the engine has stored at its server is in the remote store, too."""
    deadline = time.monotonic() + PATIENCE_S
    engine.ask(make_prompt(20, 5))  # until its puts have ended
    while any(engine.stats()["tasks"][state] for state in OPEN_STATES):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("model", "hit"), [("gemma3", 1152), ("qwen3next", 1024)])
def test_one_engine_loads_what_the_other_has_stored(model: str, hit: int, tmp_path: Path) -> None:
    endpoint, store = f"ipc://{tmp_path}/cache.sock", f"file://{tmp_path}/store"
    server = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server"],
        env={
            **os.environ, "FLEXCACHE_ENDPOINT": endpoint, "FLEXCACHE_CPU_CACHE_GB": "0.2",
            "FLEXCACHE_REMOTE_URL": store,
        },
        stdout=(tmp_path / "cache.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    prompt, other = make_prompt(1200, 1), make_prompt(1200, 2)
    try:
        with running(engine_of(model, tmp_path, endpoint=endpoint)) as first:
            while not first.stats()["tiers"]["REMOTE"]["available"]:
                first.generate(make_prompt(20, 3))
            cold, cached = first.generate(prompt)
            assert cached == 0
            cold_other, _ = first.generate(other)
            until_stored(first)
        with running(engine_of(model, tmp_path, endpoint=endpoint)) as second:
            assert second.generate(prompt) == (cold, hit)
            assert second.stats()["engine"]["hit_blocks"]["CPU"] > 0
    finally:
        server.terminate()
        server.wait()
    with running(
        engine_of(
            model,
            tmp_path,
            cpu_cache_gb=0.2,
            remote_url=store,
            remote_lookup_timeout_s=5,
            server_timeout_s=30,
        )
    ) as third:
        while not third.stats()["tiers"]["REMOTE"]["available"]:
            third.generate(make_prompt(20, 4))
        assert third.generate(other) == (cold_other, hit)
        assert third.stats()["hit_blocks"].keys() == {"REMOTE"}
    assert compare_probes(tmp_path)["different"] == []
