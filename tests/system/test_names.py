"""Engines with one name at one server: distinguished or disputed, never paired wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from cluster import as_bytes
from load import TOKENS_PER_BLOCK, make_kv, make_model, tokens_of
from paths import SUPPORT
from test_shared import serving, until

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient
from flexcache.errors import RegistrationError, ServerLostError
from flexcache.protocol.endpoints import private_endpoint

NUM_BLOCKS = 4
SLOTS = np.arange(NUM_BLOCKS * TOKENS_PER_BLOCK)
MINE, THEIRS = 0.5, 2.0

RIVAL = """
import sys
from flexcache import CacheConfig, KVManager, KVTPClient
from load import make_kv, make_model
endpoint, engine_id, content = sys.argv[1:]
manager = KVManager(make_model(), CacheConfig(endpoint=endpoint), engine_id=engine_id)
client = KVTPClient(manager.endpoint, engine_id=engine_id)
kv = make_kv(make_model())
for layer in kv.values():
    layer.fill_(float(content))
client.register_kv_caches(kv)
try:
    client.wait_registered(60)
    print("up", flush=True)
    sys.stdin.readline()
    manager.start()
    manager.wait_ready(10)
    print("ready", flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.read()
client.close()
manager.shutdown()
"""


class Engine:
    """An engine in this process, whose KV is one value throughout."""

    def __init__(self, endpoint: str, engine_id: str, content: float) -> None:
        config = CacheConfig(endpoint=endpoint)
        self.manager = KVManager(make_model(), config, engine_id=engine_id)
        self.kv = make_kv(make_model())
        self.fill(content)
        self.client = KVTPClient(self.manager.endpoint, engine_id=engine_id)

    def fill(self, content: float) -> None:
        for layer in self.kv.values():
            layer.fill_(content)

    def read(self) -> bytes:
        return b"".join(as_bytes(layer[:NUM_BLOCKS]) for layer in self.kv.values())

    def put(self, prompt: int) -> KVStatus:
        task_id, _ = self.manager.put_async(tokens_of(prompt, NUM_BLOCKS), SLOTS)
        return self.manager.wait([task_id], 30, completely=True)[task_id].status

    def get(self, prompt: int) -> KVStatus:
        task_id, _ = self.manager.get_async(tokens_of(prompt, NUM_BLOCKS), SLOTS)
        return self.manager.wait([task_id], 30)[task_id].status

    def close(self) -> None:
        self.client.close()
        self.manager.shutdown()


@contextmanager
def engine(endpoint: str, engine_id: str = "", content: float = 0.0) -> Iterator[Engine]:
    made = Engine(endpoint, engine_id, content)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def rival(endpoint: str, engine_id: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run another engine in its own process, with a registered rank."""
    process = subprocess.Popen(
        [sys.executable, "-c", RIVAL, endpoint, engine_id, str(THEIRS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=SUPPORT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Start a server by hand; return its endpoint."""
    made = private_endpoint("names")
    with serving("--endpoint", made, FLEXCACHE_NUM_CPU_BLOCKS="64") as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield made


def start_session(mine: Engine) -> None:
    mine.manager.start()
    until(lambda: has_session(mine))


def why_not_ready(mine: Engine) -> str:
    try:
        mine.manager.wait_ready(0)
    except (TimeoutError, RegistrationError) as error:
        return str(error)
    return ""


def has_session(mine: Engine) -> bool:
    with suppress(ServerLostError):
        return mine.manager.stats()["server"]["state"] == "serving"
    return False


@pytest.mark.whole
def test_engines_without_a_name_keep_their_ranks_apart(endpoint: str) -> None:
    with engine(endpoint, content=MINE) as mine, engine(endpoint) as third:
        start_session(mine)  # the first, so that there is a model for the rival's rank
        with rival(endpoint) as other:
            mine.client.register_kv_caches(mine.kv)
            mine.manager.wait_ready(60)
            assert other.stdin is not None and other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "ready\n"
            stored = mine.read()
            assert mine.put(1) is KVStatus.SUCCESS
            mine.fill(0)
            assert mine.get(1) is KVStatus.SUCCESS
            assert mine.read() == stored
            third.client.register_kv_caches(third.kv)
            third.manager.start()
            third.manager.wait_ready(60)
            assert third.get(1) is KVStatus.SUCCESS
            assert third.read() == stored


def test_a_rank_that_names_no_engine_is_refused_with_what_to_do(endpoint: str) -> None:
    with engine(endpoint) as mine:
        start_session(mine)
        stray = KVTPClient(endpoint)
        stray.register_kv_caches(mine.kv)
        with pytest.raises(RegistrationError, match=r"connect to the KVManager\.endpoint"):
            stray.wait_registered(60)
        stray.close()


@pytest.mark.whole
def test_a_name_that_two_engines_claim_moves_nothing_until_one_is_gone(endpoint: str) -> None:
    with engine(endpoint, "same", MINE) as mine, engine(endpoint, "third") as third:
        third.client.register_kv_caches(third.kv)
        third.manager.start()
        third.manager.wait_ready(60)
        start_session(mine)
        with rival(endpoint, "same") as other:
            mine.client.register_kv_caches(mine.kv)
            both = f"claimed by process {other.pid} and process {os.getpid()}.*engine_id"
            # The rank and the session learn of the dispute by messages of their own.
            until(lambda: mine.client.error and not mine.manager.is_ready())
            with pytest.raises(RegistrationError, match=both):
                mine.manager.wait_ready(60)
            assert mine.put(1) is KVStatus.NOT_FOUND
            assert third.get(1) is KVStatus.NOT_FOUND
            assert third.put(9) is KVStatus.SUCCESS  # an engine of another name goes on
            stored = mine.read()
            assert mine.get(9) is KVStatus.NOT_FOUND
            assert mine.read() == stored
            dropped = third.manager.stats()["dropped_blocks"]
            assert dropped == {"name_disputed": NUM_BLOCKS}

            assert other.stdin is not None and other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            told = other.stdout.readline()
            assert told.startswith(("TimeoutError", "RegistrationError"))
            assert f"claimed by process {os.getpid()} and process {other.pid}" in told
        # Nothing proves that the rank is not the rival's.
        until(lambda: "taken over" in why_not_ready(mine))
        mine.client.close()
        mine.client = KVTPClient(mine.manager.endpoint, engine_id="same")
        mine.client.register_kv_caches(mine.kv)
        until(mine.manager.is_ready)
        assert mine.put(1) is KVStatus.SUCCESS
        assert third.get(1) is KVStatus.SUCCESS
        assert third.read() == stored
