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
    settle,
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


def check_hints(directory: str, endpoint: str | None) -> None:
    ssd = f"{directory}/ssd"
    engine = engine_with_linker(ssd, num_cpu_blocks=NUM_CPU_BLOCKS, endpoint=endpoint)
    calls = ControlCalls(manager_of(engine), None)
    cold = remember(engine, prompt(200, seed=50))
    forget_gpu(engine, "CPU", "SSD")

    for _ in range(2):  # the second time nothing is left to copy
        forget_gpu(engine)
        engine.generate(prompt(200, seed=50), custom_params={"flexcache_max_store_tokens": 100})
        settle(engine)
        assert calls.lookup(prompt(200, seed=50)) == {"CPU": 96, "SSD": 96}
    # SGLang's tree has the rest; the next request that may be stored brings it to the tiers.
    again = engine.generate(prompt(200, seed=50), custom_params={"flexcache_max_store_tokens": -1})
    assert again.cached_tokens == CACHED
    settle(engine)
    assert calls.lookup(prompt(200, seed=50)) == {"CPU": CACHED, "SSD": CACHED}
    forget_gpu(engine)
    check_again(engine, prompt(200, seed=50), CACHED, cold)
    forget_gpu(engine)

    engine.generate(PROMPT, 40, custom_params={"flexcache_pin_ttl_s": 600})
    settle(engine)
    stats = manager_of(engine).stats()
    assert stats["tiers"]["CPU"]["pinned"] == CACHED // 16
    flood(engine, 1)
    assert calls.lookup(PROMPT)["CPU"] == CACHED
    for ignored in (True, -1, "soon", 1e9):
        engine.generate(prompt(200, seed=60), custom_params={"flexcache_pin_ttl_s": ignored})
    flood(engine, 1 + FLOOD)
    assert calls.lookup(prompt(200, seed=60))["CPU"] == 0
    manager_of(engine).check()
    linker_of(engine).close()


@pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_request_says_how_much_is_stored_and_how_long_it_is_pinned(
    is_shared: bool, tmp_path: Path
) -> None:
    apart(check_hints, str(tmp_path), f"ipc://{tmp_path}/cache.sock" if is_shared else None)
