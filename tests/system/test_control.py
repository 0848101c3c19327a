"""Calls about what is cached: in process, at a shared server, by HTTP and by command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster
from ports import free_port
from typer.testing import CliRunner

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

    def lookup(self, tokens: np.ndarray, **names: Any) -> dict[str, int]:
        if self._way != "command":
            return self.cluster.manager.lookup(tokens, **names)
        found: dict[str, int] = self._command("lookup", tokens)["tokens"]
        return found

    def _command(self, call: str, tokens: np.ndarray) -> Any:
        arguments = ["cache", call, "--json", "--endpoint", self._port, "--tokens", "-"]
        done = CliRunner().invoke(app, arguments, input=json.dumps(tokens.tolist()))
        assert done.exit_code == 0, done.output
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
        with pytest.raises(ValueError, match="token_ids or block_keys"):
            manager.lookup()
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
        assert "give either token_ids or block_keys" in output("--endpoint", f"127.0.0.1:{port}")
