"""SGLang's loads when the server, or the worker below it, dies at their worst moments."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import PATIENCE_S, kill, until
from sglang_engine import (
    TinyEngine,
    apart,
    check_again,
    engine_with_linker,
    forget_gpu,
    linker_of,
    linker_options,
    manager_of,
    options,
    prompt,
    remember,
)
from test_windows import engine_with_windows, kv_bytes

from flexcache.client.rank import ClientState

pytestmark = pytest.mark.whole


TOKENS = prompt(200)


def before(owner: Any, method: str, act: Callable[[], object]) -> None:
    """Have a method act once, before it does what it does."""
    original = getattr(owner, method)

    def act_first(*arguments: Any, **options: Any) -> Any:
        setattr(owner, method, original)
        act()
        return original(*arguments, **options)

    setattr(owner, method, act_first)


def await_cache(engine: TinyEngine) -> None:
    until(lambda: not manager_of(engine).is_ready())
    manager_of(engine).wait_ready(PATIENCE_S)


def check_killed_server(directory: str) -> None:
    engine = engine_with_linker(endpoint=f"ipc://{directory}/cache.sock")
    linker, manager = linker_of(engine), manager_of(engine)
    cold = remember(engine, TOKENS)

    def kill_server() -> None:
        kill(manager.stats()["server_pid"])

    for owner, method, num_cached in (
        (linker, "load", 0),  # matched, and not begun: computed
        (linker, "start_layer_wise_loading", 192),
        (linker.layer_done_counter, "wait_until", 192),
    ):
        forget_gpu(engine)
        before(owner, method, kill_server)
        check_again(engine, TOKENS, num_cached, cold)
        await_cache(engine)
        engine.flush()
        check_again(engine, TOKENS, 0, cold)  # of another server, whose pool was empty
    forget_gpu(engine)
    check_again(engine, TOKENS, 192, cold)


def test_a_server_that_is_killed_costs_no_request(tmp_path: Path) -> None:
    apart(check_killed_server, str(tmp_path))


def check_windows(directory: str) -> None:
    engine = engine_with_windows(endpoint=f"ipc://{directory}/cache.sock")
    cold = engine.generate(TOKENS)
    expected = list(cold.output_ids), kv_bytes(engine, TOKENS[:192])
    forget_gpu(engine)
    pid = manager_of(engine).stats()["server_pid"]
    before(linker_of(engine), "start_layer_wise_loading", lambda: kill(pid))
    loaded = engine.generate(TOKENS)
    assert loaded.cached_tokens == 192
    assert (list(loaded.output_ids), kv_bytes(engine, TOKENS[:192])) == expected
    await_cache(engine)


def test_windows_are_loaded_whole_though_the_server_is_killed(tmp_path: Path) -> None:
    apart(check_windows, str(tmp_path))


def check_stopped_server(directory: str) -> None:
    engine = engine_with_linker(endpoint=f"ipc://{directory}/cache.sock")
    linker, manager = linker_of(engine), manager_of(engine)
    client = linker.cache.client
    cold = remember(engine, TOKENS)
    pid = manager.stats()["server_pid"]
    for method, num_cached in (("load", 0), ("start_layer_wise_loading", 192)):
        forget_gpu(engine)
        before(linker, method, lambda: os.kill(pid, signal.SIGSTOP))
        check_again(engine, TOKENS, num_cached, cold)
        until(lambda: not manager.is_ready() and client.state is not ClientState.SERVING)
        os.kill(pid, signal.SIGCONT)
        # The server may greet the scheduler before it hears that the rank had left.
        client.wait_registered(PATIENCE_S)
        manager.wait_ready(PATIENCE_S)


def test_a_server_that_is_stopped_costs_no_request(tmp_path: Path) -> None:
    apart(check_stopped_server, str(tmp_path))


def check_killed_worker(ssd: str) -> None:
    engine = engine_with_linker(ssd)
    linker, manager = linker_of(engine), manager_of(engine)
    cold = remember(engine, TOKENS)
    forget_gpu(engine)

    def kill_worker() -> int:
        pid = int(manager.stats()["workers"]["disk"])
        kill(pid)
        return pid

    def is_replaced(pid: int) -> bool:
        stats = manager.stats()
        others = stats["workers"].get("disk") not in (None, pid)
        return others and bool(stats["tiers"]["SSD"]["available"])

    first = manager.stats()["workers"]["disk"]
    before(linker, "start_layer_wise_loading", kill_worker)
    check_again(engine, TOKENS, 192, cold)  # from DRAM
    until(partial(is_replaced, first))
    for _ in range(3):
        forget_gpu(engine, "CPU")
        parked = engine.add(TOKENS)
        killed = kill_worker()  # before, in or after its read
        engine.step_until(parked.finished)
        assert list(parked.output_ids) == cold[0]
        assert engine.kv_bytes(TOKENS[:192]) == cold[1]
        until(partial(is_replaced, killed))
    forget_gpu(engine, "CPU")
    check_again(engine, TOKENS, 192, cold)


def test_a_disk_worker_that_is_killed_costs_no_request(tmp_path: Path) -> None:
    apart(check_killed_worker, str(tmp_path))


def check_ranks(directory: str) -> None:
    import sglang
    from make_models import make_model
    from paths import MODELS

    make_model(MODELS, "tiny")
    linker = linker_options(
        "KillingLinker", "killing_linker", num_cpu_blocks=200, skip_slow_loads=False,
        endpoint=f"ipc://{directory}/cache.sock",
    )  # fmt: skip
    engine = sglang.Engine(**options(**linker, tp_size=2))
    outputs: list[list[int]] = []

    def num_loaded() -> int:
        until(lambda: engine.flush_cache().success)
        sampling = {"temperature": 0, "max_new_tokens": 8}
        answer = engine.generate(input_ids=TOKENS, sampling_params=sampling)
        outputs.append(answer["output_ids"])
        return int(answer["meta_info"]["cached_tokens"])

    assert num_loaded() == 0
    for order, expected in (("load.1", 0), ("start.0", 192)):
        until(lambda: num_loaded() == 192)
        (Path(directory) / order).touch()
        assert num_loaded() == expected
        assert not (Path(directory) / order).exists()
    until(lambda: num_loaded() == 192)
    assert all(found == outputs[0] for found in outputs)
    engine.shutdown()


def test_ranks_agree_though_the_server_of_one_is_killed(tmp_path: Path) -> None:
    apart(check_ranks, str(tmp_path))
