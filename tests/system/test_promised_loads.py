"""Loads that a step counts on arrive, whatever becomes of the server or the weights."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from cluster import PATIENCE_S, Cluster, kill, running_cluster, until
from load import tokens_of
from test_kept_loads import NUM_BLOCKS, PROMPT, match_load
from test_shared import CONFIG, Member, members

from flexcache import CacheConfig
from flexcache.client.rank import ClientState
from flexcache.tasks.instructions import PromisedLoad


def promise_load(engine: Member) -> PromisedLoad:
    """Store a prompt, wipe it, and have its load promised."""
    promised = engine.manager.promise(match_load(engine))
    assert promised is not None
    return promised


def arrive(engine: Member, promised: PromisedLoad) -> None:
    """Run the step that counts on the load, and check every byte."""
    load = engine.client.load_promised(promised, range(NUM_BLOCKS))
    assert load.wait_all(PATIENCE_S)
    engine.load.compare(PROMPT, np.arange(NUM_BLOCKS))
    assert engine.load.seen.wrong == []


def goes_on(engine: Member) -> None:
    """End the step, and check that the engine finds a server again and uses it."""
    engine.manager.end_promises()
    engine.manager.wait_ready(PATIENCE_S)

    def is_used() -> bool:
        engine.load.put(PROMPT, NUM_BLOCKS)
        return engine.load.get(PROMPT, NUM_BLOCKS) == NUM_BLOCKS

    until(is_used)  # at first its rank may be about to leave, and to register again
    assert engine.load.seen.wrong == []
    until(lambda: engine.manager.stats()["tiers"]["CPU"]["leased"] == 0)


def kill_server(engine: Member) -> None:
    kill(engine.manager.stats()["server_pid"])
    until(lambda: not engine.manager.is_ready())


def end_server(engine: Member) -> None:
    os.kill(engine.manager.stats()["server_pid"], signal.SIGTERM)
    until(lambda: not engine.manager.is_ready())


def change_weights(engine: Member) -> None:
    engine.client.weights_changed("of the next epoch")
    until(lambda: engine.manager.weights_generation == 1)


def rename_weights(engine: Member) -> None:
    engine.manager.reset()


EVENTS: list[Callable[[Member], None]] = [kill_server, end_server, change_weights, rename_weights]


@pytest.mark.whole
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_promised_load_arrives(event: Callable[[Member], None]) -> None:
    engine = Member(CacheConfig(**CONFIG))
    with members(engine):
        promised = promise_load(engine)
        event(engine)
        assert not engine.manager.get_match(tokens_of(PROMPT, NUM_BLOCKS))[1].any()
        arrive(engine, promised)
        goes_on(engine)


def test_its_blocks_are_not_reused_by_a_server_that_was_wrongly_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Member(CacheConfig(**CONFIG, server_timeout_s=1.0))
    other = Member(CacheConfig(**CONFIG, server_timeout_s=PATIENCE_S), dp_rank=1)
    with members(engine, other):
        promised = promise_load(engine)
        pid = engine.manager.stats()["server_pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "rank_lost_server" in caplog.text and "engine_lost_server" in caplog.text)
        os.kill(pid, signal.SIGCONT)
        num_blocks = CONFIG["num_cpu_blocks"]
        for prompt in range(100, 100 + 4 * num_blocks // NUM_BLOCKS):
            other.load.put(prompt, NUM_BLOCKS)
        assert other.manager.stats()["tiers"]["CPU"]["evicted_blocks"] > num_blocks
        arrive(engine, promised)
        goes_on(engine)
        other.manager.check()


# -- the engine's own cache ----------------------------------------------------------------------

BLOCKS, TARGETS = [1, 2, 3, 4], [8, 9, 10, 11]
TOKENS = list(range(4 * 16))


def promise_local(cluster: Cluster) -> PromisedLoad:
    cluster.put(TOKENS, BLOCKS)
    task_id, mask = cluster.manager.get_match(TOKENS)
    assert mask.all()
    until(lambda: all(client.state is ClientState.SERVING for client in cluster.clients))
    found: list[PromisedLoad | None] = []
    until(lambda: found.append(cluster.manager.promise(task_id)) or found[-1])  # ranks offer last
    assert found[-1] is not None
    return found[-1]


def test_a_load_is_promised_and_cancelled_again() -> None:
    with running_cluster() as cluster:
        promised = promise_local(cluster)
        cluster.manager.cancel([promised.task_id])
        until(lambda: cluster.manager.try_wait([promised.task_id]))
        assert not cluster.clients[0].wait_ended(0.0)  # which no rank was to hear of
        cluster.manager.end_promises()
        cluster.manager.check()
        assert cluster.manager.stats()["tiers"]["CPU"]["leased"] == 0


def test_part_of_a_promised_load_may_be_wanted() -> None:
    with running_cluster() as cluster:
        expected = cluster.read(BLOCKS[:3])
        promised = promise_local(cluster)
        cluster.wipe(TARGETS)
        load = cluster.clients[0].load_promised(promised, TARGETS[:3])
        assert load.wait_all(PATIENCE_S)
        assert cluster.read(TARGETS[:3]) == expected
        cluster.manager.end_promises()
        until(lambda: cluster.manager.stats()["tiers"]["CPU"]["leased"] == 0)


def test_a_rank_that_thinks_its_server_is_gone_keeps_its_promise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when the process is stopped for a while: to the rank its server was silent."""
    with running_cluster(server_timeout_s=1.0) as cluster:
        expected = cluster.read(BLOCKS)
        promised = promise_local(cluster)
        cluster.wipe(TARGETS)
        with cluster.server.lock:
            until(lambda: "rank_lost_server" in caplog.text)
        load = cluster.clients[0].load_promised(promised, TARGETS)
        assert load.wait_all(PATIENCE_S)
        assert cluster.read(TARGETS) == expected
        cluster.manager.end_promises()
        cluster.manager.wait_ready(PATIENCE_S)
        until(lambda: cluster.manager.stats()["tiers"]["CPU"]["leased"] == 0)


def test_a_rank_whose_thread_fails_keeps_its_promise_and_makes_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster() as cluster:
        expected = cluster.read(BLOCKS)
        promised, [client] = promise_local(cluster), cluster.clients
        other, _ = cluster.manager.get_match(TOKENS)
        cluster.wipe(TARGETS)

        def fail() -> None:
            raise RuntimeError("a message that makes no sense")

        monkeypatch.setattr(client._ops, "take_given", fail)
        client._ops.wake()
        until(lambda: "rank_failed" in caplog.text)
        until(lambda: cluster.manager.promise(other) is None)
        load = client.load_promised(promised, TARGETS)
        assert load.wait_all(PATIENCE_S)
        assert cluster.read(TARGETS) == expected
        cluster.manager.end_promises()
        until(lambda: client.state is ClientState.REFUSED)
        until(lambda: cluster.manager.stats()["tiers"]["CPU"]["leased"] == 0)


def test_a_closed_rank_waits_for_no_step() -> None:
    with running_cluster() as cluster:
        promised = promise_local(cluster)
        closing = threading.Thread(target=cluster.clients[0].close)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        load = cluster.clients[0].load_promised(promised, TARGETS)
        assert not load.wait_all(0.0)
