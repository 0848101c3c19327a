"""Weights that change while an engine runs: what it stores and finds is named by those in use."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PATIENCE_S, until
from ports import free_port
from weighted_engine import TOKENS_PER_BLOCK, WeightedEngine, slots, tokens_of

from flexcache import CacheConfig, KVStatus
from flexcache.client.transport import LocalTransport
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.outbox import withdraw_lines
from flexcache.server.server import KVServer

SIZES = {"num_cpu_blocks": 64, "tokens_per_block": TOKENS_PER_BLOCK}
BLOCKS = [0, 1, 2, 3]


@contextlib.contextmanager
def serving(has_lines: bool = False, **settings: object) -> Iterator[KVServer]:
    """A server in this process; ranks reach it by sockets, unless it ``has_lines``."""
    config = CacheConfig(**{**SIZES, **settings})  # type: ignore[arg-type]
    server = KVServer(config, private_endpoint("weights"))
    server.start()
    if not has_lines:
        withdraw_lines(server.endpoint, server)
    try:
        yield server
    finally:
        server.shutdown()


@contextlib.contextmanager
def at(server: KVServer, name: str, **settings: object) -> Iterator[WeightedEngine]:
    config = CacheConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        endpoint=server.endpoint,
        **settings,  # type: ignore[arg-type]
    )
    engine = WeightedEngine(config, name)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["socket", "line", "in process"])
def engine(request: pytest.FixtureRequest) -> Iterator[WeightedEngine]:
    """An engine whose ranks reach their server in each of the ways that there are."""
    if request.param == "in process":
        own = WeightedEngine(CacheConfig(**SIZES), "own")  # type: ignore[arg-type]
        own.wait_ready()
        yield own
        own.manager.check()
        own.close()
        return
    with serving(has_lines=request.param == "line") as server, at(server, "one") as one:
        yield one
        one.manager.check()


def test_what_other_weights_have_stored_is_not_found(engine: WeightedEngine) -> None:
    engine.put("abcd")
    assert engine.get("abcd") == 4
    engine.update("tuned")
    assert engine.get("abcd") == 0
    until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
    assert engine.get("abcd") == 4


def test_a_version_that_returns_is_found_again(engine: WeightedEngine) -> None:
    for version in ("one", "two", "one"):
        engine.update(f"weights {version}", version)
        prompt = "abcd" if version == "one" else "abxy"
        until(lambda: engine.put(prompt)[1].status is KVStatus.SUCCESS or engine.get(prompt) == 4)  # noqa: B023
        assert engine.get("abcd") == (4 if version == "one" else 2)


def test_a_version_given_to_the_manager_names_the_weights(engine: WeightedEngine) -> None:
    engine.put("abcd")
    assert engine.manager.new_weights("step-1") == "step-1"
    engine.weights = "step-1"
    assert engine.get("abcd") == 0
    engine.put("abcd")
    assert engine.get("abcd") == 4
    first, second = engine.manager.new_weights(), engine.manager.new_weights()
    assert first != second
    engine.weights = second
    assert engine.get("abcd") == 0
    engine.manager.new_weights("step-1")
    engine.weights = "step-1"
    assert engine.get("abcd") == 4


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_version_given_before_the_start_names_the_weights(is_shared: bool) -> None:
    with serving() as server:
        endpoint = server.endpoint if is_shared else None
        config = CacheConfig(**{**SIZES, "endpoint": endpoint})  # type: ignore[arg-type]
        engine = WeightedEngine(config, "one", version="step-1")
        engine.wait_ready()
        engine.put("abcd")
        assert engine.get("abcd") == 4
        engine.manager.new_weights("step-2")
        engine.weights = "step-2"
        assert engine.get("abcd") == 0
        engine.manager.new_weights("step-1")
        engine.weights = "base"
        assert engine.get("abcd") == 4
        engine.close()


def test_a_version_given_again_changes_nothing(engine: WeightedEngine) -> None:
    engine.manager.new_weights("step-1")
    engine.weights = "step-1"
    begun = engine.manager.weights_generation
    assert engine.manager.new_weights("step-1") == "step-1"
    assert engine.put("abcd", weights=begun)[1].status is KVStatus.SUCCESS
    assert engine.get("abcd") == 4


def test_a_name_that_one_rank_gives_stands(engine: WeightedEngine) -> None:
    engine.clients[0].weights_changed("step-9")
    engine.clients[1].weights_changed()
    engine.weights = "step-9"
    until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
    engine.update("other")
    for client in reversed(engine.clients):  # in another order
        client.weights_changed("step-9" if client is engine.clients[0] else None)
    engine.weights = "step-9"
    until(lambda: engine.get("abcd") == 4)


@pytest.mark.parametrize("is_put", [False, True])
def test_an_op_that_waits_for_its_gate_is_lost(engine: WeightedEngine, is_put: bool) -> None:
    engine.update("tuned", "v1")
    until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
    manager, prompt = engine.manager, "abxy" if is_put else "abcd"
    match = manager.put_match if is_put else manager.get_match
    engine.compute(prompt, BLOCKS)
    task_id, mask = match(tokens_of(prompt))
    wanted = slots(BLOCKS)[mask]
    manager.launch([task_id], [wanted], gated=True)
    engine.update("other", "v2")
    engine.compute(prompt, BLOCKS)
    before = engine.snapshot()
    for client in engine.clients:
        client.open_gates([task_id])
    answer = manager.wait([task_id], PATIENCE_S, completely=True)[task_id]
    assert not answer.mask.any()
    for client in engine.clients:
        assert client.wait_ended(PATIENCE_S, [task_id])
        assert client.take_ended([task_id]) == {task_id: 0}
    assert engine.snapshot() == before
    engine.update("tuned", "v1")
    until(lambda: engine.get("abcd") == 4)
    assert engine.get("abxy") == 2


def test_a_load_that_has_come_and_was_not_taken_is_lost(engine: WeightedEngine) -> None:
    engine.put("abcd")
    task_id, mask = engine.manager.get_match(tokens_of("abcd"))
    assert mask.all()
    engine.manager.launch([task_id], [slots(BLOCKS)], gated=True)
    for client in engine.clients:
        client.open_gates([task_id])
    for client in engine.clients:
        assert client.wait_ended(PATIENCE_S, [task_id])
    engine.update("tuned")
    for client in engine.clients:
        assert client.take_ended([task_id]) == {task_id: 0}


def test_what_was_computed_across_a_change_is_not_stored(engine: WeightedEngine) -> None:
    began = engine.manager.weights_generation
    engine.update("tuned", "v2")
    until(lambda: engine.manager.weights_generation > began)
    mask, answer = engine.put("abcd", weights=began)
    assert not mask.any()
    assert answer.status is KVStatus.NOT_FOUND
    assert engine.get("abcd") == 0
    until(lambda: engine.put("abcd", weights=engine.manager.weights_generation)[0].any())
    assert engine.get("abcd") == 4


def test_bytes_do_not_move_any_more_when_it_returns(engine: WeightedEngine) -> None:
    """Loads that run meanwhile end before or not at all."""
    engine.put("abcdefgh")
    stop, seen = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            task_id, _ = engine.manager.get_async(tokens_of("abcdefgh"), slots(range(8, 16)))
            engine.manager.wait([task_id], PATIENCE_S)
            seen.append(task_id)

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: seen)
    engine.update("tuned")
    before = engine.snapshot()
    count = len(seen)
    until(lambda: len(seen) > count + 3)
    stop.set()
    thread.join()
    assert engine.snapshot() == before


@pytest.mark.parametrize("is_gated", [False, True])
def test_an_op_that_arrives_before_the_news_is_refused(is_gated: bool) -> None:
    """The server plans a load while it cannot hear that the weights have changed."""
    engine = WeightedEngine(CacheConfig(**SIZES), "own")  # type: ignore[arg-type]
    engine.wait_ready()
    engine.put("abcd")
    transport = engine.manager._transport
    assert isinstance(transport, LocalTransport)
    updates = [threading.Thread(target=client.weights_changed) for client in engine.clients]
    with transport.server.lock:
        for client, update in zip(engine.clients, updates, strict=True):
            update.start()
            until(lambda c=client: c._ops.weights == 1)  # type: ignore[misc]
        before = engine.snapshot()
        task_id, mask = engine.manager.get_match(tokens_of("abcd"))
        assert mask.all(), "it has not heard of it"
        engine.manager.launch([task_id], [slots([4, 5, 6, 7])], gated=is_gated)
        if is_gated:
            for client in engine.clients:
                client.open_gates([task_id])
    for update in updates:
        update.join()
    assert not engine.manager.wait([task_id], PATIENCE_S)[task_id].mask.any()
    assert engine.snapshot() == before
    engine.weights = "tuned"
    until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
    assert engine.get("abcd") == 4
    engine.close()


def test_weights_that_are_unknown_end_hits_and_stores(engine: WeightedEngine) -> None:
    engine.put("abcd")
    engine.clients[1].weights_unknown("the engine has loaded something")
    engine.clients[1].weights_unknown("again")
    engine.weights = "unknown"
    assert engine.get("abcd") == 0
    assert not engine.put("abcd")[0].any()
    engine.manager.new_weights("v3")
    assert engine.get("abcd") == 0
    assert not engine.put("abcd")[0].any()


def test_an_adapter_must_be_loaded_before_and_after(engine: WeightedEngine) -> None:
    engine.adapters = {"first"}
    engine.put("abcd", "first")
    assert engine.get("abcd", "first") == 4
    assert engine.get("abcd") == 0
    engine.adapters = {"second"}  # under the same name, say
    assert engine.get("abcd", "first") == 0
    assert engine.get("abcd", "second") == 0
    assert engine.put("abcd", "third")[1].status is KVStatus.FAILED
    engine.adapters = {"first"}
    assert engine.get("abcd", "first") == 4


def test_engines_of_other_versions_do_not_share_and_those_of_one_do() -> None:
    """A rolling update: the first has the new weights, the second not yet."""
    with serving() as server, at(server, "a") as a, at(server, "b") as b:
        a.put("abcd")
        assert b.get("abcd") == 4
        a.update("new", "v2")
        until(lambda: a.put("abcd")[1].status is KVStatus.SUCCESS)
        a.put("uvwx")
        assert b.get("uvwx") == 0
        assert b.get("abcd") == 4, "its own, which it still uses"
        b.update("new", "v2")
        until(lambda: b.get("uvwx") == 4)
        assert b.get("abcd") == 4


def test_a_configured_version_is_the_same_name() -> None:
    with (
        serving() as server,
        at(server, "a", model_version="v7") as a,
        at(server, "b") as b,
        at(server, "c") as c,
    ):
        a.put("abcd")
        assert b.get("abcd") == 0
        c.manager.new_weights("v7")
        assert c.get("abcd") == 4


@pytest.mark.parametrize("has_lines", [False, True])
def test_names_outlive_a_server(has_lines: bool, tmp_path: Path) -> None:
    settings = {"num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path)]}
    with contextlib.ExitStack() as stack:
        with serving(has_lines, **settings) as server:
            engine = stack.enter_context(at(server, "one"))
            engine.update("tuned")  # a name of its own
            until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
        engine.manager.new_weights("while it is away")
        engine.manager.new_weights("v5")
        engine.weights = "v5"
        with serving(has_lines, **settings):
            engine.wait_ready()
            assert engine.get("abcd") == 0
            engine.put("abcd")
            assert engine.get("abcd") == 4
        engine.update("again")  # noticed by the ranks only
        with serving(has_lines, **settings):
            engine.wait_ready()
            assert engine.get("abcd") == 0
            until(lambda: engine.put("abcd")[1].status is KVStatus.SUCCESS)
        with serving(has_lines, **settings):
            engine.wait_ready()
            until(lambda: engine.get("abcd") == 4)
            engine.manager.check()
            stack.close()


def test_recording_goes_on_after_resets_and_updates(tmp_path: Path) -> None:
    settings = {**SIZES, "num_ssd_blocks": 64, "ssd_cache_dirs": [str(tmp_path)]}

    def run() -> WeightedEngine:
        engine = WeightedEngine(CacheConfig(**settings), "own")  # type: ignore[arg-type]
        engine.wait_ready()
        return engine

    first = run()
    first.put("abcd")
    first.manager.reset()
    first.weights = "other"
    first.put("abcd")
    first.update("v2", "v2")
    first.put("abxy")
    assert first.get("abxy") == 4
    first.close()
    second = run()
    assert second.get("abcd") == 0, "it was there before the reset"
    second.manager.new_weights("v2")
    second.weights = "v2"
    assert second.get("abxy") == 4
    assert second.get("abcd") == 2
    second.close()


def test_a_shared_store_is_shared_after_a_reset(tmp_path: Path) -> None:
    settings = {**SIZES, "remote_url": f"file://{tmp_path}"}
    config = CacheConfig(**settings)  # type: ignore[arg-type]
    engines = [WeightedEngine(config, name) for name in ("a", "b")]
    for engine in engines:
        engine.wait_ready()
        until(lambda e=engine: e.manager.stats()["tiers"]["REMOTE"]["available"])
        engine.put("uvwx")
        engine.manager.reset()
        engine.update("v2", "v2")
    engines[0].put("abcd")
    assert engines[1].get("abcd") == 4
    assert engines[1].get("uvwx") == 0
    for engine in engines:
        engine.close()


def test_http_names_the_weights_of_one_engine() -> None:
    port = free_port()

    def post(**body: object) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/cache/weights", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    with serving(http_endpoint=f"127.0.0.1:{port}") as server:
        assert post(version="v1")[0] == 503
        with at(server, "a") as a:
            a.put("abcd")
            assert post(version="v1") == (200, {"version": "v1"})
            a.weights = "v1"
            assert a.get("abcd") == 0
            with at(server, "b") as b:
                assert post(version="v2")[0] == 409
                assert post(version="v2", client="c")[0] == 400
                assert post(version="", client="a/dp0")[0] == 400
                b.put("abcd")
                assert post(version="v2", client="a/dp0")[0] == 200
                a.weights = "v2"
                until(lambda: a.put("abcd")[1].status is KVStatus.SUCCESS)
                assert b.get("abcd") == 4
                assert post(version=None, client="b/dp0")[0] == 200
                b.weights = "random"
                assert b.get("abcd") == 0
