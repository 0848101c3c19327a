"""Engines without a model behind a router, and conversations that go through it."""

from __future__ import annotations

import random
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
from fake_openai_engine import FakeEngine
from ports import free_ports
from router_process import PATIENCE_S

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def ask(url: str, token_ids: Sequence[int], max_tokens: int = 4, **fields: Any) -> int:
    """Send a completion request to a router; returns the status."""
    body = {"model": "fake", "prompt": list(token_ids), "max_tokens": max_tokens, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        msgspec.json.encode(body),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.read()
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


class Engines:
    """Fake engines that publish KV events.

    Args:
        behaviour: Of all of them.
    """

    def __init__(self, count: int, **behaviour: Any) -> None:
        ports = free_ports(2 * count)
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in ports[:count]]
        self._replays = [f"tcp://127.0.0.1:{port}" for port in ports[count:]]
        self.engines = [
            FakeEngine(events=endpoint, replay=replay, **behaviour)
            for endpoint, replay in zip(self.endpoints, self._replays, strict=True)
        ]

    def __enter__(self) -> Engines:
        for engine in self.engines:
            engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.stop()


class Conversations:
    """Conversations whose prompts grow by each turn, until the block ends.

    Args:
        count: Conversations at a time.
        think_s: Longest pause between two turns.
    """

    def __init__(self, url: str, count: int, *, think_s: float = 0.5) -> None:
        self._url = url
        self._count = count
        self._think_s = think_s
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self.statuses: list[int] = []

    def __enter__(self) -> Conversations:
        for seed in range(self._count):
            self._pool.submit(self._talk, seed)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def _talk(self, seed: int) -> None:
        chance = random.Random(seed)
        system = list(range(512))
        while not self._stopped.is_set():
            prompt = system.copy()
            for _ in range(chance.randint(2, 10)):
                prompt += [chance.randrange(50_000) for _ in range(chance.randint(50, 600))]
                with suppress(OSError):
                    status = ask(self._url, prompt, chance.randint(4, 40), **STREAMED)
                    self.statuses.append(status)
                if self._stopped.wait(chance.random() * self._think_s):
                    return
