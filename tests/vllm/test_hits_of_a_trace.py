"""How much of a fixed trace is found: what an upgrade must not make less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engines import Settings, make_prompt

pytestmark = pytest.mark.whole
BLOCK = 32
SYSTEM = make_prompt(10 * BLOCK, 1)
NUM_USERS, NUM_TURNS, NUM_GENERATED = 6, 4, 16
ADDED, UNIQUE = 96, 12 * BLOCK
"""Tokens of a turn, and of a prompt that never comes again."""
ROOMY = {"num_cpu_blocks": 512, "num_ssd_blocks": 1024}
TIGHT = {"num_cpu_blocks": 32, "num_ssd_blocks": 48}
FOUND = {"lru": 7712, "density": 7712}
"""Tokens, of `prompt_tokens`, that a tight cache finds. Another number needs a reason."""


def hit_tokens(tmp_path: Path, **config: Any) -> tuple[int, int]:
    """Let users talk in turn, one request at a time, each stored before the next. Return the tokens
    that were found, and those that users had asked or been answered before."""
    settings = Settings(
        "FlexCache", "tiny", dram_gb=None, num_threads=1,
        more={"ssd_cache_dirs": [str(tmp_path / "ssd")], "skip_slow_loads": False, **config},
        engine={"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20},
    )  # fmt: skip
    found = known = 0
    talks = [list(SYSTEM) for _ in range(NUM_USERS)]
    with running(DrivenEngine(settings, tmp_path / "log")) as engine:
        for turn in range(NUM_TURNS):
            for user, talk in enumerate(talks):
                before = len(talk) if turn or user else 0
                talk += make_prompt(ADDED, 100 * turn + user + 2)
                answer, cached = engine.generate(talk, NUM_GENERATED)
                # Nothing computed the last token of an answer.
                known += (before - (turn > 0)) // BLOCK * BLOCK if before else 0
                found += cached
                talk += answer
                engine.forget("GPU")
            engine.generate(make_prompt(UNIQUE, 900 + turn), 1)
            engine.forget("GPU")
    return found, known


def test_with_room_for_all_that_is_known_is_found(tmp_path: Path) -> None:
    found, known = hit_tokens(tmp_path, **ROOMY)
    assert found == known


@pytest.mark.parametrize("policy", list(FOUND))
def test_a_policy_finds_as_much_as_it_did(policy: str, tmp_path: Path) -> None:
    found, known = hit_tokens(tmp_path, eviction_policy=policy, **TIGHT)
    assert known > found
    assert found == FOUND[policy]
