"""Hints about users' sessions, from the call to what is evicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import WAIT_S, Cluster, running_cluster, until

from flexcache.protocol.endpoints import private_endpoint

NUM_BLOCKS = 8
BLOCKS = range(NUM_BLOCKS)


def tokens_of(prompt: int) -> np.ndarray:
    return np.arange(NUM_BLOCKS * 16) + 10_000 * prompt


def ask(cluster: Cluster, session_id: str, prompt: int) -> int:
    """Get a prompt and store it; return how many tokens were found."""
    tokens = tokens_of(prompt)
    found, mask = cluster.manager.get_async(tokens, cluster.slots(BLOCKS), session_id=session_id)
    stored, _ = cluster.manager.put_async(tokens, cluster.slots(BLOCKS), session_id=session_id)
    cluster.manager.wait([found, stored], WAIT_S, completely=True)
    return int(mask.sum())


@pytest.fixture(params=["in this process", "at a server"])
def cluster(request: pytest.FixtureRequest) -> Cluster:  # type: ignore[misc]
    """Room for three prompts."""
    settings = {"num_cpu_blocks": 3 * NUM_BLOCKS}
    if request.param == "at a server":
        settings["endpoint"] = private_endpoint()  # type: ignore[assignment]
    with running_cluster(**settings) as cluster:  # type: ignore[arg-type]
        yield cluster


def test_a_session_that_is_over_makes_room_for_those_that_go_on(cluster: Cluster) -> None:
    manager = cluster.manager
    for prompt, session_id in enumerate(("first", "second", "third")):
        assert ask(cluster, session_id, prompt) == 0
    manager.session_hint("third", over=True)
    manager.session_hint("unheard of", over=True)
    assert ask(cluster, "fourth", 3) == 0
    assert ask(cluster, "first", 0) == NUM_BLOCKS * 16, "older, and not over"
    assert ask(cluster, "third", 2) == 0
    sessions = manager.stats()["sessions"]
    assert sessions == {
        "known": 4, "over": 2, "returning": 0, "unknown": 1, "retired_blocks": NUM_BLOCKS,
        "kept_blocks": 0, "fetched_blocks": 0, "returned_sessions": 1,
    }  # fmt: skip


def test_a_session_that_returns_soon_is_kept(cluster: Cluster) -> None:
    manager = cluster.manager
    for prompt, session_id in enumerate(("first", "second", "third")):
        ask(cluster, session_id, prompt)
    manager.session_hint("first", returns_in_s=3600)
    for prompt in range(3, 8):
        ask(cluster, "others", prompt)
    assert ask(cluster, "first", 0) == NUM_BLOCKS * 16


@pytest.mark.whole
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_a_session_needs_is_in_dram_when_it_returns(tmp_path: Path, is_shared: bool) -> None:
    settings = {"endpoint": private_endpoint()} if is_shared else {}
    with running_cluster([tmp_path], **settings) as cluster:  # type: ignore[arg-type]
        manager = cluster.manager
        ask(cluster, "a", 0)
        manager.clear("CPU")
        manager.session_hint("a", returns_in_s=3.5)  # half a second before it is fetched
        until(lambda: manager.stats()["early_loads"]["open_blocks"] == NUM_BLOCKS)
        until(lambda: manager.stats()["tiers"]["CPU"]["indexed"] == NUM_BLOCKS)
        assert ask(cluster, "a", 0) == NUM_BLOCKS * 16
        stats = manager.stats()
    assert stats["sessions"]["fetched_blocks"] == NUM_BLOCKS
    assert stats["early_loads"]["early"] == NUM_BLOCKS
    assert stats["engine"]["hit_blocks"] == {"CPU": NUM_BLOCKS}


def test_wrong_hints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    with running_cluster([tmp_path]) as cluster:
        ask(cluster, "a", 0)
        before = cluster.manager.stats()["sessions"]
        with pytest.raises(ValueError, match="session_id"):
            cluster.manager.session_hint("", over=True)
        with pytest.raises(ValueError, match="returns_in_s"):
            cluster.manager.session_hint("a", returns_in_s=-1)
        with pytest.raises(ValueError, match="either over"):
            cluster.manager.session_hint("a")
        with pytest.raises(ValueError, match="either over"):
            cluster.manager.session_hint("a", over=True, returns_in_s=3)
        with pytest.raises(ValueError, match="number of seconds"):
            cluster.manager.session_hint("a", returns_in_s="20")  # type: ignore[arg-type]
        for session_id, why in (("x" * 300, "session_id"), ("\ud800", "surrogate")):
            with pytest.raises(ValueError, match=why):
                cluster.manager.get_match(tokens_of(0), session_id=session_id)
        assert cluster.manager.stats()["sessions"] == before
