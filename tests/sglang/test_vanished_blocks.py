"""Blocks that vanish between SGLang's look-up and its load of a layer, in a real engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import kill
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
from test_sglang_lost_servers import await_cache, before

from flexcache.storage.pool_directory import DATA_FILE

pytestmark = pytest.mark.whole

TOKENS = prompt(200)
NUM_LAYERS = 4


def before_layer(engine: TinyEngine, layer: int, act: Callable[[], object]) -> None:
    """Have something happen once, just before the model waits for a layer that is loaded."""
    waits = linker_of(engine).layer_done_counter
    original = waits.wait_until

    def wait(wanted: int) -> None:
        if wanted == layer and waits.consumer_index >= 0:
            waits.wait_until = original
            act()
        original(wanted)

    waits.wait_until = wait


def check_in_dram(ssd: str) -> None:
    engine = engine_with_linker(ssd)
    linker, manager = linker_of(engine), manager_of(engine)
    cold = remember(engine, TOKENS)

    def drop() -> None:
        """Evict all that may be."""
        for tier in ("CPU", "SSD"):
            manager.clear(tier)

    def cut() -> None:
        os.truncate(Path(ssd) / DATA_FILE, 0)

    for vanish, moment in itertools.product(
        (drop, manager.reset, cut), ("load", "start_layer_wise_loading", *range(NUM_LAYERS))
    ):
        forget_gpu(engine)  # SGLang's own cache too, since after a reset it is of other weights
        engine.generate(TOKENS)
        forget_gpu(engine)
        acted: list[object] = []

        def act(vanish: Any = vanish, acted: list[object] = acted) -> None:
            acted.append(vanish())

        if isinstance(moment, int):
            before_layer(engine, moment, act)
        else:
            before(linker, moment, act)
        is_refused = (vanish, moment) == (manager.reset, "load")  # the weights may have changed
        check_again(engine, TOKENS, 0 if is_refused else 192, cold)
        assert acted
    forget_gpu(engine)
    assert manager.stats()["tiers"]["CPU"]["leased"] == 0


def test_what_a_look_up_found_is_loaded_though_it_is_dropped(tmp_path: Path) -> None:
    apart(check_in_dram, str(tmp_path))


def check_on_ssd(ssd: str) -> None:
    engine = engine_with_linker(ssd)
    linker = linker_of(engine)
    data = Path(ssd) / DATA_FILE
    cold = remember(engine, TOKENS)

    def damage() -> None:
        with data.open("r+b") as file:
            size = data.stat().st_size
            file.write(os.urandom(size))

    for vanish in (damage, lambda: os.truncate(data, 0)):
        forget_gpu(engine, "CPU")
        before(linker.requests, "park", vanish)
        request = engine.add(TOKENS)
        engine.step_until(request.finished)
        assert request.finished_reason.to_json()["type"] == "length"
        assert request.cached_tokens < 192
        assert list(request.output_ids) == cold[0]
        assert engine.kv_bytes(TOKENS[:192]) == cold[1]
    forget_gpu(engine)
    check_again(engine, TOKENS, 192, cold)  # is in DRAM again


def test_what_is_gone_from_ssd_since_the_look_up_is_computed(tmp_path: Path) -> None:
    apart(check_on_ssd, str(tmp_path))


def check_killed_at_layers(directory: str) -> None:
    engine = engine_with_linker(endpoint=f"ipc://{directory}/cache.sock")
    manager = manager_of(engine)
    cold = remember(engine, TOKENS)
    for layer in range(NUM_LAYERS):
        forget_gpu(engine)
        pid: Any = manager.stats()["server_pid"]
        before_layer(engine, layer, lambda pid=pid: kill(pid))
        check_again(engine, TOKENS, 192, cold)
        await_cache(engine)
        engine.flush()
        check_again(engine, TOKENS, 0, cold)  # of another server, whose pool was empty


def test_a_load_ends_though_the_server_is_killed_at_any_layer(tmp_path: Path) -> None:
    apart(check_killed_at_layers, str(tmp_path))
