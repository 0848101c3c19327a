"""Requests of a real SGLang engine that wait for pages below DRAM, or that need not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
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

pytestmark = pytest.mark.whole


MOST_TRIES = 50


def park(engine: TinyEngine, tokens: list[int], num_new: int = 8) -> Any:
    """Queue a request, which must wait."""
    request = engine.add(tokens, num_new)
    assert request.rid in linker_of(engine).requests.parked
    return request


def check_parts(ssd: str) -> None:
    engine = engine_with_linker(ssd)
    short, longer = prompt(200), prompt(333)
    engine.generate(short)
    settle(engine)
    manager_of(engine).clear("CPU")
    cold = remember(engine, longer)  # its start is on the GPU, and no longer in DRAM
    forget_gpu(engine)
    check_again(engine, longer, 320, cold)

    forget_gpu(engine, "CPU")
    engine.generate(short)
    forget_gpu(engine)
    check_again(engine, longer, 320, cold)  # its start is in DRAM, its end on SSD

    forget_gpu(engine, "CPU")
    first = engine.add(short, 1)
    engine.step_until(first.finished)
    assert engine.tree.linker.pending_offloads  # the start is on the GPU, its offload under way
    second = park(engine, longer)
    engine.step_until(second.finished)
    assert second.cached_tokens == 320
    assert list(second.output_ids) == cold[0]
    settle(engine)
    manager_of(engine).check()


def test_the_parts_of_a_prompt_are_found_wherever_they_are(tmp_path: Path) -> None:
    apart(check_parts, str(tmp_path))


def check_stopped_disk(ssd: str) -> None:
    from sglang.srt.environ import envs

    engine = engine_with_linker(ssd, op_timeout_s=600, skip_slow_loads=True, early_load_share=0.75)
    linker, manager = linker_of(engine), manager_of(engine)
    prompts = [prompt(250, seed) for seed in range(5)]
    expected = [list(engine.generate(tokens).output_ids) for tokens in prompts]
    forget_gpu(engine, "CPU")
    disk_worker = manager.stats()["workers"]["disk"]
    os.kill(disk_worker, signal.SIGSTOP)
    stopped_s = time.monotonic()
    requests = [park(engine, tokens) for tokens in prompts[:4]]
    engine.step_until(lambda: all(request.finished() for request in requests))
    assert [list(request.output_ids) for request in requests] == expected[:4]
    assert not any(request.cached_tokens for request in requests)

    late = park(engine, prompts[4])
    with envs.SGLANG_REQ_WAITING_TIMEOUT.override(0.01):
        while not (aborts := engine.scheduler._poll_timeout_aborts()):
            pass
    for abort in aborts:
        engine.scheduler.abort_request(abort)
    assert not linker.requests.is_busy()
    assert late not in engine.scheduler.waiting_queue

    num_pages = 250 // linker.cache.page_size
    while time.monotonic() - stopped_s < 20 * num_pages / linker.requests.prefill_pages_per_s:
        engine.step()
    os.kill(disk_worker, signal.SIGCONT)
    for _ in range(MOST_TRIES):  # until a page arrives, it is unknown how slow the disk is
        forget_gpu(engine, "CPU")
        if manager.stats()["load_cost"].get("SSD", {}).get("blocks_per_s"):
            break
        engine.step_until(engine.add(prompts[0]).finished)
    again = engine.add(prompts[4])
    assert again.rid not in linker.requests.parked  # computing is faster
    engine.step_until(again.finished)
    assert again.cached_tokens == 0
    assert list(again.output_ids) == expected[4]
    assert manager.stats()["engine"]["skipped_blocks"]["ssd_slower_than_recompute"] >= num_pages
    settle(engine)
    manager.check()
    assert manager.stats()["tiers"]["CPU"]["leased"] == 0


def test_no_request_waits_for_a_disk_longer_than_computing_takes(tmp_path: Path) -> None:
    apart(check_stopped_disk, str(tmp_path))
