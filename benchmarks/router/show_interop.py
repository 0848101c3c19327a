"""Shows whether other routers take our events: of 40 prompts, how many go to their holder.

    ROUTER_PEERS_DIR=DIRECTORY python benchmarks/router/show_interop.py

Two FlexCache servers hold a prompt each, in DRAM (CPU) or only on SSD (STORAGE); GPU events are
those of our consolidator. By chance, 20 of 40 are right. ``DIRECTORY/dyn`` has
ai-dynamo-runtime==1.6.1, ``DIRECTORY/vllm-router`` has vllm-router==0.1.17.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import router_path  # noqa: F401
import typer
from cluster import Cluster, running_cluster
from rich.console import Console
from rich.table import Table
from router_peers import (
    PEERS,
    count_right,
    hold,
    make_prompt,
    peer_python,
    publish_gpu,
    source_of,
    source_of_cache,
)

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import Event, encode_batch

ANY_PORT = "tcp://127.0.0.1:0"
SETTLE_S = 3.0
VARIANTS: dict[str, dict[str, Any]] = {
    'topic ""': {"kv_events_topic": ""},
    "topic kv@pod@model": {"kv_events_topic": "kv@pod@model"},
    'topic "", hashes as bytes': {"kv_events_topic": "", "kv_events_hashes": "bytes"},
}


def main(
    settle_s: float = typer.Option(SETTLE_S, help="Time for a peer to take events, in seconds."),
) -> None:
    """Print the table."""
    table = Table("peer", "events", "GPU", "CPU", "STORAGE")
    for peer in PEERS:
        for variant, settings in VARIANTS.items():
            shares = [
                _share(peer, medium, settings, settle_s) for medium in ("GPU", "CPU", "STORAGE")
            ]
            table.add_row(peer, variant, *shares)
    Console(width=120).print(table)


def _share(name: str, medium: str, settings: dict[str, Any], settle_s: float) -> str:
    directory, make_peer = PEERS[name]
    python = peer_python(directory)
    if python is None:
        return "not installed"
    rng = np.random.default_rng(1)
    prompts = [make_prompt(rng) for _ in range(2)]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        if medium == "GPU" and settings.get("kv_events_hashes") == "bytes":
            return "-"  # the consolidator publishes integers
        publishers: list[BatchPublisher[Event]] = []
        clusters: list[Cluster] = []
        for number, _ in enumerate(prompts):
            if medium == "GPU":
                publishers.append(_publisher(settings, stack))
            else:
                clusters.append(stack.enter_context(_cache(Path(scratch, str(number)), settings)))
        sources = [source_of(each) for each in publishers]
        sources += [source_of_cache(each) for each in clusters]
        peer = make_peer(python, sources)
        stack.callback(peer.close)
        time.sleep(settle_s)
        for number, prompt in enumerate(prompts):
            if medium == "GPU":
                publish_gpu(publishers[number], prompt, number)
            else:
                hold(clusters[number], prompt, medium)
        time.sleep(settle_s)
        return f"{count_right(peer, prompts, 20)}/40"


def _cache(directory: Path, settings: dict[str, Any]) -> AbstractContextManager[Cluster]:
    directory.mkdir()
    return running_cluster(
        [directory], kv_events_endpoint=ANY_PORT, kv_events_replay_endpoint=ANY_PORT, **settings
    )


def _publisher(settings: dict[str, Any], stack: ExitStack) -> BatchPublisher[Event]:
    publisher: BatchPublisher[Event] = BatchPublisher(
        Address(ANY_PORT, ANY_PORT, settings["kv_events_topic"]),
        encode_batch,
        num_kept=100,
        num_queued=100,
    )
    publisher.start()
    stack.callback(publisher.close)
    return publisher


if __name__ == "__main__":
    typer.run(main)
