"""Other routers take our events: each prompt goes to the cache that holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, running_cluster
from router_peers import (
    PEERS,
    Peer,
    count_right,
    hold,
    make_prompt,
    peer_python,
    publish_gpu,
    see_all,
    source_of,
    source_of_cache,
)

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import Event, encode_batch
from flexcache.router.fleet import EventSource

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture(params=PEERS)
def start(request: pytest.FixtureRequest) -> Callable[[list[EventSource]], Peer]:
    """Starts a peer."""
    directory, peer = PEERS[request.param]
    python = peer_python(directory)
    if python is None:
        pytest.skip(f"ROUTER_PEERS_DIR has no environment {directory!r}")
    return lambda sources: peer(python, sources)


@contextmanager
def caches(directory: Path) -> Iterator[tuple[list[Cluster], list[EventSource]]]:
    settings: dict[str, Any] = {
        "kv_events_endpoint": ANY_PORT,
        "kv_events_replay_endpoint": ANY_PORT,
        "kv_events_topic": "",
    }
    with ExitStack() as stack:
        clusters = []
        for name in "ab":
            (directory / name).mkdir()
            clusters.append(stack.enter_context(running_cluster([directory / name], **settings)))
        yield (
            clusters,
            [source_of_cache(cluster) for cluster in clusters],
        )


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_prompts_go_to_the_cache_that_holds_them(
    start: Callable[[list[EventSource]], Peer], medium: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    with caches(tmp_path) as (clusters, sources):
        early, late = ([make_prompt(rng) for _ in clusters] for _ in range(2))
        for cluster, prompt in zip(clusters, early, strict=True):
            hold(cluster, prompt, medium)
        peer = start(sources)
        try:
            for cluster, prompt in zip(clusters, late, strict=True):
                hold(cluster, prompt, medium)

            def put_more() -> None:
                for cluster in clusters:
                    cluster.put(np.array(make_prompt(rng)), range(1))

            for prompts in (late, early):  # the early ones come by replay
                see_all(peer, prompts, put_more)
                assert count_right(peer, prompts, 20) == 40
        finally:
            peer.close()


def test_prompts_go_to_the_engine_that_holds_them_on_its_gpu(
    start: Callable[[list[EventSource]], Peer],
) -> None:
    rng = np.random.default_rng(6)
    publishers = [
        BatchPublisher[Event](
            Address(ANY_PORT, ANY_PORT, ""), encode_batch, num_kept=100, num_queued=100
        )
        for _ in range(2)
    ]
    for publisher in publishers:
        publisher.start()
    try:
        peer = start([source_of(publisher) for publisher in publishers])
        try:
            prompts = [make_prompt(rng) for _ in publishers]
            for number, (publisher, prompt) in enumerate(zip(publishers, prompts, strict=True)):
                publish_gpu(publisher, prompt, number)
            others = itertools.count(len(prompts))

            def publish_more() -> None:
                for publisher in publishers:
                    publish_gpu(publisher, make_prompt(rng), next(others))

            see_all(peer, prompts, publish_more)
            assert count_right(peer, prompts, 20) == 40
        finally:
            peer.close()
    finally:
        for publisher in publishers:
            publisher.close()
