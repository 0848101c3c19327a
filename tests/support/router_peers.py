"""Other routers, as processes of their own environments, fed with our events.

``ROUTER_PEERS_DIR`` has an environment for each: ``dyn`` with ai-dynamo-runtime, ``vllm-router``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cluster import Cluster
from fake_openai_engine import FakeEngine
from ports import free_ports

from flexcache.events.publisher import BatchPublisher
from flexcache.events.wire import BlockStored, Event
from flexcache.router.fleet import EventSource

PATIENCE_S = 300.0
BLOCK = 16
NUM_BLOCKS = 10


def peer_python(name: str) -> str | None:
    """Return the interpreter of a peer's environment; None if there is none."""
    directory = os.environ.get("ROUTER_PEERS_DIR")
    python = Path(directory or "/nonexistent", name, "bin", "python")
    return str(python) if python.exists() else None


class Peer(Protocol):
    """A router of two workers."""

    def choose(self, tokens: Sequence[int]) -> int:
        """Return the number of the worker that a prompt goes to."""

    def close(self) -> None:
        """End its processes."""


class DynamoSelection:
    """Dynamo's SelectionService: indexer, cost and load, without its frontend."""

    def __init__(self, python: str, sources: Sequence[EventSource]) -> None:
        script = Path(__file__).with_name("dynamo_selection.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "DYN_LOG": "error"},
        )  # fmt: skip
        for number, source in enumerate(sources):
            self.call(
                "upsert_worker",
                worker_id=number,
                model_name="model",
                endpoint=f"http://127.0.0.1:{number + 1}",
                block_size=BLOCK,
                kv_events_endpoints={0: source.endpoint},
                replay_endpoint=source.replay,
                max_num_batched_tokens=8192,
                total_kv_blocks=10_000,
            )

    def call(self, name: str, **request: Any) -> Any:
        return self._ask(name, request)

    def note(self, name: str, selection_id: str) -> None:
        """Call something that takes only the id of a selection."""
        self._ask(name, selection_id)

    def _ask(self, name: str, request: dict[str, Any] | str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, request]) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "Dynamo ended"  # others are its log
        return json.loads(line)

    def choose(self, tokens: Sequence[int]) -> int:
        answer = self.call("select", model_name="model", token_ids=list(tokens))
        return int(answer["worker_id"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class VllmRouter:
    """vllm-router with ``kv_aware``, before two engines without a model."""

    def __init__(self, python: str, sources: Sequence[EventSource]) -> None:
        self._engines = [FakeEngine().start() for _ in sources]
        self._num_requests = [0 for _ in sources]
        port, metrics_port = free_ports(2)
        self._url = f"http://127.0.0.1:{port}"
        urls = [engine.url for engine in self._engines]
        arguments = [
            str(Path(python).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(port),
            "--policy", "kv_aware", "--worker-urls", *urls, "--kv-event-model", "fake",
            "--kv-event-block-size", str(BLOCK),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        ]  # fmt: skip
        for url, source in zip(urls, sources, strict=True):
            arguments += ["--kv-event-source", f"{url}={source.endpoint}"]
            arguments += ["--kv-event-replay-source", f"{url}={source.replay}"]
        self._process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait(self._answers)
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, "vllm-router ended"
        try:
            self.choose([1] * BLOCK)
        except OSError:
            return False
        return True

    def choose(self, tokens: Sequence[int]) -> int:
        body = {"model": "fake", "prompt": [int(token) for token in tokens], "max_tokens": 1}
        request = urllib.request.Request(
            self._url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        before = self._num_requests
        self._num_requests = [engine.stats()["requests"] for engine in self._engines]
        grown = [now > then for now, then in zip(self._num_requests, before, strict=True)]
        return grown.index(True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for engine in self._engines:
            engine.stop()


PEERS: dict[str, tuple[str, Callable[[str, Sequence[EventSource]], Peer]]] = {
    "Dynamo SelectionService": ("dyn", DynamoSelection),
    "vllm-router kv_aware": ("vllm-router", VllmRouter),
}


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def make_prompt(rng: np.random.Generator) -> list[int]:
    tokens: list[int] = rng.integers(0, 50_000, BLOCK * NUM_BLOCKS).tolist()
    return tokens


def source_of(publisher: BatchPublisher[Any]) -> EventSource:
    return EventSource(publisher.address.endpoint, publisher.address.replay_endpoint)


def source_of_cache(cache: Cluster) -> EventSource:
    """Return the publisher of a FlexCache with KV events."""
    publisher = cache.server._observers._publisher
    assert publisher is not None
    return source_of(publisher)


def publish_gpu(publisher: BatchPublisher[Event], prompt: Sequence[int], name: int) -> None:
    """Publish a prompt as an engine does, in the form of our consolidator."""
    hashes = [name * NUM_BLOCKS + number for number in range(NUM_BLOCKS)]
    publisher.publish([BlockStored([*hashes], None, list(prompt), BLOCK, None, "GPU", None)])


def hold(cache: Cluster, prompt: Sequence[int], medium: str) -> None:
    """Have a FlexCache hold a prompt, only on SSD if the medium is STORAGE."""
    cache.put(np.array(prompt), range(NUM_BLOCKS))
    if medium == "STORAGE":
        cache.manager.clear("CPU")


def count_right(peer: Peer, prompts: Sequence[Sequence[int]], num_requests: int) -> int:
    """Return how many requests go to the holder, of ``num_requests`` to each worker.

    Args:
        prompts: For each worker, the prompt that only it holds.
    """
    return sum(
        peer.choose(prompt) == worker
        for _ in range(num_requests)
        for worker, prompt in enumerate(prompts)
    )


def see_all(peer: Peer, prompts: Sequence[Sequence[int]], publish_more: Callable[[], None]) -> None:
    """Wait until the peer has the events: each prompt goes to its holder.

    Args:
        publish_more: Has each source publish something else. Peers notice what they missed while
            they were subscribing only when something follows.
    """

    def sees_all() -> bool:
        if count_right(peer, prompts, 15) == 15 * len(prompts):  # no luck
            return True
        publish_more()
        return False

    wait(sees_all)
