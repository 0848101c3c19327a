"""FlexCache behind the radix tree of a real SGLang engine."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_range
from sglang_engine import (
    OPEN_STATES,
    PAGE,
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
    settle,
)


def check_tiers(ssd: str) -> None:
    engine = engine_with_linker(ssd)
    tokens, longer = prompt(200), prompt(333)
    cold = remember(engine, tokens)
    check_again(engine, tokens, 192, cold)  # from the tree
    forget_gpu(engine)
    check_again(engine, tokens, 192, cold)  # from DRAM
    cold_longer = remember(engine, longer)  # its end is stored behind what is there
    forget_gpu(engine)
    check_again(engine, longer, 320, cold_longer)
    forget_gpu(engine, "CPU")
    parked = engine.add(longer)
    other = engine.generate(prompt(40, seed=3))  # goes on meanwhile
    assert other.finished()
    engine.step_until(parked.finished)
    assert parked.cached_tokens == 320
    assert list(parked.output_ids) == cold_longer[0]
    assert engine.kv_bytes(longer[:320]) == cold_longer[1]
    hits = manager_of(engine).stats()["engine"]["hit_blocks"]
    assert hits["SSD"] >= 20
    settle(engine)
    check_not_stored(engine)
    manager_of(engine).check()


def check_not_stored(engine: TinyEngine) -> None:
    """What is not to be stored is in no tier, nor in SGLang's tree; the same prompt then is."""
    tokens, before = prompt(200, 8), manager_of(engine).stats()["tiers"]
    private = engine.generate(tokens, 40, custom_params={"flexcache_store": False})
    settle(engine)
    after = manager_of(engine).stats()["tiers"]
    assert [after[t]["indexed"] for t in after] == [before[t]["indexed"] for t in before]
    again = engine.generate(tokens, 40, custom_params={"flexcache_store": "no"})
    assert (again.cached_tokens, again.output_ids) == (0, private.output_ids)
    assert engine.generate([*tokens, *again.output_ids]).cached_tokens == (200 + 39) // PAGE * PAGE


def test_pages_come_back_whole_from_tree_dram_and_ssd(tmp_path: Path) -> None:
    apart(check_tiers, str(tmp_path))


def check_aborts(ssd: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    engine = engine_with_linker(ssd)
    tokens = prompt(200)
    cold = remember(engine, tokens)
    for _ in range(3):
        forget_gpu(engine, "CPU")
        parked = engine.add(tokens)
        engine.scheduler.abort_request(AbortReq(rid=parked.rid))
    forget_gpu(engine)
    check_again(engine, tokens, 192, cold)
    forget_gpu(engine)
    assert not linker_of(engine).requests.is_busy()
    tiers = manager_of(engine).stats()["tiers"]
    assert tiers["CPU"]["leased"] == 0
    check_aborted_answer(engine)
    settle(engine)
    engine.generate(prompt(40, seed=5))  # later steps take the ends that came late
    client = linker_of(engine).cache.client
    engine.step_until(lambda: not client._tasks._ended and not client._worker.gates._opened)


def check_aborted_answer(engine: TinyEngine) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    request = engine.add(prompt(200, 7), num_new=200)
    engine.step_until(lambda: len(request.output_ids) >= 60)
    engine.scheduler.abort_request(AbortReq(rid=request.rid))
    engine.step_until(request.finished)
    settle(engine)
    forget_gpu(engine)
    answered = [*prompt(200, 7), *request.output_ids]
    num_computed = (len(answered) - 1) // PAGE * PAGE
    assert engine.generate([*answered, 7]).cached_tokens == num_computed


def test_an_aborted_request_leaves_nothing_behind_but_what_it_has_computed(tmp_path: Path) -> None:
    apart(check_aborts, str(tmp_path))


def ask(port: int, path: str, tier: str = "") -> Any:
    """Ask one rank's cache; with a tier, post its name."""
    body = json.dumps({"tier": tier}).encode() if tier else None
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def check_spawned(tp_size: int, directory: str, tiers: list[str]) -> None:
    import sglang
    from make_models import make_model
    from paths import MODELS

    make_model(MODELS, "tiny")
    port = free_range(tp_size)
    linker = linker_options(
        num_cpu_blocks=200, num_ssd_blocks=200, ssd_cache_dirs=[f"{directory}/ssd"],
        http_endpoint=f"127.0.0.1:{port}", skip_slow_loads=False, server_timeout_s=60.0,
        remote_lookup_timeout_s=20.0,
        **({"remote_url": f"file://{directory}/store"} if "REMOTE" in tiers else {}),
    )  # fmt: skip
    engine = sglang.Engine(**options(**linker, tp_size=tp_size))
    caches = range(port, port + tp_size)  # each rank has a cache and an address of its own

    def generate() -> Any:
        sampling = {"temperature": 0, "max_new_tokens": 8}
        return engine.generate(input_ids=prompt(200), sampling_params=sampling)

    def settle() -> None:
        for cache in caches:
            while any(ask(cache, "/status")["tasks"].get(state) for state in OPEN_STATES):
                pass

    while not all(
        ask(cache, "/status")["tiers"][t]["available"] for cache in caches for t in tiers
    ):
        pass
    cold, again = generate(), generate()
    assert again["meta_info"]["cached_tokens"] == 192
    for index, tier in enumerate(tiers):
        while not engine.flush_cache().success:
            pass
        settle()
        for cache in caches:
            for above in tiers[:index]:
                ask(cache, "/cache/clear", above)
        loaded = generate()
        details = loaded["meta_info"]["cached_tokens_details"]
        assert (details["device"], details["host"]) == (0, 192), (tier, details)
        assert cold["output_ids"] == again["output_ids"] == loaded["output_ids"]
        for cache in caches:
            assert ask(cache, "/status")["tiers"][tier]["hit_blocks"] >= 12
    engine.shutdown()


def spawned(tp_size: int, directory: Path) -> None:
    apart(check_spawned, tp_size, str(directory), ["CPU", "SSD", "REMOTE"])


@pytest.mark.whole
def test_an_engine_of_processes_loads_from_every_tier(tmp_path: Path) -> None:
    spawned(1, tmp_path)


def test_two_ranks_agree(tmp_path: Path) -> None:
    spawned(2, tmp_path)
