"""Requests whose prompt one engine computes and another decodes, through a real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import aiohttp
from fake_openai_engine import FakeEngine
from router_process import Ended, RouterProcess, complete, until

PROMPT = [number % 10 for number in range(4000)]
NUM_STREAMS = 40
SPEED = {"ttft_s": 0.05, "prefill_s_per_token": 2e-4}
"""As routers assume before they have measured it."""


@contextlib.contextmanager
def pools(
    transfer: str, *prefilling: FakeEngine, proxies: int = 0
) -> Iterator[tuple[FakeEngine, RouterProcess]]:
    """Run a router before engines that compute prompts, and one that decodes slowly."""
    with contextlib.ExitStack() as stack:
        for engine in prefilling:
            stack.enter_context(engine)
        decode = stack.enter_context(FakeEngine(**SPEED, tokens=400, token_interval_s=0.05))
        rest = f",role=prefill,peer_port=9600,transfer={transfer}"
        first = [f"--worker={engine.url}{rest}" for engine in prefilling]
        second = f"--worker={decode.url},role=decode,transfer={transfer}"
        yield decode, stack.enter_context(RouterProcess((), *first, second, proxies=proxies))


@contextlib.asynccontextmanager
async def busy(decode: FakeEngine, router: RouterProcess) -> AsyncIterator[None]:
    """Have the engine that decodes stream answers, so that it had better not compute a prompt."""
    prompts = [[7, number] for number in range(NUM_STREAMS)]
    streams = [asyncio.create_task(complete(router.url, prompt)) for prompt in prompts]
    try:
        while decode.stats()["running"] < NUM_STREAMS:
            await asyncio.sleep(0.01)
        # Until it has seen their first tokens, their prompts are what it would wait for.
        until(lambda: router.stats()["workers"][decode.url]["waiting_requests"] == 0)
        decode.behave(tokens=3, token_interval_s=0.0)
        yield
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def bodies(engine: FakeEngine) -> list[dict[str, Any]]:
    """What an engine was asked about the long prompt."""
    asked = [json.loads(e["body"]) for e in engine.requests() if e["method"] == "POST"]
    return [body for body in asked if body["prompt"] == PROMPT]


def ask(decode: FakeEngine, router: RouterProcess) -> Ended:
    async def test() -> Ended:
        async with busy(decode, router):
            return await complete(router.url, PROMPT)

    return asyncio.run(test())


def is_idle(router: RouterProcess) -> bool:
    return all(not each["requests"] for each in router.stats()["workers"].values())


WHOLE = pytest.mark.whole


@pytest.mark.parametrize(
    ("transfer", "proxies"),
    [
        ("flexcache", 0),
        ("flexcache", 1),
        ("nixl", 0),
        pytest.param("offloading", 0, marks=WHOLE),
        pytest.param("sglang", 0, marks=WHOLE),
    ],
)
def test_both_engines_are_told_how_the_prompts_kv_goes_from_one_to_the_other(
    transfer: str, proxies: int
) -> None:
    with pools(transfer, (prefill := FakeEngine()), proxies=proxies) as (decode, router):
        ended = ask(decode, router)
        assert ended.is_whole and ended.tokens == 3
        assert ended.worker == f"{prefill.url}, {decode.url}"
        [first], [second] = bodies(prefill), bodies(decode)
        assert (first["max_tokens"], first["stream"], second["stream"]) == (1, False, True)
        assert "max_tokens" not in second
        told = [body.get("kv_transfer_params", {}) for body in (first, second)]
        if transfer == "flexcache":
            assert told[0] == {"flexcache_hands_over": True}
            assert told[1].pop("flexcache_wait_s") > 1
            assert told[1] == {"flexcache_source": "127.0.0.1:9600"}
        elif transfer == "offloading":
            name = told[0]["remote_decoder"]["kv_request_id"]
            place = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": 9600}
            assert told[1] == {"remote_prefiller": place}
        elif transfer == "nixl":
            assert told[0]["do_remote_decode"] is True
            assert told[1] == {"remote_block_ids": [1, 2], "remote_port": 5600}
        else:
            rooms = [
                [body[f"bootstrap_{name}"] for name in ("host", "port", "room")]
                for body in (first, second)
            ]
            assert rooms[0] == rooms[1]
            assert rooms[0][:2] == ["127.0.0.1", 9600]
        until(lambda: is_idle(router))
        assert router.stats()["routing"]["decisions"]["divided"] == 1


@pytest.mark.parametrize(
    "failure",
    ["503", *(pytest.param(f, marks=WHOLE) for f in ("refuse", "close", "500", "garbage"))],
)
def test_another_engine_computes_a_prompt_that_the_first_did_not(failure: str) -> None:
    failing, other = FakeEngine(), FakeEngine()
    with pools("nixl", failing, other) as (decode, router):
        failing.behave(fail=failure)
        ended = ask(decode, router)
        assert ended.is_whole
        assert ended.worker == f"{other.url}, {decode.url}"
        assert len(bodies(decode)) == 1
        until(lambda: is_idle(router))


@pytest.mark.parametrize(
    "failure", ["500", *(pytest.param(f, marks=WHOLE) for f in ("refuse", "close", "503"))]
)
def test_without_an_engine_that_computes_the_prompt_the_other_does(failure: str) -> None:
    with pools("nixl", failing := FakeEngine()) as (decode, router):
        failing.behave(fail=failure)
        ended = ask(decode, router)
        assert ended.is_whole and ended.worker == decode.url
        [body] = bodies(decode)
        assert "kv_transfer_params" not in body
        until(lambda: is_idle(router))


@pytest.mark.parametrize(
    "failure", ["hang", *(pytest.param(f, marks=WHOLE) for f in ("refuse", "503"))]
)
def test_an_engine_that_answers_needs_no_other(failure: str) -> None:
    """Both are asked at once: what the second has waited for in vain it has computed."""
    with pools("flexcache", failing := FakeEngine()) as (decode, router):
        failing.behave(fail=failure)
        ended = ask(decode, router)
        assert ended.is_whole and ended.tokens == 3
        assert len(bodies(decode)) <= 2
        until(lambda: is_idle(router))


def test_what_is_wrong_with_a_request_the_engine_that_decodes_says() -> None:
    """However often: it is no fault of the engine that should have computed the prompt."""
    with pools("nixl", prefill := FakeEngine(), FakeEngine()) as (decode, router):

        async def test() -> list[int]:
            found = []
            async with busy(decode, router), aiohttp.ClientSession() as session:
                for engine in (prefill, decode):
                    engine.behave(fail="400")
                body = {"model": "fake", "prompt": PROMPT}
                for _ in range(15):
                    async with session.post(f"{router.url}/v1/completions", json=body) as answer:
                        found.append(answer.status)
                prefill.behave(fail="none")
                decode.behave(fail="none")
                ended = await complete(router.url, PROMPT)
                assert ended.is_whole and "," in str(ended.worker)
            return found

        assert asyncio.run(test()) == [400] * 15
        until(lambda: is_idle(router))


def test_an_engine_that_decodes_and_refuses_leaves_nothing_counted() -> None:
    with pools("flexcache", FakeEngine()) as (decode, router):

        async def test() -> Ended:
            async with busy(decode, router):
                decode.behave(fail="503")
                return await complete(router.url, PROMPT)

        assert asyncio.run(test()).status == 503
        until(lambda: is_idle(router))


def test_a_stream_does_not_wait_for_a_prompt_that_is_not_computed() -> None:
    """The header of its answer has come, and then the engine waits for the prompt."""
    with pools("flexcache", failing := FakeEngine(ttft_s=0.5), other := FakeEngine()) as (
        decode, router,
    ):  # fmt: skip

        async def test() -> Ended:
            async with busy(decode, router):
                decode.behave(ttft_s=60.0)
                failing.behave(fail="close")
                request = asyncio.create_task(complete(router.url, PROMPT))
                while not bodies(other):
                    await asyncio.sleep(0.01)
                decode.behave(ttft_s=0.0)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                return await complete(router.url, PROMPT)

        assert asyncio.run(test()).is_whole
        until(lambda: is_idle(router))


@pytest.mark.parametrize("transfer", ["flexcache", "nixl"])
def test_a_client_that_leaves_ends_both_parts(transfer: str) -> None:
    with pools(transfer, (prefill := FakeEngine(fail="hang"))) as (decode, router):

        async def test() -> None:
            async with busy(decode, router):
                decode.behave(fail="hang")
                request = asyncio.create_task(complete(router.url, PROMPT))
                while not bodies(prefill):
                    await asyncio.sleep(0.01)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

        asyncio.run(test())
        until(lambda: is_idle(router))
        until(lambda: prefill.stats()["running"] == 0)
