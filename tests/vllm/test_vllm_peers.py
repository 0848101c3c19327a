"""Real vLLM engines that read each other's DRAM, without a store between them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from driven_engine import DrivenEngine, running
from engines import make_prompt
from ports import free_range
from probe_connector import compare_probes
from test_group_engines import SAME_STATES, engine_of

PATIENCE_S = 60.0
LENGTHS = [1200, 700, 300]
NUM_ANSWER = 200
ATTEMPTS = 5


def until_in_touch(engine: DrivenEngine) -> None:
    """Wait until an engine's cache knows the other; a step of the engine tells it nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        stats = engine.stats()
        if stats["peers"]["up"] and stats["tiers"]["PEER"]["available"]:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def settle(engine: DrivenEngine) -> None:
    """Have an engine's puts end."""
    engine.ask(make_prompt(20, 5))
    engine.settle()


@pytest.mark.newest
@pytest.mark.parametrize(
    ("model", "position", "after", "dtype"),
    [
        ("gemma3", 128, 1280, "float32"),
        # No state is stored while an answer is computed.
        pytest.param("qwen3next", 256, 1024, "bfloat16", marks=pytest.mark.whole),
    ],
)
def test_one_engine_decodes_what_another_has_prefilled(
    model: str, position: int, after: int, dtype: str, tmp_path: Path
) -> None:
    addresses = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(2)]

    def engine(number: int) -> DrivenEngine:
        config: dict[str, Any] = {
            "cpu_cache_gb": 0.2, "peer_endpoint": addresses[number], "peers": addresses,
            "skip_slow_loads": False,
        }  # fmt: skip
        (tmp_path / str(number)).mkdir()
        return engine_of(model, tmp_path, config, dtype=dtype, **SAME_STATES)

    prompts = [make_prompt(length, i) for i, length in enumerate(LENGTHS)]
    with running(engine(0)) as prefill, running(engine(1)) as decode:
        until_in_touch(prefill)
        until_in_touch(decode)
        for number, prompt in enumerate(prompts):
            for attempt in range(ATTEMPTS):
                cold = prefill.ask(prompt)
                settle(prefill)
                seen = decode.ask(prompt)
                assert seen["tokens"] == cold["tokens"]
                if seen["cached"]:
                    break
                # On a busy machine a peer may answer too late for a match: another prompt.
                prompts[number] = prompt = make_prompt(len(prompt), 100 * attempt + 100 + number)
            assert seen["cached"] == (len(prompt) - 1) // position * position
        hits = decode.stats()["hit_blocks"]
        assert "PEER" in hits
        # The next turn goes to the engine that prefills: it reads what the other has decoded.
        answer = decode.ask(prompts[0], NUM_ANSWER)["tokens"]
        settle(decode)
        turn = prompts[0] + answer + make_prompt(50, 9)
        cached = prefill.ask(turn)["cached"]
        assert cached == after
        assert ("PEER" in prefill.stats()["hit_blocks"]) is (after > 1199)
        assert prefill.stats()["peers"]["open"] == 0
    assert compare_probes(tmp_path)["different"] == []
