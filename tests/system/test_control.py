"""Calls about what is cached: in process, at a shared server, by HTTP and by command."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import WAIT_S, Cluster, running_cluster, until
from control_calls import ControlCalls
from ports import free_port
from tailed_engine import STATE_LIKE, STATES_ONLY, tailed_engine
from typer.testing import CliRunner

from flexcache import KVGroup, KVStatus, ModelConfig
from flexcache.cache.block_keys import hash_as_engine
from flexcache.cache.journal import Medium, Removed
from flexcache.cli import app
from flexcache.config.model import EngineKeys
from flexcache.protocol.endpoints import private_endpoint

SIZE = 16
NUM_BLOCKS = 8


NO_ENDPOINT = {"FLEXCACHE_HTTP_ENDPOINT": "", "FLEXCACHE_HTTP_TOKEN": ""}


def tokens_of(prompt: int) -> np.ndarray:
    return np.arange(NUM_BLOCKS * SIZE) + 10_000 * prompt


class Caller(ControlCalls):
    """Calls of a cluster's cache."""

    def __init__(self, cluster: Cluster, port: int | None) -> None:
        super().__init__(cluster.manager, port)
        self.cluster = cluster


WAYS = ["in process", "at a server", "command"]
"""A command goes by HTTP."""


@contextlib.contextmanager
def called(way: str, ssd_dir: Path, model: ModelConfig | None = None) -> Iterator[Caller]:
    port = free_port()
    settings: dict[str, Any] = {"num_cpu_blocks": 3 * NUM_BLOCKS}
    if way == "at a server":
        settings["endpoint"] = private_endpoint()
    elif way == "command":
        settings["http_endpoint"] = str(port)
    with running_cluster([ssd_dir], model=model, **settings) as cluster:
        yield Caller(cluster, port if way == "command" else None)


@pytest.fixture(params=WAYS)
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    with called(request.param, tmp_path) as caller:
        yield caller


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


def after_a_crash(ssd_dir: Path) -> Path:
    """Return a copy of the directory: what a restart finds if there is no orderly end."""
    copied = ssd_dir / "after a crash"
    copied.mkdir()
    for file in ssd_dir.iterdir():
        if file.is_file():
            shutil.copy(file, copied)
    return copied


def test_a_deleted_prompt_is_gone_for_good_and_what_others_share_is_not(
    caller: Caller, tmp_path: Path
) -> None:
    """Its copy is what a machine finds that loses its power right after the answer."""
    cluster = caller.cluster
    longer = np.concatenate((tokens_of(0), [7] * SIZE))
    other = np.concatenate((tokens_of(0)[: 3 * SIZE], [8] * SIZE))
    for tokens in (longer, other, tokens_of(1)):
        cluster.put(tokens, range(len(tokens) // SIZE))
    gone = {"CPU": NUM_BLOCKS + 1 - 3, "SSD": NUM_BLOCKS + 1 - 3}
    assert caller.delete(tokens_of(0)) == gone
    assert caller.delete(tokens_of(0)) == {"CPU": 0, "SSD": 0}
    copied = after_a_crash(tmp_path)
    there = {"CPU": 3 * SIZE, "SSD": 3 * SIZE}
    assert caller.lookup(longer) == there
    assert caller.lookup(other) == {"CPU": 4 * SIZE, "SSD": 4 * SIZE}
    assert cluster.get(tokens_of(0), range(NUM_BLOCKS)).mask.sum() == 3 * SIZE
    assert caller.lookup(tokens_of(1))["SSD"] == NUM_BLOCKS * SIZE
    assert cluster.manager.stats()["control"]["deleted_blocks"] == gone
    with running_cluster([copied], num_cpu_blocks=NUM_BLOCKS) as restarted:
        assert restarted.manager.lookup(longer)["SSD"] == 3 * SIZE
        assert restarted.manager.lookup(other)["SSD"] == 4 * SIZE
        assert restarted.manager.lookup(tokens_of(1))["SSD"] == NUM_BLOCKS * SIZE


def test_a_deleted_prompt_that_a_request_still_has_does_not_survive_a_crash(
    caller: Caller, tmp_path: Path
) -> None:
    cluster = caller.cluster
    for number in range(2):
        cluster.put(tokens_of(number), range(NUM_BLOCKS))
    cluster.manager.clear("CPU")
    matched, _ = cluster.manager.get_match(tokens_of(0))
    assert caller.delete(tokens_of(0))["SSD"] == NUM_BLOCKS
    copied = after_a_crash(tmp_path)
    cluster.wipe(range(NUM_BLOCKS))
    cluster.manager.launch([matched], [cluster.slots(range(NUM_BLOCKS))])
    answer = cluster.manager.wait([matched], WAIT_S)[matched]
    assert answer.status is KVStatus.SUCCESS, "it reads what it was promised"
    with running_cluster([copied], num_cpu_blocks=NUM_BLOCKS) as restarted:
        assert restarted.manager.lookup(tokens_of(0))["SSD"] == 0
        assert restarted.manager.lookup(tokens_of(1))["SSD"] == NUM_BLOCKS * SIZE


def test_sessions_and_namespaces_are_deleted_by_name(caller: Caller) -> None:
    cluster = caller.cluster
    slots = cluster.slots(range(NUM_BLOCKS))
    for number, named in enumerate(
        ({"session_id": "a"}, {"namespace": "team"}, {"namespace": ["team", "salt"]}, {})
    ):
        task, _ = cluster.manager.put_async(tokens_of(number), slots, **named)  # type: ignore[misc]
        cluster.manager.wait([task], WAIT_S, completely=True)
    assert caller.delete(session_id="a")["SSD"] == NUM_BLOCKS
    assert caller.delete(session_id="a")["SSD"] == 0
    assert caller.delete(namespace="team")["SSD"] == 2 * NUM_BLOCKS
    assert caller.lookup(tokens_of(0)) == {"CPU": 0, "SSD": 0}
    assert caller.lookup(tokens_of(3))["SSD"] == NUM_BLOCKS * SIZE


def test_a_delete_ends_no_task_and_what_was_still_written_is_not_found_after_it(
    tmp_path: Path,
) -> None:
    with running_cluster([tmp_path], num_cpu_blocks=80) as cluster:
        manager = cluster.manager
        slots = cluster.slots(range(NUM_BLOCKS))
        cluster.put(tokens_of(0), range(NUM_BLOCKS))
        reads, _ = manager.get_async(tokens_of(0), slots)
        writes, _ = manager.put_async(tokens_of(1), slots)
        for number in range(2):
            manager.delete(tokens_of(number))
        for answer in manager.wait([reads, writes], WAIT_S, completely=True).values():
            assert answer.status is KVStatus.SUCCESS
        assert manager.lookup(tokens_of(0)) == manager.lookup(tokens_of(1))
        assert manager.lookup(tokens_of(0)) == {"CPU": 0, "SSD": 0}
        until(lambda: cluster.num_leased() == 0)
    with running_cluster([tmp_path], num_cpu_blocks=80) as cluster:
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 0


def test_a_delete_removes_objects_and_is_told_as_an_event(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running_cluster(remote_url=f"file://{store}", kv_events=True) as cluster:
        manager = cluster.manager
        until(lambda: manager.stats()["tiers"]["REMOTE"]["available"])
        cluster.put(tokens_of(0), range(NUM_BLOCKS))
        assert manager.lookup(tokens_of(0))["REMOTE"] == NUM_BLOCKS * SIZE
        manager.take_changes()
        assert manager.delete(tokens_of(0)) == {"CPU": NUM_BLOCKS, "REMOTE": NUM_BLOCKS}
        removed = [change for change in manager.take_changes() if isinstance(change, Removed)]
        assert {change.medium for change in removed} == {Medium.CPU, Medium.STORAGE}
        assert sum(len(change.keys) for change in removed) == 2 * NUM_BLOCKS
        blocks = "v2/" + "?" * 32 + "/*/*"
        until(lambda: not list(store.rglob(blocks)))
        _, mask = manager.get_match(tokens_of(0))
        assert not mask.any()


@pytest.mark.parametrize("groups", [STATE_LIKE, STATES_ONLY], ids=["state", "states_only"])
def test_tails_are_looked_up_pinned_and_deleted_with_their_prompt(
    groups: tuple[KVGroup, ...], tmp_path: Path
) -> None:
    with tailed_engine(groups, num_ssd_blocks=64, ssd_cache_dirs=(str(tmp_path),)) as engine:
        manager, tokens = engine.manager, np.arange(128)
        engine.put(tokens, engine.tables(128))
        assert manager.lookup(np.arange(200)) == {"CPU": 128, "SSD": 128}
        assert manager.lookup(tokens) == {"CPU": 0, "SSD": 0}, "the last token is left"
        pin = manager.pin(tokens, ttl_s=60)
        assert pin is not None
        assert pin.num_tokens == 128
        assert manager.stats()["tiers"]["CPU"]["pinned"] > 0
        deleted = manager.delete(tokens)
        assert deleted["CPU"] == deleted["SSD"] > 0
        assert manager.lookup(np.arange(200)) == {"CPU": 0, "SSD": 0}
        assert not manager.unpin(pin.id)


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
        with pytest.raises(TypeError, match="session_id"):
            manager.lookup(tokens, session_id="a")  # type: ignore[call-arg]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_name_what_an_engine_with_keys_of_its_own_has_stored(
    way: str, tmp_path: Path
) -> None:
    how = EngineKeys("sglang", SIZE, ("sglang", "sha256"))
    model = ModelConfig("test", 3, 4, 32, torch.bfloat16, engine_keys=how)
    tokens = tokens_of(0)
    with called(way, tmp_path, model) as caller:
        manager, slots = caller.cluster.manager, caller.cluster.slots(range(NUM_BLOCKS))
        for namespace in (how.namespace, ("team", *how.namespace), ("team", "a", *how.namespace)):
            task, _ = manager.put_async(
                tokens, slots, namespace=namespace,
                block_keys=hash_as_engine(tokens.tolist(), how, SIZE),
            )  # fmt: skip
            manager.wait([task], WAIT_S, completely=True)
        assert caller.lookup(tokens)["CPU"] == NUM_BLOCKS * SIZE
        pin = caller.pin(tokens, ttl_s=60)
        assert pin is not None
        assert pin.num_tokens == NUM_BLOCKS * SIZE
        assert manager.lookup(tokens, namespace="team")["CPU"] == NUM_BLOCKS * SIZE
        assert manager.lookup(tokens, namespace="other")["CPU"] == 0
        assert caller.delete(tokens)["CPU"] == NUM_BLOCKS
        assert not caller.unpin(pin.id)
        assert manager.delete(namespace=["team", "a"])["CPU"] == NUM_BLOCKS
        assert manager.lookup(tokens, namespace="team")["CPU"] == NUM_BLOCKS * SIZE
        assert caller.delete(namespace="team")["CPU"] == NUM_BLOCKS
        assert manager.stats()["tiers"]["CPU"]["indexed"] == 0


def test_what_an_engine_with_another_hash_has_left_is_named_too() -> None:
    port = free_port()
    settings: dict[str, Any] = {
        "endpoint": private_endpoint(), "http_endpoint": str(port), "num_cpu_blocks": 3 * NUM_BLOCKS
    }  # fmt: skip
    models = [
        ModelConfig("test", 3, 4, 32, torch.bfloat16, engine_keys=EngineKeys(algorithm, SIZE, own))
        for algorithm, own in (("sglang", ("sglang", "sha256")), ("sha256", ("vllm", "sha256")))
    ]
    tokens = tokens_of(0)
    with running_cluster(model=models[0], **settings) as stays:
        calls = ControlCalls(stays.manager, port)
        with running_cluster(model=models[1], **settings) as leaves:
            how = models[1].engine_keys
            assert how is not None
            keys = hash_as_engine(tokens.tolist(), how, SIZE)
            slots, own = leaves.slots(range(NUM_BLOCKS)), ("team", *how.namespace, "part")
            for namespace in (how.namespace, own):
                task, _ = leaves.manager.put_async(
                    tokens, slots, namespace=namespace, block_keys=keys
                )
                leaves.manager.wait([task], WAIT_S, completely=True)
            assert leaves.manager.lookup(tokens, namespace=own)["CPU"] == NUM_BLOCKS * SIZE
        assert stays.manager.lookup(tokens)["CPU"] == 0, "it is about what it has stored itself"
        assert calls.lookup(tokens)["CPU"] == NUM_BLOCKS * SIZE
        pin = calls.pin(tokens, ttl_s=60)
        assert pin is not None
        assert calls.delete(tokens)["CPU"] == NUM_BLOCKS
        assert not calls.unpin(pin.id)


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
    for text, why in (
        ("{}", "list of tokens"),
        (" ,[]\n", "no numbers"),
        ('{"tokens": []}', "no num"),
    ):
        (tmp_path / "tokens").write_text(text)
        assert why in output("--endpoint", "1", "--tokens", str(tmp_path / "tokens"))
    with running_cluster(http_endpoint=str(port)):
        assert "token_ids or block_keys" in output("--endpoint", f"127.0.0.1:{port}")
        (tmp_path / "tokens").write_text(json.dumps({"count": 9, "tokens": [1, 2, 3]}))
        call = ["cache", "lookup", "--endpoint", str(port), "--tokens", str(tmp_path / "tokens")]
        assert CliRunner().invoke(app, call, env=NO_ENDPOINT).exit_code == 0
