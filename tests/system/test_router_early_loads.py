"""A router has a real cache load from SSD what a request needs before the engine asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from cluster import Cluster, ops, running_cluster
from fake_openai_engine import FakeEngine
from ports import free_port, free_ports
from router_process import Ended, RouterProcess, complete, until

NUM_BLOCKS = 24
TOKENS = np.arange(1000, 1000 + NUM_BLOCKS * 16)
BLOCKS = list(range(NUM_BLOCKS))
PROMPT = [*TOKENS.tolist(), 7]
TOKEN = "cache-token"


def ask(router: RouterProcess) -> Ended:
    return asyncio.run(complete(router.url, PROMPT))


@contextlib.contextmanager
def caching(directory: Path, port: int) -> Iterator[tuple[Cluster, str]]:
    """Run a cache with a prompt on SSD only; its publisher, too."""
    endpoint, replay = (f"tcp://127.0.0.1:{each}" for each in free_ports(2))
    with running_cluster(
        [directory], http_endpoint=str(port), http_token=TOKEN,
        kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay,
    ) as cluster:  # fmt: skip
        cluster.put(TOKENS, BLOCKS)
        cluster.server.clear("CPU")
        yield cluster, f"--events=*={endpoint},{replay}"


def finds(router: RouterProcess, engine: FakeEngine, tier: str) -> bool:
    """Whether the router knows that a tier has all of the prompt."""
    found = router.post("/query", {"token_ids": PROMPT})["workers"].get(engine.url, {})
    return bool(found.get(tier) == NUM_BLOCKS * 16)


def calls(router: RouterProcess, cache: str) -> dict[str, int]:
    results: dict[str, int] = router.stats()["caches"][cache]["results"]
    return results


@pytest.mark.parametrize("proxies", [0, 1], ids=["one process", "a proxy"])
def test_blocks_on_ssd_are_in_dram_when_the_engine_asks(tmp_path: Path, proxies: int) -> None:
    port = free_port()
    cache = f"http://127.0.0.1:{port}"
    with (
        caching(tmp_path, port) as (cluster, events),
        FakeEngine() as engine,
        RouterProcess(
            [engine], events, f"--cache=*={cache}", proxies=proxies, cache_token=TOKEN
        ) as router,
    ):
        until(lambda: finds(router, engine, "disk"))
        before = ops(cluster).get("DISK2H", 0)
        assert ask(router).is_whole
        until(lambda: cluster.manager.stats()["ended_tasks"].get("prefetch_success") == 1)
        assert ops(cluster)["DISK2H"] == before + NUM_BLOCKS
        assert cluster.get(TOKENS, BLOCKS).mask.all()
        assert ops(cluster)["DISK2H"] == before + NUM_BLOCKS
        assert cluster.manager.stats()["early_loads"]["early"] == NUM_BLOCKS
        until(lambda: calls(router, cache) == {"accepted": 1})
        assert router.stats()["caches"][cache]["tokens"] == NUM_BLOCKS * 16
        metric = f'early_loads_total{{cache="{cache}",result="accepted"}} 1'
        assert metric in router.get("/metrics")

        # It is in DRAM now: there is nothing to ask for.
        until(lambda: finds(router, engine, "cpu"))
        assert ask(router).is_whole
        assert calls(router, cache) == {"accepted": 1}


def test_a_cache_without_the_right_token_is_not_asked_for_long(tmp_path: Path) -> None:
    port = free_port()
    cache = f"http://127.0.0.1:{port}"
    with (
        caching(tmp_path, port) as (cluster, events),
        FakeEngine() as engine,
        RouterProcess([engine], events, f"--cache={engine.url}={cache}") as router,
    ):
        until(lambda: finds(router, engine, "disk"))

        def has_given_up() -> bool:
            assert ask(router).is_whole
            return bool(router.stats()["caches"][cache]["circuit"] != "closed")

        until(has_given_up)
        assert any("status 401" in sentence for sentence in router.stats()["trouble"])
        assert "prefetch_success" not in cluster.manager.stats()["ended_tasks"]


def test_requests_are_answered_while_a_cache_is_silent_and_when_it_is_gone(tmp_path: Path) -> None:
    """At first it takes connections and says nothing."""
    port = free_port()
    with (
        caching(tmp_path, port) as (_, events),
        socket.create_server(("127.0.0.1", 0)) as stopped,
        FakeEngine() as engine,
    ):
        cache = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        with RouterProcess([engine], events, f"--cache=*={cache}") as router:
            until(lambda: finds(router, engine, "disk"))
            while router.stats()["caches"][cache]["circuit"] == "closed":
                assert ask(router).is_whole
            assert calls(router, cache)["failed"] >= 4
            assert "no answer" in router.stats()["caches"][cache]["failure"]
            stopped.close()  # gone for good
            num_left_out = calls(router, cache).get("circuit", 0)

            def is_left_alone() -> bool:
                assert ask(router).is_whole
                return calls(router, cache).get("circuit", 0) > num_left_out

            until(is_left_alone)
            assert router.stop() == 0


def test_what_an_engine_without_events_has_below_its_gpu_is_guessed_by_its_caches_size(
    tmp_path: Path,
) -> None:
    port = free_port()
    with (
        running_cluster([tmp_path], http_endpoint=str(port), http_token=TOKEN, num_cpu_blocks=64),
        FakeEngine(gpu_blocks=8) as engine,
        RouterProcess([engine], f"--cache=*=http://127.0.0.1:{port}", cache_token=TOKEN) as router,
    ):

        def has_it_below() -> bool:
            assert asyncio.run(complete(router.url, PROMPT)).is_whole
            found = router.post("/query", {"token_ids": PROMPT})["workers"][engine.url]
            return bool(found["gpu"] == 8 * 16 and found["cpu"] == NUM_BLOCKS * 16)

        until(has_it_below)


def test_an_engine_is_told_which_other_has_the_prompt(tmp_path: Path) -> None:
    """vLLM's p2p tier: the one that has it is busy, the other fetches it from there."""
    prompt = [number % 10 for number in range(2100)]
    sources = [[f"ipc://{tmp_path}/{name}-{kind}" for kind in ("kv", "again")] for name in "ab"]
    with (
        FakeEngine(events=sources[0][0], replay=sources[0][1]) as idle,
        FakeEngine(events=sources[1][0], replay=sources[1][1], fail="hang", times=1) as busy,
        RouterProcess(
            (),
            *(
                f"--worker={engine.url},peer_port=5710,transfer=offloading"
                for engine in (idle, busy)
            ),
            *(
                f"--events={engine.url}={','.join(source)}"
                for engine, source in zip((idle, busy), sources, strict=True)
            ),
            max_requests_per_worker=1,
        ) as router,
    ):
        busy.hold(prompt)

        def has_told() -> bool:
            found = router.post("/query", {"token_ids": prompt})["workers"]
            return bool(found[busy.url]["gpu"] == 2096)

        until(has_told)

        async def test() -> Ended:
            hanging = asyncio.create_task(complete(router.url, prompt))
            while not busy.stats()["running"]:
                await asyncio.sleep(0.01)
            other = await complete(router.url, prompt)
            hanging.cancel()
            return other

        assert asyncio.run(test()).worker == idle.url
        (asked,) = (each for each in idle.requests() if each["method"] == "POST")
        body = json.loads(asked["body"])
        source = body["kv_transfer_params"]["remote_kv_source"]
        assert source.pop("kv_request_id")
        assert source == {"remote_host": "127.0.0.1", "remote_port": 5710}
        assert body["prompt"] == prompt
        (first,) = (each for each in busy.requests() if each["method"] == "POST")
        assert "kv_transfer_params" not in json.loads(first["body"])
