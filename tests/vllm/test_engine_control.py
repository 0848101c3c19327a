"""What a vLLM engine has cached is looked up, pinned and deleted, by the tokens of its prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_server import ApiServer, call, serving
from control_calls import ControlCalls
from engines import FLEXCACHE, Engine, make_prompt
from make_models import make_model
from make_tokenizers import make_tokenizer
from paths import MODELS
from ports import free_port
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from flexcache.cache.block_keys import hash_as_engine
from flexcache.config.model import EngineKeys

BLOCK = 32
SIZE = 200
CACHED = SIZE // BLOCK * BLOCK


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_keys_are_those_of_vllm(algorithm: Any) -> None:
    make_hash = get_hash_fn_by_name(algorithm)
    root = make_hash("seed")
    tokens = np.random.default_rng(1).integers(0, 200_000, 100).tolist()
    expected = [root]
    for start in range(0, 96, 16):
        part = tokens[start : start + 16]
        expected.append(kv_cache_utils.hash_block_tokens(make_hash, expected[-1], part))
    how = EngineKeys(algorithm, 16, ("vllm", algorithm), root)
    assert hash_as_engine(tokens, how, 16) == expected[1:]
    assert hash_as_engine(tokens, how, 32) == expected[2::2]


@pytest.mark.runners
def test_a_prompt_is_looked_up_pinned_and_deleted_in_process(engine: Engine) -> None:
    calls, first, second = (
        ControlCalls(engine.manager),
        make_prompt(SIZE, 801),
        make_prompt(SIZE, 802),
    )
    for prompt in (first, second):
        engine.generate(prompt, max_tokens=2)
    engine.settle()
    assert calls.lookup(first) == {"CPU": CACHED, "SSD": CACHED}
    assert calls.lookup([*first[:100], *second[100:]]) == {"CPU": 96, "SSD": 96}
    pin = calls.pin(first, ttl_s=600)
    assert pin is not None
    assert pin.num_tokens == CACHED
    engine.manager.clear("SSD")
    assert engine.manager.stats()["tiers"]["CPU"]["pinned"] == CACHED // BLOCK
    assert calls.unpin(pin.id)
    engine.forget_gpu()
    assert engine.generate(first, max_tokens=2).num_cached_tokens == CACHED
    assert calls.delete(first)["CPU"] == CACHED // BLOCK
    assert calls.lookup(first)["CPU"] == 0
    assert calls.lookup(second)["CPU"] == CACHED
    engine.forget_gpu()
    assert engine.generate(first, max_tokens=2).num_cached_tokens == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, int, Path]]:
    """An engine at a cache server with room for a few prompts, its HTTP port and a tokenizer."""
    make_model(MODELS, "tiny")
    directory = tmp_path_factory.mktemp("served")
    tokenizer, port = make_tokenizer(directory, "chatml"), free_port()
    shared = {"FLEXCACHE_ENDPOINT": f"ipc://{directory}/cache.sock"}
    sizes = {"FLEXCACHE_NUM_CPU_BLOCKS": "64", "FLEXCACHE_HTTP_ENDPOINT": str(port)}
    cache = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server"],
        env={**os.environ, **shared, **sizes},
        stdout=(directory / "cache.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    options = ["--tokenizer", str(tokenizer), "--max-model-len", "2048"]
    server = ApiServer(directory / "log", shared, options, transfer=FLEXCACHE)
    try:
        with serving(server):
            yield server, port, tokenizer
    finally:
        cache.kill()
        cache.wait()


def flood(server: ApiServer, first: int) -> None:
    """Store more prompts than DRAM has room for."""
    for seed in range(first, first + 12):
        server.complete(make_prompt(SIZE, seed))


@pytest.mark.whole
def test_a_prompt_is_looked_up_pinned_and_deleted_by_command(
    served: tuple[ApiServer, int, Path],
) -> None:
    server, port, _ = served
    calls = ControlCalls(None, port)
    prompt = make_prompt(SIZE, 811)
    server.complete(prompt)
    server.complete(make_prompt(40, 899))  # its steps end the put
    assert calls.lookup(prompt) == {"CPU": CACHED}
    pin = calls.pin(prompt, ttl_s=600)
    assert pin is not None
    flood(server, 820)
    assert calls.lookup(prompt) == {"CPU": CACHED}
    assert calls.lookup(make_prompt(SIZE, 820)) == {"CPU": 0}
    assert calls.unpin(pin.id)
    assert calls.delete(prompt)["CPU"] == CACHED // BLOCK
    assert calls.lookup(prompt) == {"CPU": 0}


@pytest.mark.whole
def test_a_prompt_with_a_marker_stays_and_its_usage_is_the_engines(
    served: tuple[ApiServer, int, Path],
) -> None:
    """The router has shorter lives for a pin than five minutes and an hour."""
    from router_process import RouterProcess, until

    server, port, tokenizer = served
    lives = {"tokens.body._TTLS": {"5m": 20, "1h": 600}}
    text = "the cache has a block of the text " * 20

    calls = ControlCalls(None, port)

    def pinned() -> int:
        return int(call(f"http://127.0.0.1:{port}/status")["tiers"]["CPU"]["pinned"])

    with RouterProcess(
        (), f"--worker={server.url}", f"--tokenizer={tokenizer}", constants=lives
    ) as router:
        until(lambda: set(router.states().values()) == {"up"})
        marker = {"type": "ephemeral", "ttl": "5m"}
        part = {"type": "text", "text": text, "cache_control": marker}
        body = {
            "model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [part]}],
        }  # fmt: skip
        tokens = call(f"{server.url}/tokenize", {**body, "add_generation_prompt": True})["tokens"]
        cold = call(f"{router.url}/v1/messages", body)["usage"]
        server.complete(make_prompt(40, 898))
        until(lambda: pinned() == len(tokens) // BLOCK)
        flood(server, 840)
        assert calls.lookup(tokens)["CPU"] == len(tokens) // BLOCK * BLOCK
        ours = call(f"{router.url}/v1/messages", body)["usage"]
        theirs = call(f"{server.url}/v1/messages", body)["usage"]
        until(lambda: pinned() == 0)  # its time is over
        flood(server, 852)
        until(lambda: calls.lookup(tokens)["CPU"] == 0)
    assert cold["cache_read_input_tokens"] == 0
    assert cold["input_tokens"] + cold["cache_creation_input_tokens"] == len(tokens)
    assert ours == theirs
    assert ours["cache_read_input_tokens"] == (len(tokens) - 1) // BLOCK * BLOCK
