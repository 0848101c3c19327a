"""A model with windows and a draft model: restarts and failed loads change no answer.

The draft stands for a layer that predicts further tokens (MTP) and the windows for states: vLLM's
kernels for CPUs do not undo rejected drafts in states.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from make_models import make_draft, make_guessable
from paths import MODELS
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import HEADER_BYTES

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
]
NUM_GENERATED = 40
PROMPTS = [make_prompt(length, 7 + length) for length in (500, 900, 1300)]
NEEDS_AVX512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's fp8 KV needs AVX-512 here"
)


def engine_of(tmp_path: Path, system: str, kv_dtype: str, **more: Any) -> DrivenEngine:
    """An engine of the model, with drafts unless it is "alone"."""
    drafts = {"method": "eagle", "model": str(make_draft(MODELS)), "num_speculative_tokens": 2}
    arguments = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "block_size": 32, "max_num_batched_tokens": 512, "kv_cache_dtype": kv_dtype,
        "enable_prefix_caching": system != "alone",
        "speculative_config": None if system == "alone" else drafts,
    }  # fmt: skip
    name = make_guessable(MODELS, "gemma3").name
    settings = Settings(
        system, name, dram_gb=None, more={"skip_slow_loads": False, **more}, engine=arguments,
        probe_dir=str(tmp_path), num_threads=1, has_groups=True,
    )  # fmt: skip
    return DrivenEngine(settings, tmp_path / "log")


def answers_alone(tmp_path: Path, prompts: list[list[int]], kv_dtype: str) -> dict[int, list[int]]:
    with running(engine_of(tmp_path, "alone", kv_dtype)) as engine:
        return engine.answers(prompts, NUM_GENERATED)


# -- restarts ------------------------------------------------------------------------------------


class CacheServer:
    """A server with an SSD tier, which it finds again."""

    def __init__(self, tmp_path: Path) -> None:
        self.endpoint = f"ipc://{tmp_path}/cache.sock"
        self._log = tmp_path / "server.log"
        self._ssd = tmp_path / "ssd"
        self._start()

    def _start(self) -> None:
        sizes = {
            "FLEXCACHE_ENDPOINT": self.endpoint, "FLEXCACHE_CPU_CACHE_GB": "0.2",
            "FLEXCACHE_SSD_CACHE_GB": "0.3", "FLEXCACHE_SSD_CACHE_DIRS": str(self._ssd),
        }  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flexcache.cli", "server"],
                env={**os.environ, **sizes}, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def restart(self) -> None:
        self.stop()
        self._start()


@contextmanager
def cache_server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(tmp_path)
    try:
        yield server
    finally:
        server.stop()


@NEEDS_AVX512
def test_answers_after_restarts_are_those_without_a_cache(tmp_path: Path) -> None:
    """With KV of 8 bits; the server is restarted, then the engine, then both."""
    alone = answers_alone(tmp_path, PROMPTS, "fp8")
    with cache_server(tmp_path) as server:

        def engine() -> DrivenEngine:
            return engine_of(tmp_path, "FlexCache", "fp8", endpoint=server.endpoint)

        with running(engine()) as first:
            assert first.answers(PROMPTS, NUM_GENERATED) == alone
            assert first.metric("vllm:spec_decode_num_accepted_tokens") > 0
            first.settle()
            server.restart()
            first.forget("GPU")
            assert first.answers(PROMPTS, NUM_GENERATED) == alone
            loaded = [first.stats()["engine"]["hit_blocks"]]
        with running(engine()) as second:
            assert second.answers(PROMPTS, NUM_GENERATED) == alone
            second.settle()
            loaded.append(second.stats()["engine"]["hit_blocks"])
        server.restart()
        with running(engine()) as third:
            third.settle()
            assert third.answers(PROMPTS, NUM_GENERATED) == alone
            loaded.append(third.stats()["engine"]["hit_blocks"])
    assert [sum(hits.values()) > 0 for hits in loaded] == [True, True, True], loaded
    assert [hits.get("SSD", 0) > 0 for hits in loaded] == [True, False, True], loaded
    assert compare_probes(tmp_path)["different"] == []


# -- loads that fail -----------------------------------------------------------------------------


def damage(path: Path, every: int) -> None:
    """Overwrite each so-many-th part of an SSD file."""
    part = 16 << 10
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for start in range(HEADER_BYTES, size - part, part * every):
            file.seek(start)
            file.write(os.urandom(part))


@pytest.mark.parametrize("every", [1, 60], ids=["every block", "some blocks"])
def test_a_load_that_fails_while_others_want_its_blocks(every: int, tmp_path: Path) -> None:
    """Requests with a common beginning come at once, so that some wait for others' blocks."""
    shared = [PROMPTS[1] + make_prompt(40, seed) for seed in (5, 6, 7)]
    prompts = [PROMPTS[1], *shared, PROMPTS[2]]
    alone = answers_alone(tmp_path, prompts, "auto")
    ssd = tmp_path / "ssd"
    tiers = {"cpu_cache_gb": 0.2, "ssd_cache_gb": 0.3, "ssd_cache_dirs": [str(ssd)]}
    with running(engine_of(tmp_path, "FlexCache", "auto", **tiers)) as engine:
        assert engine.answers(prompts, NUM_GENERATED) == alone
        engine.forget("DRAM")
        damage(ssd / DATA_FILE, every)
        assert engine.answers(prompts, NUM_GENERATED) == alone
        ended = engine.stats()["engine"]["ended_tasks"]
        assert ended["get_failed"] > 0, ended
        assert engine.metric("vllm:spec_decode_num_accepted_tokens") > 0
        for tier in ("GPU", "DRAM"):  # what was computed instead is whole
            engine.forget(tier)
            assert engine.answers(prompts, NUM_GENERATED) == alone
        engine.settle()
        blocks = engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]
    assert compare_probes(tmp_path)["different"] == []
