"""Loads that end although their server does not: from the pool that the rank has mapped."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from cluster import PATIENCE_S, kill, until
from load import TOKENS_PER_BLOCK, tokens_of
from test_shared import CONFIG, Member, members

from flexcache import CacheConfig
from flexcache.client import rank_ops

NUM_BLOCKS = 20
PROMPT = 3
LOADS = ["by layer", "between steps"]


def match_load(engine: Member) -> int:
    """Store a prompt, wipe it, and match its load."""
    engine.load.put(PROMPT, NUM_BLOCKS)
    task_id, mask = engine.manager.get_match(tokens_of(PROMPT, NUM_BLOCKS))
    assert mask.all()
    for layer in engine.kv.values():
        layer.zero_()
    return task_id


def hold_load(engine: Member) -> int:
    """Store a prompt, wipe it, and launch its load until the rank holds it."""
    task_id = match_load(engine)
    engine.manager.launch([task_id], [np.arange(NUM_BLOCKS * TOKENS_PER_BLOCK)], gated=True)
    assert engine.client.wait_held(task_id, NUM_BLOCKS, PATIENCE_S)
    return task_id


def is_loaded(engine: Member, task_id: int, kind: str) -> bool:
    """Open the gate of a load; return whether all of it arrives."""
    if kind == "by layer":
        return engine.client.load_by_layer(task_id, NUM_BLOCKS).wait_all(PATIENCE_S)
    engine.client.open_gates([task_id])
    assert engine.client.wait_ended(PATIENCE_S)
    return engine.client.take_ended([task_id]) == {task_id: NUM_BLOCKS}


@pytest.mark.whole
@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_its_rank_holds_ends_after_the_server_was_killed(kind: str) -> None:
    engine = Member(CacheConfig(**CONFIG), keeps_loads=True)
    with members(engine):
        task_id = hold_load(engine)
        kill(engine.manager.stats()["server_pid"])
        assert is_loaded(engine, task_id, kind)
        engine.load.compare(PROMPT, np.arange(NUM_BLOCKS))
        until(lambda: not engine.manager.is_ready())
        engine.manager.wait_ready(PATIENCE_S)
        assert engine.load.get(PROMPT, NUM_BLOCKS) == 0  # of another server, with an empty pool
        engine.load.put(PROMPT, NUM_BLOCKS)
        assert engine.load.get(PROMPT, NUM_BLOCKS) == NUM_BLOCKS
        assert engine.load.seen.wrong == []


@pytest.mark.whole
@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_its_rank_holds_ends_though_the_server_is_shut_down(kind: str) -> None:
    engine = Member(CacheConfig(**CONFIG), keeps_loads=True)
    with members(engine):
        task_id = hold_load(engine)
        os.kill(engine.manager.stats()["server_pid"], signal.SIGTERM)
        until(lambda: not engine.manager.is_ready())
        time.sleep(1.0)  # the engine is in a step
        assert is_loaded(engine, task_id, kind)
        engine.load.compare(PROMPT, np.arange(NUM_BLOCKS))
        engine.manager.wait_ready(PATIENCE_S)
        assert engine.load.seen.wrong == []


@pytest.mark.parametrize("kind", LOADS)
def test_blocks_of_a_held_load_are_not_reused_by_a_server_that_was_wrongly_given_up(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_ops, "_GATE_PATIENCE_S", PATIENCE_S)
    engine = Member(CacheConfig(**CONFIG, server_timeout_s=1.0), keeps_loads=True)
    other = Member(CacheConfig(**CONFIG, server_timeout_s=PATIENCE_S), dp_rank=1)
    with members(engine, other):
        task_id = hold_load(engine)
        pid = engine.manager.stats()["server_pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "rank_lost_server" in caplog.text)
        os.kill(pid, signal.SIGCONT)
        num_blocks = CONFIG["num_cpu_blocks"]
        for prompt in range(100, 100 + 4 * num_blocks // NUM_BLOCKS):
            other.load.put(prompt, NUM_BLOCKS)
        assert other.manager.stats()["tiers"]["CPU"]["evicted_blocks"] > num_blocks
        assert is_loaded(engine, task_id, kind)
        engine.load.compare(PROMPT, np.arange(NUM_BLOCKS))
        engine.manager.wait_ready(PATIENCE_S)
        assert engine.load.seen.wrong == []
        other.manager.check()
        until(lambda: other.manager.stats()["tiers"]["CPU"]["leased"] == 0)
