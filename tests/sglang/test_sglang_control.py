"""What an SGLang engine has cached is looked up, pinned and deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_calls import ControlCalls
from ports import free_port
from sglang_engine import (
    TinyEngine,
    apart,
    check_again,
    engine_with_linker,
    forget_gpu,
    linker_of,
    manager_of,
    prompt,
    remember,
)

PROMPT = prompt(200)
CACHED = 192
FLOOD = 6
WAYS = ["at a server", "command"]
NUM_CPU_BLOCKS = 64
"""Room for five prompts of 12 blocks."""


def flood(engine: TinyEngine, first: int) -> None:
    for number in range(first, first + FLOOD):
        engine.generate(prompt(200, seed=number))
        forget_gpu(engine)


def check_calls(directory: str, way: str) -> None:
    path, port = Path(directory), free_port()
    settings: dict[str, Any] = {"num_cpu_blocks": NUM_CPU_BLOCKS}
    if way == "at a server":
        settings["endpoint"] = f"ipc://{path}/cache.sock"
    elif way == "command":
        settings["http_endpoint"] = str(port)
    engine = engine_with_linker(str(path / "ssd"), **settings)
    calls = ControlCalls(manager_of(engine), port if way == "command" else None)
    cold = remember(engine, PROMPT)
    forget_gpu(engine)
    assert calls.lookup(PROMPT) == {"CPU": CACHED, "SSD": CACHED}
    assert calls.lookup(PROMPT[:100]) == {"CPU": 96, "SSD": 96}

    pin = calls.pin(PROMPT, ttl_s=600)
    assert pin is not None
    assert pin.num_tokens == CACHED
    flood(engine, 1)
    assert calls.lookup(prompt(200, seed=1)) == {"CPU": 0, "SSD": CACHED}
    assert calls.lookup(PROMPT)["CPU"] == CACHED
    check_again(engine, PROMPT, CACHED, cold)
    forget_gpu(engine)
    assert calls.unpin(pin.id)
    flood(engine, 1 + FLOOD)
    assert calls.lookup(PROMPT) == {"CPU": 0, "SSD": CACHED}

    assert calls.delete(PROMPT)["SSD"] == CACHED // 16
    assert calls.lookup(PROMPT) == {"CPU": 0, "SSD": 0}
    check_again(engine, PROMPT, 0, cold)
    forget_gpu(engine)
    engine.generate(PROMPT, session_id="agent")
    forget_gpu(engine)
    pin = calls.pin(session_id="agent", ttl_s=600)
    assert pin is not None
    assert pin.num_tokens == CACHED
    calls.delete(session_id="agent")
    assert not calls.unpin(pin.id)
    manager_of(engine).check()
    linker_of(engine).close()


@pytest.mark.parametrize(
    "way", ["in process", *(pytest.param(w, marks=pytest.mark.whole) for w in WAYS)]
)
def test_a_prompt_is_looked_up_pinned_and_deleted(way: str, tmp_path: Path) -> None:
    apart(check_calls, str(tmp_path), way)
