"""Real vLLM servers: one computes prompts, the other answers, over peers' DRAM."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from api_server import ApiServer, serving
from engines import FLEXCACHE, make_prompt
from make_models import make_model
from paths import MODELS
from ports import free_range
from router_process import RouterProcess, until

BLOCK, SIZE, NUM_PROMPTS = 32, 1500, 100
WHOLE_BLOCKS = SIZE // BLOCK * BLOCK
NUM_ANSWER = 8
NUM_STREAMS = 6
Server = tuple[ApiServer, str]
"""With its ``HOST:PORT`` for peers."""

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """An engine that computes prompts, in steps of a fifth of one, and one that decodes."""
    make_model(MODELS, "tiny")
    with ExitStack() as stack:
        found = []
        for name in ("prefill", "decode"):
            address = f"127.0.0.1:{free_range(2)}"
            settings = {
                "FLEXCACHE_PEER_ENDPOINT": f"tcp://{address}", "FLEXCACHE_CPU_CACHE_GB": "0.5",
                "FLEXCACHE_SKIP_SLOW_LOADS": "false",
            }  # fmt: skip
            log = tmp_path_factory.mktemp(name) / "log"
            options = ["--max-num-batched-tokens", "320"]
            server = ApiServer(log, settings, options, transfer=FLEXCACHE, kv_cache_bytes=8 << 20)
            found.append((server, address))
        stack.enter_context(serving(*(server for server, _ in found)))
        pools = found[0], found[1]
        seeds = itertools.count(10_000)
        # Engines do not wait at their start for the worker that reads from peers.
        until(lambda: hand_over(pools, make_prompt(SIZE, next(seeds)))[1][1] > 0)
        yield pools


def hand_over(pools: tuple[Server, Server], prompt: list[int], **decode: Any) -> tuple[Any, Any]:
    """Send both legs at once; the answers."""
    (first, source), (second, _) = pools
    waits = {"flexcache_source": source, "flexcache_wait_s": 60}
    with ThreadPoolExecutor(1) as pool:
        later: Future[tuple[list[int], int]] = pool.submit(
            second.complete, prompt, kv_transfer_params=waits, **decode
        )
        told = {"flexcache_hands_over": True}
        computed = first.complete(prompt, max_tokens=1, kv_transfer_params=told)
        return computed, later.result()


def test_both_legs_of_a_request_are_sent_at_once(pools: tuple[Server, Server]) -> None:
    for seed in range(3):
        prompt = make_prompt(SIZE, seed)
        (first, _), (tokens, cached) = hand_over(pools, prompt)
        assert cached == WHOLE_BLOCKS
        assert tokens[0] == first[0]
        whole, _ = pools[0][0].complete(prompt)
        assert tokens == whole


@pytest.mark.whole
def test_a_hundred_prompts_are_all_handed_over(pools: tuple[Server, Server]) -> None:
    for seed in range(100, 100 + NUM_PROMPTS):
        prompt = make_prompt(SIZE, seed)
        _, (tokens, cached) = hand_over(pools, prompt)
        assert cached == WHOLE_BLOCKS
        assert tokens == pools[0][0].complete(prompt)[0]


@pytest.mark.whole
def test_the_router_divides_requests_while_the_engine_that_decodes_is_busy(
    pools: tuple[Server, Server],
) -> None:
    (first, source), (second, _) = pools
    port = source.rpartition(":")[2]
    workers = (
        f"--worker={first.url},role=prefill,peer_port={port}",
        f"--worker={second.url},role=decode",
    )
    with RouterProcess((), *workers) as router, ThreadPoolExecutor(NUM_STREAMS) as pool:

        def ask(prompt: list[int], num_tokens: int) -> tuple[str, list[int], int]:
            body = {
                "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            request = urllib.request.Request(
                f"{router.url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=300) as response:
                answer = json.load(response)
                worker = response.headers["x-flexcache-worker"]
            cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            return worker, answer["choices"][0]["token_ids"], cached

        def is_busy() -> bool:
            stats = router.stats()["workers"][second.url]
            return bool(stats["requests"] == NUM_STREAMS)

        running = [pool.submit(ask, make_prompt(40, n), 600) for n in range(NUM_STREAMS)]
        until(is_busy)
        divided = 0
        for seed in range(300, 310):
            prompt = make_prompt(SIZE, seed)
            worker, tokens, cached = ask(prompt, NUM_ANSWER)
            if worker == f"{first.url}, {second.url}":
                divided += 1
                assert cached == WHOLE_BLOCKS
            assert tokens == first.complete(prompt)[0]
        assert divided
        for each in running:
            each.result()
