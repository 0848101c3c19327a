"""Models with groups and drafts for a while, on too few GPU blocks, with aborts and resets.

SOAK_S=3600 SOAK_SEED=7 pytest tests/vllm/test_engine_soak.py -s -o faulthandler_timeout=5000
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt
from make_models import make_draft, make_guessable
from paths import MODELS

from flexcache.integration.vllm.groups import TELLS_GROUPS

pytestmark = [
    pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only"),
    pytest.mark.whole,
]
SECONDS = float(os.environ.get("SOAK_S", 30))
"""For all models together."""
SEED = int(os.environ.get("SOAK_SEED", 0))
LEG_S = 60.0
"""After which the engine comes to rest, and nothing may be left over."""
NUM_USERS, NUM_TURNS, NUM_GENERATED = 8, 3, 40
MODELS_SOAKED: dict[str, dict[str, Any]] = {
    # windows, and a draft model; states, whose drafts the CPU's kernels do not undo
    "gemma3": {"num_gpu_blocks_override": 160, "block_size": 32},
    "nemotronh": {"num_gpu_blocks_override": 44},  # of 256 tokens; vLLM allows no smaller ones
}


def engine_arguments(model: str) -> dict[str, Any]:
    return {
        "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "seed": 0,
        "max_num_batched_tokens": 512, **MODELS_SOAKED[model],
    }  # fmt: skip


def prompts_of_users(model: str, log: Path) -> Iterator[tuple[list[int], list[int]]]:
    """All turns of some conversations with their answers, by an engine that caches nothing and
    drafts nothing. Half of the users begin with the same words."""
    plain = {**engine_arguments(model), "enable_prefix_caching": False}
    settings = Settings("alone", f"{model}-guessable", engine=plain, has_groups=True, num_threads=1)
    talks = [make_prompt(150, user % 2) + make_prompt(100 + 70 * user, 50 + user)
             for user in range(NUM_USERS)]  # fmt: skip
    with running(DrivenEngine(settings, log)) as engine:
        for turn in range(NUM_TURNS):
            for user, answer in sorted(engine.answers(talks, NUM_GENERATED).items()):
                yield talks[user], answer
                talks[user] = talks[user] + answer + make_prompt(90, 100 * turn + user)


@pytest.mark.parametrize("model", list(MODELS_SOAKED))
def test_every_answer_is_right_and_nothing_leaks(model: str, tmp_path: Path) -> None:
    name = make_guessable(MODELS, model).name
    prompts = list(prompts_of_users(model, tmp_path / "alone"))
    drafts = {"method": "eagle", "model": str(make_draft(MODELS)), "num_speculative_tokens": 2}
    tiers = {
        "cpu_cache_gb": 0.03, "ssd_cache_gb": 0.1, "ssd_cache_dirs": [str(tmp_path / "ssd")],
        "skip_slow_loads": False,
    }  # fmt: skip
    settings = Settings(
        "FlexCache", name, dram_gb=None, more=tiers, has_groups=True, num_threads=1,
        engine={**engine_arguments(model), "enable_prefix_caching": True,
                "speculative_config": drafts if model == "gemma3" else None},
    )  # fmt: skip
    end = time.monotonic() + SECONDS / len(MODELS_SOAKED)
    counts: Counter[str] = Counter()
    with running(DrivenEngine(settings, tmp_path / "log")) as engine:
        seed = SEED
        while (left := end - time.monotonic()) > 0:
            leg = engine.soak(prompts, min(left, LEG_S), seed, str(tmp_path / "ssd"))
            print(f"{model}, seed {seed}: {leg}", flush=True)
            counts.update(leg)
            seed += 1
            if leg.get("wrong") or leg["leaked"]:
                break
        stats = engine.stats()
        counts["preempted"] = int(engine.metric("vllm:num_preemptions"))
        counts["accepted drafts"] = int(engine.metric("vllm:spec_decode_num_accepted_tokens"))
        counts["tokens hit on the GPU"] = int(engine.metric("vllm:prefix_cache_hits"))
        for tier, hits in stats["hit_blocks"].items():
            counts[f"blocks hit on {tier}"] = hits
        ended = stats["engine"]["ended_tasks"]
    print(f"{model}: {dict(counts)}; tasks: {ended}", flush=True)
    wrong = [line for line in (tmp_path / "log").read_text().splitlines() if "WRONG" in line]
    assert not wrong
    assert (counts["wrong"], counts["leaked"]) == (0, 0)
    assert counts["right"] > 0
