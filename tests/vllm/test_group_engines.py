"""Models with windows, chunks and states beside full attention, in real vLLM engines.

Each keeps its groups and all its GPU blocks, answers the same wherever its KV comes from, and gets
back the bytes of each layer that were stored. In float32 where schedules differ, since in bfloat16
another schedule already gives other tokens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from make_models import make_draft, make_guessable
from paths import MODELS
from probe_connector import compare_probes
from test_processes import run

from flexcache.integration.vllm.groups import TELLS_GROUPS
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import HEADER_BYTES

pytestmark = pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only")
SAME_STATES = {"mamba_ssm_cache_dtype": "float32"}
"""Else states, and so the position, depend on the CPU."""


def engine_of(
    model: str, path: Path, config: dict[str, Any], system: str = "FlexCache", **engine: Any
) -> DrivenEngine:
    """An engine of a model with groups, whose blocks are probed into ``path``."""
    options = {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "enable_prefix_caching": True,
    }  # fmt: skip
    settings = Settings(
        system, model, dram_gb=None, more=config, engine=options | engine,
        probe_dir=str(path), num_threads=1, has_groups=True,
    )  # fmt: skip
    return DrivenEngine(settings, path / "log")


def tiers(path: Path, dram_gb: float = 0.2, ssd_gb: float = 0.2) -> dict[str, Any]:
    """A DRAM tier, and an SSD tier that is read although computing may be faster."""
    return {
        "cpu_cache_gb": dram_gb, "ssd_cache_gb": ssd_gb, "ssd_cache_dirs": [str(path)],
        "skip_slow_loads": False,
    }  # fmt: skip


def assert_all_free(engine: DrivenEngine) -> None:
    blocks = engine.gpu_blocks()
    assert blocks["free"] == blocks["all"]


def assert_same_bytes(path: Path) -> None:
    assert compare_probes(path)["different"] == []


# -- every model, from every tier ----------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, and what vLLM does with it when it is alone.

    Attributes:
        position: Tokens between the positions where prefixes can end.
        num_blocks: GPU blocks that it has in 64 MiB.
    """

    name: str
    position: int
    num_blocks: int
    dtype: str = "float32"


ALL_MODELS = [
    Model("gemma3", 128, 256),
    Model("hybrid", 128, 256),
    Model("two_sizes", 256, 128),
    Model("gptoss", 128, 256),
    Model("llama4", 128, 512),
    Model("qwen3next", 256, 256, "bfloat16"),
    Model("nemotronh", 256, 128),
    Model("granite4", 256, 128),
    Model("falconh1", 256, 64),
    Model("mamba2", 16, 119),
]


@pytest.mark.whole
@pytest.mark.newest
@pytest.mark.parametrize("model", ALL_MODELS, ids=lambda model: model.name)
def test_it_answers_the_same_from_every_tier_and_after_a_restart(
    model: Model, tmp_path: Path
) -> None:
    def engine() -> DrivenEngine:
        config = tiers(tmp_path / "ssd")
        return engine_of(model.name, tmp_path, config, dtype=model.dtype, **SAME_STATES)

    prompt = make_prompt(1200, 1)
    longer = prompt + make_prompt(500, 2)
    hit = 1199 // model.position * model.position
    with running(engine()) as first:
        assert first.gpu_blocks()["all"] == model.num_blocks - 1  # one is vLLM's null block
        cold, cached = first.generate(prompt)
        assert cached == 0
        first.forget("GPU")
        assert first.generate(prompt) == (cold, hit)
        assert first.stats()["hit_blocks"] == {"CPU": hit // model.position}
        cold_longer, cached = first.generate(longer)
        assert cached == hit
        first.forget("DRAM")
        assert first.generate(prompt) == (cold, hit)
        assert first.stats()["hit_blocks"]["SSD"] == hit // model.position
        first.settle()
        assert_all_free(first)
    with running(engine()) as second:
        assert second.generate(prompt) == (cold, hit)
        answer, cached = second.generate(longer)
        assert answer == cold_longer
        assert cached == 1699 // model.position * model.position
    assert_same_bytes(tmp_path)
    assert compare_probes(tmp_path)["loaded"] > 0


# -- where prompts resume ------------------------------------------------------------------------


POSITION = 128
NUM_ANSWER = 400


@pytest.mark.parametrize("interval", [POSITION, pytest.param(None, marks=pytest.mark.whole)])
def test_the_next_turn_and_shared_prefixes(interval: int | None, tmp_path: Path) -> None:
    config = {"cpu_cache_gb": 0.5, "tail_interval_tokens": interval}
    sizes = {"max_model_len": 4096, "kv_cache_memory_bytes": 128 << 20}
    with running(engine_of("gemma3", tmp_path, config, **sizes)) as engine:
        prompt = make_prompt(1200, 1)
        answer = engine.ask(prompt, NUM_ANSWER)["tokens"]
        turn = prompt + answer + make_prompt(50, 2)
        engine.forget("GPU")
        seen = engine.ask(turn)
        assert seen["cached"] == (1200 + NUM_ANSWER - 1) // POSITION * POSITION
        engine.forget("DRAM")
        assert engine.ask(turn)["tokens"] == seen["tokens"]

        long = make_prompt(3000, 3)
        engine.ask(long)
        for num_shared in (600, 1400, 2800):
            engine.forget("GPU")
            unlike = long[:num_shared] + make_prompt(40, num_shared)
            every = interval or 1024  # four windows
            assert engine.ask(unlike)["cached"] == num_shared // every * every
        assert_all_free(engine)
    assert_same_bytes(tmp_path)


# -- what another engine has stored --------------------------------------------------------------


PATIENCE_S = 60.0
OPEN_STATES = ("created", "ready", "running")


def until_stored(engine: DrivenEngine) -> None:
    """Wait until what the engine has stored at its server is in the remote store, too."""
    deadline = time.monotonic() + PATIENCE_S
    engine.ask(make_prompt(20, 5))  # until its puts have ended
    while any(engine.stats()["tasks"][state] for state in OPEN_STATES):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.whole
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

    def engine(**config: Any) -> DrivenEngine:
        config["skip_slow_loads"] = False
        return engine_of(model, tmp_path, config, dtype="bfloat16", **SAME_STATES)

    prompt, other = make_prompt(1200, 1), make_prompt(1200, 2)
    try:
        with running(engine(endpoint=endpoint)) as first:
            while not first.stats()["tiers"]["REMOTE"]["available"]:
                first.generate(make_prompt(20, 3))
            cold, cached = first.generate(prompt)
            assert cached == 0
            cold_other, _ = first.generate(other)
            until_stored(first)
        with running(engine(endpoint=endpoint)) as second:
            assert second.generate(prompt) == (cold, hit)
            assert second.stats()["engine"]["hit_blocks"]["CPU"] > 0
    finally:
        server.terminate()
        server.wait()
    patience = {"remote_lookup_timeout_s": 5, "server_timeout_s": 30}
    with running(engine(cpu_cache_gb=0.2, remote_url=store, **patience)) as third:
        while not third.stats()["tiers"]["REMOTE"]["available"]:
            third.generate(make_prompt(20, 4))
        assert third.generate(other) == (cold_other, hit)
        assert third.stats()["hit_blocks"].keys() == {"REMOTE"}
    assert_same_bytes(tmp_path)


# -- several ranks -------------------------------------------------------------------------------


LENGTHS = [1200, 900, 700]
BLOCK_SIZES = {"gemma3": None, "qwen3next": 256}
"""As vLLM chooses them. In a process of its own, its scheduler forgets the one of qwen3next on a
CPU: chunks then end between states, and none is kept."""
STAGES = {"pipeline_parallel_size": 2, "worker_extension_cls": "pp_eager.EagerStages"}


@pytest.mark.whole
@pytest.mark.parametrize("engine", [STAGES, {"tensor_parallel_size": 2}], ids=["stages", "tensor"])
@pytest.mark.parametrize(("model", "position"), [("gemma3", 128), ("qwen3next", 256)])
def test_each_rank_gets_back_its_layers_of_every_group(
    model: str, position: int, engine: dict[str, Any]
) -> None:
    options = {
        "model": model,
        "has_groups": True,
        "prompts": LENGTHS,
        "cpu_blocks": {"gemma3": 24, "qwen3next": 10}[model],  # not all of them
        "settle": True,
        "engine": {"kv_cache_memory_bytes": 64 << 20, "block_size": BLOCK_SIZES[model], **engine},
    }
    seen = run(options)
    assert seen["errors"] == []
    assert all(seen["tokens_equal"])
    assert seen["cached"] == [(length - 1) // position * position for length in LENGTHS]
    assert seen["probes"]["ranks"] == 2
    assert seen["probes"]["different"] == []
    assert seen["ssd_hit_tokens"] > 0


# -- GPU blocks run out, requests are aborted, the cache is reset --------------------------------


STEPS_LATE = 3
PREEMPTIONS = "vllm:num_preemptions"


@dataclass(frozen=True)
class Pressed:
    """An engine under pressure, its prompts, and what it answers without a connector."""

    engine: DrivenEngine
    prompts: list[list[int]]
    num_generated: int
    alone: dict[int, list[int]]

    def assert_answers(self, aborted: tuple[int, ...] = (), **how: Any) -> None:
        """Assert that the answers are those without a connector, and all GPU blocks are free."""
        kept = {i: tokens for i, tokens in self.alone.items() if i not in aborted}
        found = self.engine.answers(self.prompts, self.num_generated, aborted=list(aborted), **how)
        assert found == kept
        assert_all_free(self.engine)


@pytest.fixture(
    scope="module",
    # Lengths of prompts, tokens generated, GPU blocks. Interpreted kernels compute a token of
    # nemotronh in 0.2 s: few prompts, of which the first three soon need one more block.
    params=[
        ("gemma3", range(200, 440, 30), 300, 40),
        ("nemotronh", range(740, 780, 10), 32, 19),
    ],
    ids=lambda p: p[0],
)
def pressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pressed]:
    model, lengths, num_generated, num_blocks = request.param
    path = tmp_path_factory.mktemp(model)
    config = {**tiers(path, 0.3, 0.3), "tail_interval_tokens": 256}
    few = {
        "max_model_len": 1536, "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 512,
    }  # fmt: skip
    prompts = [make_prompt(length, 70 + i) for i, length in enumerate(lengths)]
    with running(engine_of(model, path, config, **few)) as made:
        alone = made.answers(prompts, num_generated, without="cache")
        assert made.metric(PREEMPTIONS) > 0
        yield Pressed(made, prompts, num_generated, alone)


@pytest.mark.whole
@pytest.mark.runners
def test_preemptions(pressed: Pressed) -> None:
    engine = pressed.engine
    before = engine.metric(PREEMPTIONS)
    for _ in range(2):
        engine.forget("GPU")
        pressed.assert_answers()
    assert engine.metric(PREEMPTIONS) > before
    assert engine.stats()["engine"]["hit_blocks"]["CPU"] > 0
    assert_same_bytes(Path(engine.settings.probe_dir or ""))


@pytest.mark.whole
@pytest.mark.runners
def test_late_copies_aborts_and_resets(pressed: Pressed) -> None:
    engine = pressed.engine
    engine.open_gates_late(STEPS_LATE)
    pressed.assert_answers()
    engine.forget("GPU")
    pressed.assert_answers(aborted=(1, 3))
    pressed.assert_answers(resets=True)
    disk = engine.stats()["workers"]["disk"]
    engine.forget("DRAM")
    pressed.assert_answers(kill=disk)
    assert_same_bytes(Path(engine.settings.probe_dir or ""))


# -- faults --------------------------------------------------------------------------------------


NUM_GENERATED = 40
PROMPTS = [make_prompt(800 + 130 * i, 90 + i) for i in range(4)]
HIT = 1024


def damage_ssd(directory: Path, every: int = 1) -> None:
    """Overwrite each so-many-th part of what is on SSD."""
    part = 16 << 10
    with (directory / DATA_FILE).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for start in range(HEADER_BYTES, size - part, part * every):
            file.seek(start)
            file.write(os.urandom(part))


@pytest.mark.whole
@pytest.mark.parametrize("model", ["gemma3", "nemotronh"])
def test_a_disk_worker_that_is_killed_under_load_costs_no_answer(
    model: str, tmp_path: Path
) -> None:
    with running(engine_of(model, tmp_path, tiers(tmp_path))) as engine:
        alone = engine.answers(PROMPTS, NUM_GENERATED, without="cache")
        engine.forget("GPU")
        disk = engine.stats()["workers"]["disk"]
        assert engine.answers(PROMPTS, NUM_GENERATED, kill=disk) == alone
        until(lambda: engine.stats()["tiers"]["SSD"]["available"])
        assert engine.stats()["workers"]["disk"] != disk
        for _ in range(2):  # what was lost is stored again
            engine.forget("DRAM")
            assert engine.answers(PROMPTS, NUM_GENERATED) == alone
        assert engine.stats()["engine"]["hit_blocks"]["SSD"] > 0
        assert_all_free(engine)
    assert_same_bytes(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("model", "num_groups"), [("gemma3", 3), ("llama4", 4), ("qwen3next", 2), ("mamba2", 1)]
)
def test_a_byte_of_any_group_that_changes_in_dram_is_seen(
    model: str, num_groups: int, tmp_path: Path
) -> None:
    dtype = "bfloat16" if model == "qwen3next" else "float32"
    with running(engine_of(model, tmp_path, {"cpu_cache_gb": 0.1}, dtype=dtype)) as engine:
        prompt = PROMPTS[1]  # not to the edge of a chunk, where no chunked group needs anything
        engine.generate(prompt)
        for group in range(num_groups):
            engine.forget("GPU")
            engine.damage_loads(group)
            engine.generate(prompt)
    different = compare_probes(tmp_path)["different"]
    groups = {int(key.split("/")[1]) for _, key in different}
    assert groups == set(range(num_groups))


@pytest.mark.whole
@pytest.mark.runners
@pytest.mark.parametrize("model", ["gemma3", "nemotronh"])
def test_a_load_with_bad_checksums_costs_its_request_a_recompute(
    model: str, tmp_path: Path
) -> None:
    ssd = tmp_path / "ssd"
    prompt = make_prompt(HIT + 2, 1)
    with running(engine_of(model, tmp_path, tiers(ssd, ssd_gb=0.05))) as engine:
        cold, _ = engine.generate(prompt)
        engine.forget("DRAM")
        damage_ssd(ssd)
        assert engine.generate(prompt)[0] == cold
        assert engine.stats()["engine"]["ended_tasks"]["get_failed"] == 1
        engine.forget("GPU")
        assert engine.generate(prompt) == (cold, HIT)  # it was computed and stored again
        engine.settle()
        assert_all_free(engine)
    assert_same_bytes(tmp_path)


# -- drafts --------------------------------------------------------------------------------------


NEEDS_AVX512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's fp8 KV needs AVX-512 here"
)
GUESSED = [make_prompt(length, 7 + length) for length in (500, 900, 1300)]


def drafting(tmp_path: Path, system: str, kv_dtype: str, **more: Any) -> DrivenEngine:
    """An engine of a model with windows, with drafts unless it is "alone".

    The draft stands for a layer that predicts further tokens (MTP) and the windows for states:
    vLLM's kernels for CPUs do not undo rejected drafts in states.
    """
    drafts = {"method": "eagle", "model": str(make_draft(MODELS)), "num_speculative_tokens": 2}
    return engine_of(
        make_guessable(MODELS, "gemma3").name, tmp_path, {"skip_slow_loads": False, **more},
        system, block_size=32, max_num_batched_tokens=512, kv_cache_dtype=kv_dtype,
        enable_prefix_caching=system != "alone",
        speculative_config=None if system == "alone" else drafts,
    )  # fmt: skip


def answers_alone(tmp_path: Path, prompts: list[list[int]], kv_dtype: str) -> dict[int, list[int]]:
    with running(drafting(tmp_path, "alone", kv_dtype)) as engine:
        return engine.answers(prompts, NUM_GENERATED)


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


@pytest.mark.whole
@NEEDS_AVX512
def test_answers_after_restarts_are_those_without_a_cache(tmp_path: Path) -> None:
    """With KV of 8 bits; the server is restarted, then the engine, then both."""
    alone = answers_alone(tmp_path, GUESSED, "fp8")
    with cache_server(tmp_path) as server:

        def engine() -> DrivenEngine:
            return drafting(tmp_path, "FlexCache", "fp8", endpoint=server.endpoint)

        with running(engine()) as first:
            assert first.answers(GUESSED, NUM_GENERATED) == alone
            assert first.metric("vllm:spec_decode_num_accepted_tokens") > 0
            first.settle()
            server.restart()
            first.forget("GPU")
            assert first.answers(GUESSED, NUM_GENERATED) == alone
            loaded = [first.stats()["engine"]["hit_blocks"]]
        with running(engine()) as second:
            assert second.answers(GUESSED, NUM_GENERATED) == alone
            second.settle()
            loaded.append(second.stats()["engine"]["hit_blocks"])
        server.restart()
        with running(engine()) as third:
            third.settle()
            assert third.answers(GUESSED, NUM_GENERATED) == alone
            loaded.append(third.stats()["engine"]["hit_blocks"])
    assert [sum(hits.values()) > 0 for hits in loaded] == [True, True, True], loaded
    assert [hits.get("SSD", 0) > 0 for hits in loaded] == [True, False, True], loaded
    assert_same_bytes(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("every", [1, 60], ids=["every block", "some blocks"])
def test_a_load_that_fails_while_others_want_its_blocks(every: int, tmp_path: Path) -> None:
    """Requests with a common beginning come at once, so that some wait for others' blocks."""
    shared = [GUESSED[1] + make_prompt(40, seed) for seed in (5, 6, 7)]
    prompts = [GUESSED[1], *shared, GUESSED[2]]
    alone = answers_alone(tmp_path, prompts, "auto")
    ssd = tmp_path / "ssd"
    with running(drafting(tmp_path, "FlexCache", "auto", **tiers(ssd, ssd_gb=0.3))) as engine:
        assert engine.answers(prompts, NUM_GENERATED) == alone
        engine.forget("DRAM")
        damage_ssd(ssd, every)
        assert engine.answers(prompts, NUM_GENERATED) == alone
        ended = engine.stats()["engine"]["ended_tasks"]
        assert ended["get_failed"] > 0, ended
        assert engine.metric("vllm:spec_decode_num_accepted_tokens") > 0
        for tier in ("GPU", "DRAM"):  # what was computed instead is whole
            engine.forget(tier)
            assert engine.answers(prompts, NUM_GENERATED) == alone
        engine.settle()
        assert_all_free(engine)
    assert_same_bytes(tmp_path)
