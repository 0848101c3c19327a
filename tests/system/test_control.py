"""Calls about what is cached: in process, at a shared server, by HTTP and by command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster, until
from ports import free_port
from typer.testing import CliRunner

from flexcache import Pin
from flexcache.cli import app
from flexcache.protocol.endpoints import private_endpoint

SIZE = 16
NUM_BLOCKS = 8


NO_ENDPOINT = {"FLEXCACHE_HTTP_ENDPOINT": "", "FLEXCACHE_HTTP_TOKEN": ""}


def tokens_of(prompt: int) -> np.ndarray:
    return np.arange(NUM_BLOCKS * SIZE) + 10_000 * prompt


class Caller:
    """A cluster whose cache is called in one of the ways that there are."""

    def __init__(self, cluster: Cluster, way: str, port: int) -> None:
        self.cluster = cluster
        self._way = way
        self._port = str(port)

    def lookup(self, tokens: np.ndarray) -> dict[str, int]:
        if self._way != "command":
            return self.cluster.manager.lookup(tokens)
        found: dict[str, int] = self._command("lookup", tokens=tokens)["tokens"]
        return found

    def pin(self, tokens: np.ndarray | None = None, **options: Any) -> Pin | None:
        if self._way != "command":
            return self.cluster.manager.pin(tokens, **options)
        given = ["--ttl", str(options["ttl_s"])]
        given += ["--session", options["session_id"]] if "session_id" in options else []
        pinned = self._command("pin", *given, tokens=tokens)["pin"]
        return None if pinned is None else Pin(**pinned)

    def unpin(self, pin_id: str) -> bool:
        if self._way != "command":
            return self.cluster.manager.unpin(pin_id)
        return bool(self._command("unpin", pin_id)["unpinned"])

    def _command(self, call: str, *options: str, tokens: np.ndarray | None = None) -> Any:
        arguments = ["cache", call, "--json", "--endpoint", self._port, *options]
        text = ""
        if tokens is not None:
            arguments += ["--tokens", "-"]
            text = json.dumps(tokens.tolist())
        done = CliRunner().invoke(app, arguments, input=text)
        assert done.exit_code in (0, 2), done.output
        return json.loads(done.stdout)


@pytest.fixture(params=["in process", "at a server", "command"])
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    """A command goes by HTTP."""
    port = free_port()
    settings: dict[str, Any] = {"num_cpu_blocks": 3 * NUM_BLOCKS}
    if request.param == "at a server":
        settings["endpoint"] = private_endpoint()
    elif request.param == "command":
        settings["http_endpoint"] = str(port)
    with running_cluster([tmp_path], **settings) as cluster:
        yield Caller(cluster, request.param, port)


def test_a_look_up_tells_what_each_tier_could_supply(caller: Caller) -> None:
    cluster = caller.cluster
    cluster.put(tokens_of(0), range(NUM_BLOCKS))
    cluster.manager.clear("CPU")
    cluster.put(tokens_of(0), range(3))
    before = cluster.manager.stats()["tiers"]
    longer = np.concatenate((tokens_of(0), [7] * 40))
    assert caller.lookup(longer) == {"CPU": 3 * SIZE, "SSD": NUM_BLOCKS * SIZE}
    assert caller.lookup(longer[: 5 * SIZE - 1]) == {"CPU": 3 * SIZE, "SSD": 4 * SIZE}
    assert caller.lookup(tokens_of(1)) == {"CPU": 0, "SSD": 0}
    assert caller.lookup(tokens_of(0)[:3]) == {"CPU": 0, "SSD": 0}
    after = cluster.manager.stats()
    assert after["tiers"] == before
    assert after["control"]["calls"] == {"lookup": 4}


def test_a_pin_holds_until_it_ends(caller: Caller) -> None:
    """DRAM has room for three prompts, half of it for pins."""
    cluster = caller.cluster
    assert caller.pin(tokens_of(0), ttl_s=60) is None, "nothing is cached"
    for number in range(3):
        cluster.put(tokens_of(number), range(NUM_BLOCKS))
    before = time.time()
    pin = caller.pin(tokens_of(0), ttl_s=600)
    assert pin is not None
    assert pin.num_tokens == NUM_BLOCKS * SIZE
    assert before + 600 <= pin.expires_at <= time.time() + 600
    for number in range(3, 9):
        cluster.put(tokens_of(number), range(NUM_BLOCKS))
    assert caller.lookup(tokens_of(0))["CPU"] == NUM_BLOCKS * SIZE
    assert caller.lookup(tokens_of(1))["CPU"] == 0
    shorter = caller.pin(tokens_of(0), ttl_s=1)
    assert shorter is not None
    assert (shorter.id, shorter.num_tokens) == (pin.id, pin.num_tokens)
    assert shorter.expires_at == pytest.approx(pin.expires_at)
    assert caller.unpin(pin.id)
    assert not caller.unpin(pin.id)
    for number in range(9, 12):
        cluster.put(tokens_of(number), range(NUM_BLOCKS))
    assert caller.lookup(tokens_of(0))["CPU"] == 0
    assert caller.pin(tokens_of(11), ttl_s=0.01) is not None
    until(lambda: cluster.manager.stats()["control"]["ended_pins"].get("expired") == 1)
    control = cluster.manager.stats()["control"]
    assert control["ended_pins"] == {"unpinned": 1, "expired": 1}
    assert control["refused_pins"] == {"not_cached": 1}
    assert cluster.manager.stats()["tiers"]["CPU"]["pinned"] == 0


def test_a_session_is_pinned_by_its_name(caller: Caller) -> None:
    cluster = caller.cluster
    tokens = tokens_of(0)
    for count in (3, NUM_BLOCKS):
        slots = cluster.slots(range(count))
        task, _ = cluster.manager.put_async(tokens[: count * SIZE], slots, session_id="a")
        cluster.manager.wait([task], WAIT_S, completely=True)
    pin = caller.pin(session_id="a", ttl_s=600)
    assert pin is not None
    assert pin.num_tokens == NUM_BLOCKS * SIZE
    assert caller.pin(session_id="b", ttl_s=600) is None
    assert cluster.manager.new_weights("other") == "other"
    assert not caller.unpin(pin.id)
    assert cluster.manager.stats()["control"]["ended_pins"] == {"weights": 1}


def test_engine_keys_and_namespaces_name_a_prompt_too() -> None:
    keys = [bytes([i]) * 16 for i in range(1, 5)]
    with running_cluster() as cluster:
        manager = cluster.manager
        tokens = tokens_of(0)[: 4 * SIZE]
        named: dict[str, Any] = {"namespace": ("tenant", "salt"), "block_keys": keys}
        task, _ = manager.put_async(tokens, cluster.slots(range(4)), **named)
        manager.wait([task], WAIT_S)
        assert manager.lookup(**named) == {"CPU": 4 * SIZE}
        assert manager.lookup(tokens[:33], **named) == {"CPU": 2 * SIZE}
        assert manager.lookup(tokens) == manager.lookup(block_keys=keys) == {"CPU": 0}
        manager.new_weights("other")
        assert manager.lookup(**named) == {"CPU": 0}
        for call in (manager.lookup, partial(manager.pin, ttl_s=1.0)):
            with pytest.raises(ValueError, match="token_ids or block_keys"):
                call()
        with pytest.raises(ValueError, match="ttl_s"):
            manager.pin(tokens, ttl_s=-1.0)
        with pytest.raises(ValueError, match="array of integers"):
            manager.lookup([0.5])  # type: ignore[list-item]


def test_a_command_says_what_is_wrong(tmp_path: Path) -> None:
    def output(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["cache", "lookup", *arguments], env=NO_ENDPOINT)
        assert done.exit_code == 1
        return done.output

    port = free_port()
    assert "--endpoint" in output()
    assert "does not answer" in output("--endpoint", str(port))
    assert "cannot be read" in output("--endpoint", str(port), "--tokens", str(tmp_path / "none"))
    (tmp_path / "words").write_text("three words here")
    assert "invalid literal" in output("--endpoint", "1", "--tokens", str(tmp_path / "words"))
    with running_cluster(http_endpoint=str(port)):
        assert "token_ids or block_keys" in output("--endpoint", f"127.0.0.1:{port}")
