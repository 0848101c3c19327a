"""A router before engines without a model, and conversations that go through it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
from fake_openai_engine import FakeEngine
from paths import ROOT
from ports import free_ports

from flexcache.router.report import from_json
from flexcache.router.stats import RouterStats

READY_S = 60.0
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class RouterProcess:
    """`flexcache router` as a process.

    Args:
        arguments: Its command line, without the ports.
        environ: Further environment variables.
    """

    def __init__(self, arguments: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environ = {**os.environ, "PYTHONPATH": path, **(environ or {})}
        self.port, self.control_port = free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    def __enter__(self) -> RouterProcess:
        command = [
            sys.executable, "-m", "flexcache.cli", "router", *self._arguments,
            "--port", str(self.port), "--control-port", str(self.control_port),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=self._environ)
        give_up = time.monotonic() + READY_S
        while True:
            with suppress(OSError):
                self.get("/readyz")
                return self
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.__exit__()
                raise RuntimeError("the router does not start")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(READY_S)
        finally:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> bytes:
        """Read from the control port."""
        with urllib.request.urlopen(self.control_url + path, timeout=READY_S) as answer:
            content: bytes = answer.read()
            return content

    def stats(self) -> RouterStats:
        return from_json(self.get("/stats"))

    def complete(self, token_ids: Sequence[int], max_tokens: int = 4, **fields: Any) -> int:
        """Send a completion request; returns the status."""
        body = {"model": "fake", "prompt": list(token_ids), "max_tokens": max_tokens, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            msgspec.json.encode(body),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=READY_S) as answer:
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

    @property
    def arguments(self) -> list[str]:
        """Options of a router before them."""
        places = zip(self.engines, self.endpoints, self._replays, strict=True)
        options = []
        for engine, endpoint, replay in places:
            options += ["--worker", engine.url, "--events", f"{engine.url}={endpoint},{replay}"]
        return options


class Conversations:
    """Conversations whose prompts grow by each turn, until the block ends.

    Args:
        count: Conversations at a time.
        think_s: Longest pause between two turns.
    """

    def __init__(self, router: RouterProcess, count: int, *, think_s: float = 0.5) -> None:
        self._router = router
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
                    status = self._router.complete(prompt, chance.randint(4, 40), **STREAMED)
                    self.statuses.append(status)
                if self._stopped.wait(chance.random() * self._think_s):
                    return
