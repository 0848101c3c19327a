"""Models with windows and with states while vLLM runs out of GPU blocks, aborts and resets.

In float32, since in bfloat16 another schedule already gives other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from driven_engine import DrivenEngine, running
from engine_systems import Settings
from engines import make_prompt
from probe_connector import compare_probes

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
    pytest.mark.runners,
]
NUM_GENERATED = 300
STEPS_LATE = 3
PREEMPTIONS = "vllm:num_preemptions"


@dataclass(frozen=True)
class Pressed:
    """An engine under pressure, its prompts, and what it answers without a connector."""

    engine: DrivenEngine
    prompts: list[list[int]]
    alone: dict[int, list[int]]

    def assert_all_free(self) -> None:
        blocks = self.engine.gpu_blocks()
        assert blocks["free"] == blocks["all"]

    def assert_same_bytes(self) -> None:
        assert compare_probes(Path(self.engine.settings.probe_dir or ""))["different"] == []


@pytest.fixture(scope="module", params=[("gemma3", 200), ("nemotronh", 700)], ids=lambda p: p[0])
def pressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pressed]:
    model, num_tokens = request.param
    path = tmp_path_factory.mktemp(model)
    engine = {
        "dtype": "float32", "max_model_len": 1536, "num_gpu_blocks_override": 40, "seed": 0,
        "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": True,
        "max_num_batched_tokens": 512,
    }  # fmt: skip
    config = {
        "cpu_cache_gb": 0.3, "ssd_cache_gb": 0.3, "ssd_cache_dirs": [str(path)],
        "skip_slow_loads": False, "tail_interval_tokens": 256,
    }  # fmt: skip
    settings = Settings(
        "FlexCache", model, dram_gb=None, more=config, engine=engine, probe_dir=str(path),
        num_threads=1, has_groups=True,
    )  # fmt: skip
    prompts = [make_prompt(num_tokens + 30 * i, 70 + i) for i in range(8)]
    with running(DrivenEngine(settings, path / "log")) as made:
        alone = made.answers(prompts, NUM_GENERATED, without="cache")
        assert made.metric(PREEMPTIONS) > 0
        yield Pressed(made, prompts, alone)


def test_preemptions(pressed: Pressed) -> None:
    engine = pressed.engine
    before = engine.metric(PREEMPTIONS)
    for _ in range(2):
        engine.forget("GPU")
        assert engine.answers(pressed.prompts, NUM_GENERATED) == pressed.alone
        pressed.assert_all_free()
    assert engine.metric(PREEMPTIONS) > before
    assert engine.stats()["engine"]["hit_blocks"]["CPU"] > 0
    pressed.assert_same_bytes()


def test_late_copies_aborts_and_resets(pressed: Pressed) -> None:
    engine, prompts = pressed.engine, pressed.prompts
    engine.open_gates_late(STEPS_LATE)
    assert engine.answers(prompts, NUM_GENERATED) == pressed.alone
    pressed.assert_all_free()
    aborted = [1, 4]
    engine.forget("GPU")
    kept = {i: tokens for i, tokens in pressed.alone.items() if i not in aborted}
    assert engine.answers(prompts, NUM_GENERATED, aborted=aborted) == kept
    pressed.assert_all_free()
    assert engine.answers(prompts, NUM_GENERATED, resets=True) == pressed.alone
    pressed.assert_all_free()
    disk = engine.stats()["workers"]["disk"]
    engine.forget("DRAM")
    assert engine.answers(prompts, NUM_GENERATED, kill=disk) == pressed.alone
    pressed.assert_all_free()
    pressed.assert_same_bytes()
