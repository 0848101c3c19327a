"""The router predicts from events what real engines report as cached: vLLM 0.28 to 0.33, with
FlexCache's tiers, blocks of several sizes, salts and adapters, and draft models."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from api_server import ApiServer, serving
from engines import Engine, make_prompt
from make_models import make_draft, make_model
from paths import MODELS
from predictions import Predictions, predicting
from router_process import RouterProcess, until
from vllm import __version__

from flexcache.router.fleet import EventSource, Tier

pytestmark = pytest.mark.whole


VLLM = tuple(map(int, __version__.split(".")[:2]))
OLD_VLLM = os.environ.get("OLD_VLLM_PATH")
PATIENCE_S = 300.0
_seeds = itertools.count(20_000)


def usable(num_tokens: int, block: int) -> int:
    """Return how much of a prompt an engine takes from its cache if it has all blocks: not the
    last token, which it computes."""
    return (num_tokens - 1) // block * block


# -- vLLM with FlexCache, in this process ----------------------------------------------------------


@pytest.fixture
def sources(engine: Engine) -> tuple[EventSource, EventSource]:
    """vLLM's publisher, which has our events too, and ours."""
    engine.forget_all()
    vllms, config = engine.scheduler.kv_events_config, engine.server.config
    return (
        EventSource(vllms.endpoint, vllms.replay_endpoint),
        EventSource(config.kv_events_endpoint, config.kv_events_replay_endpoint),
    )


def test_what_engine_and_tiers_hold_is_predicted_by_tier(
    engine: Engine, sources: tuple[EventSource, EventSource]
) -> None:
    vllms, ours = sources
    prompt = make_prompt(300, next(_seeds))
    all_of_it = usable(300, 32)

    def next_step() -> None:
        """vLLM sends events of tiers when it steps."""
        engine.generate(make_prompt(5, 1), max_tokens=1)
        engine.drain()

    async def test() -> None:
        async with predicting(one=(vllms,), both=(vllms, ours), cache=(ours,)) as predictions:
            assert engine.generate(prompt, 1).num_cached_tokens == 0
            engine.settle()
            next_step()
            for worker in ("one", "both", "cache"):
                await predictions.come_to(all_of_it, worker, prompt)
            assert predictions.of("both", prompt)[Tier.GPU] == all_of_it
            assert predictions.of("cache", prompt)[Tier.DRAM] == all_of_it
            assert engine.generate(prompt, 1).num_cached_tokens == all_of_it

            engine.forget_gpu()
            next_step()
            for worker in ("one", "both"):
                while predictions.of(worker, prompt)[Tier.GPU]:
                    await asyncio.sleep(0.01)
                assert predictions.of(worker, prompt)[Tier.DRAM] == all_of_it
            longer = prompt + make_prompt(100, next(_seeds))
            assert predictions.total("both", longer) == all_of_it
            assert engine.generate(longer, 1).num_cached_tokens == all_of_it

            engine.settle()
            engine.manager.clear("CPU")
            engine.forget_gpu()
            next_step()
            for worker in ("one", "both", "cache"):
                while predictions.of(worker, prompt)[Tier.DISK] != all_of_it:
                    await asyncio.sleep(0.01)
                await predictions.come_to(all_of_it, worker, prompt)
            assert engine.generate(prompt, 1).num_cached_tokens == all_of_it

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_salted_prompt_is_matched_with_its_salt_only(
    engine: Engine, sources: tuple[EventSource, EventSource]
) -> None:
    prompt = make_prompt(200, next(_seeds))
    all_of_it = usable(200, 32)

    async def test() -> None:
        async with predicting(worker=sources) as predictions:
            engine.generate(prompt, 1, cache_salt="alice")
            engine.settle()
            await predictions.come_to(all_of_it, "worker", prompt, cache_salt="alice")
            for salt, expected in ((None, 0), ("bob", 0), ("alice", all_of_it)):
                extra = {} if salt is None else {"cache_salt": salt}
                assert predictions.total("worker", prompt, cache_salt=salt) == expected
                assert engine.generate(prompt, 1, **extra).num_cached_tokens == expected

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


# -- servers of two versions -----------------------------------------------------------------------

BLOCK_OF = {"old": 16, "new": 32}


def make_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of the tiny model."""
    from safetensors.torch import save_file

    directory.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"], "bias": "none",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 256, generator=generator)
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of each version, by name, with its source."""
    make_model(MODELS, "tiny")
    directory = tmp_path_factory.mktemp("servers")
    adapters = [f"{name}={make_adapter(directory / name, i)}" for i, name in enumerate("xy")]
    sockets = tmp_path_factory.mktemp("events")
    started: dict[str, Any] = {}
    paths = {"new": [], "old": [OLD_VLLM]} if OLD_VLLM else {"new": []}
    try:
        for name, path in paths.items():
            events, replay = (f"ipc://{sockets}/{name}-{kind}" for kind in ("kv", "again"))
            server = ApiServer(
                directory / f"{name}.log",
                arguments=["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *adapters],
                kv_events={"endpoint": events, "replay_endpoint": replay},
                block_size=BLOCK_OF[name],
                python_path=[each for each in path if each],
            )
            started[name] = (server, EventSource(events, replay))
        for server, _ in started.values():
            server.wait_ready()
        yield started
    finally:
        for server, _ in started.values():
            server.stop()


def cached(server: ApiServer, prompt: list[int], **more: Any) -> int:
    """Have a server answer; return the cached tokens that it reports."""
    _, num_cached = server.complete(prompt, max_tokens=1, **more)
    return num_cached


def follow(servers: dict[str, Any], test: Callable[[Predictions], Awaitable[None]]) -> None:
    async def with_feed() -> None:
        sources = {name: (source,) for name, (_, source) in servers.items()}
        async with predicting(**sources) as predictions:
            await test(predictions)

    asyncio.run(asyncio.wait_for(with_feed(), PATIENCE_S))


def test_versions_and_block_sizes_side_by_side(servers: dict[str, Any]) -> None:
    if "old" not in servers:
        pytest.skip("OLD_VLLM_PATH names no vLLM 0.28 (scripts/test.sh does)")
    shared = make_prompt(150, next(_seeds))

    async def test(predictions: Predictions) -> None:
        for name, (server, _) in servers.items():
            block = BLOCK_OF[name]
            prompt = shared + make_prompt(100, next(_seeds))
            assert predictions.total(name, prompt) == cached(server, prompt) == 0
            await predictions.come_to(usable(250, block), name, prompt)
            for other in (prompt, prompt + make_prompt(77, next(_seeds)), shared, prompt[:208]):
                expected = min(len(prompt) // block * block, usable(len(other), block))
                assert predictions.total(name, other) == expected
                assert cached(server, other) == expected

    follow(servers, test)


@pytest.mark.parametrize("name", ["new", "old"])
def test_salts_and_adapters_are_kept_apart(servers: dict[str, Any], name: str) -> None:
    if name not in servers:
        pytest.skip("OLD_VLLM_PATH names no vLLM 0.28 (scripts/test.sh does)")
    server, _ = servers[name]
    prompt = make_prompt(200, next(_seeds))
    all_of_it = usable(200, BLOCK_OF[name])
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"cache_salt": "alice"}, {"cache_salt": "alice"}),
        ({"model": "x"}, {"adapter": "x"}),
        ({"model": "y"}, {"adapter": "y"}),
        ({"model": "y", "cache_salt": "bob"}, {"adapter": "y", "cache_salt": "bob"}),
    ]

    async def test(predictions: Predictions) -> None:
        for body, request in kinds:  # none finds what those before it stored
            assert predictions.total(name, prompt, **request) == 0
            assert cached(server, prompt, **body) == 0
            await predictions.come_to(all_of_it, name, prompt, **request)
        for body, request in kinds:
            assert predictions.total(name, prompt, **request) == all_of_it
            assert cached(server, prompt, **body) == all_of_it

    follow(servers, test)


# -- a draft model that looks ahead ----------------------------------------------------------------

DRAFT_BLOCK = 32
NUM_BRANCHES = int(os.environ.get("NUM_BRANCHES", "40"))


def branching_prompts(count: int) -> Iterator[list[int]]:
    """Yield prompts of which most go on from a place in an earlier one, often the end of a
    block."""
    rng = random.Random(7)
    prompts: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if prompts and rng.random() < 0.9:
            earlier = rng.choice(prompts)
            cut = rng.randrange(1, len(earlier) + 1)
            start = earlier[: cut // DRAFT_BLOCK * DRAFT_BLOCK if rng.random() < 0.7 else cut]
        more = rng.choice([0, 1, DRAFT_BLOCK, rng.randrange(1, 120)])
        # Few different tokens: some branches agree in what a draft looks at, some do not.
        prompts.append((start + [3 + rng.randrange(3) for _ in range(more)])[:1500] or [3])
        yield prompts[-1]


@pytest.mark.newest
@pytest.mark.skipif(VLLM < (0, 33), reason="hashes of blocks look ahead from vLLM 0.33 on")
def test_where_a_draft_looks_ahead_branches_are_predicted(tmp_path: Path) -> None:
    """A plain engine, with EAGLE and no connector, behind a router that follows its events."""
    draft = {"method": "eagle", "model": str(make_draft(MODELS)), "num_speculative_tokens": 2}
    make_model(MODELS, "tiny")
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("kv", "again"))
    server = ApiServer(
        tmp_path / "log", arguments=["--speculative-config", json.dumps(draft)],
        kv_events={"endpoint": events, "replay_endpoint": replay},
        block_size=DRAFT_BLOCK, kv_cache_bytes=128 << 20,
    )  # fmt: skip
    options = (f"--worker={server.url}", f"--events={server.url}={events},{replay}")
    outcomes: Counter[int] = Counter()

    def has_told(prompt: list[int]) -> bool:
        held = router.post("/query", {"token_ids": prompt})
        (tokens,) = (found["longest_matched"] for found in held["workers"].values())
        return bool(tokens >= usable(len(prompt), DRAFT_BLOCK))

    with serving(server), RouterProcess((), *options) as router:
        for prompt in branching_prompts(NUM_BRANCHES):
            body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            request = urllib.request.Request(
                f"{router.url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                predicted = int(answer.headers["x-flexcache-matched-tokens"])
                details = json.load(answer)["usage"]["prompt_tokens_details"] or {}
            outcomes[predicted - (details.get("cached_tokens") or 0)] += 1
            until(partial(has_told, prompt))
    print(f"{NUM_BRANCHES} branching prompts, predicted less actual tokens: {dict(outcomes)}")
    assert outcomes[0] >= 0.99 * NUM_BRANCHES
