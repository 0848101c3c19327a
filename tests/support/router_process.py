"""`flexcache router` as a process of its own, and clients that report how their requests ended.

with FakeEngine() as engine, RouterProcess([engine], proxies=2) as router:
    router.post("/select", {"token_ids": [...]})
    asyncio.run(complete(router.url, [1, 2, 3]))
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from fake_openai_engine import FakeEngine
from paths import ROOT
from ports import free_ports

PATIENCE_S = 120.0
"""What a test waits for happens in this time even on a machine that is busy with other work."""


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


_WITH_CONSTANTS = """
import importlib, json, sys
for name, value in json.loads(sys.argv.pop(1)).items():
    module, _, constant = name.rpartition(".")
    setattr(importlib.import_module(f"flexcache.router.{module}"), constant, value)
from flexcache.cli import app
app()
"""


class RouterProcess:
    """A router before engines.

    Args:
        engines: Those listed, by URL, with their events if they publish some.
        proxies: See `RouterConfig`; other settings likewise, as keywords.
        wait: Whether entering waits until it is ready.
        descriptors: Soft and hard limit of its descriptors; None: those of the test.
        constants: Values of constants, by ``MODULE.NAME`` within `flexcache.router`. They hold in
            the first of its processes.
    """

    def __init__(
        self,
        engines: Sequence[FakeEngine] = (),
        *options: str,
        proxies: int = 0,
        wait: bool = True,
        descriptors: tuple[int, int] | None = None,
        constants: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.port, control_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.control = f"http://127.0.0.1:{control_port}"
        self._wait = wait
        self._descriptors = descriptors
        self._constants = constants
        assert not (constants and proxies), "the decider is another process then"
        arguments = [
            f"--port={self.port}",
            f"--control-port={control_port}",
            f"--proxies={proxies}",
        ]
        for engine in engines:
            arguments.append(f"--worker={engine.url}")
            if engine.events is not None:
                pair = ",".join(filter(None, (engine.events, engine.replay)))
                arguments.append(f"--events={engine.url}={pair}")
        self._arguments = [*arguments, *options]
        self._environ = {
            f"FLEXCACHE_ROUTER_{name.upper()}": str(value) for name, value in settings.items()
        }
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RouterProcess:
        self.start()
        return self

    def start(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = ["-m", "flexcache.cli"]
        if self._constants:
            command = ["-c", _WITH_CONSTANTS, json.dumps(self._constants)]
        self.process = subprocess.Popen(
            [sys.executable, *command, "router", *self._arguments],
            env={**os.environ, "PYTHONPATH": path, **self._environ},
            preexec_fn=None if self._descriptors is None else self._limit_descriptors,
        )
        if self._wait:
            until(self.is_ready)

    def _limit_descriptors(self) -> None:
        assert self._descriptors is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptors)

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.stop()

    def stop(self) -> int:
        """End it in peace; returns its status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    # -- its processes -----------------------------------------------------------------------------

    def children(self, role: str) -> list[int]:
        """Return the processes of a role: ``decider`` or ``proxy``."""
        assert self.process is not None
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if len(command) > 3 and command[3].startswith(role.encode()):  # python -m
                        found.append(int(pid))
        return found

    # -- the control API ---------------------------------------------------------------------------

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the router has ended"
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return status and content of an answer, read as JSON if it is."""
        data = None if body is None else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(
            self.control + path, data, {**fields, **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _content(error)

    def get(self, path: str) -> Any:
        """Return the content of an answer; the status must be 200."""
        status, content = self.call("GET", path)
        assert status == 200, content
        return content

    def post(self, path: str, body: Any) -> Any:
        """Return the content of an answer; the status must say that it was done."""
        status, content = self.call("POST", path, body)
        assert status in (200, 201), content
        return content

    def stats(self) -> Any:
        return self.get("/stats")

    def states(self) -> dict[str, str]:
        """Return the state of each worker."""
        return {name: worker["state"] for name, worker in self.stats()["workers"].items()}

    def num_reserved(self) -> int:
        """Return the requests that count as load."""
        return sum(worker["requests"] for worker in self.stats()["workers"].values())


def _content(answer: Any) -> Any:
    data = answer.read()
    is_json = answer.headers.get_content_type() == "application/json"
    return json.loads(data) if is_json else data.decode()


# -- clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a request ended for its client.

    Attributes:
        worker: The engine that was chosen.
        is_whole: The answer is complete.
        is_clear: It is, or the client was given an error that it cannot mistake for an answer.
    """

    status: int | None
    worker: str | None
    matched: int | None
    tokens: int
    is_whole: bool
    is_clear: bool
    retry_after: str | None = None


async def complete(
    url: str,
    prompt: list[int],
    session: aiohttp.ClientSession | None = None,
    *,
    is_streamed: bool = True,
    headers: dict[str, str] | None = None,
) -> Ended:
    """Send a request and read its answer to the end."""
    if session is None:
        async with aiohttp.ClientSession() as own:
            return await complete(url, prompt, own, is_streamed=is_streamed, headers=headers)
    body = {"model": "fake", "prompt": prompt, "stream": is_streamed}
    status, fields, text = None, {}, b""
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            status, fields = answer.status, answer.headers
            async for chunk in answer.content.iter_any():
                text += chunk
        is_broken = False
    except (aiohttp.ClientError, OSError):
        is_broken = True
    is_error = is_broken or (status is not None and status >= 400) or b'"error"' in text
    is_whole = not is_error and (b"[DONE]" in text or not is_streamed)
    matched = fields.get("x-flexcache-matched-tokens")
    return Ended(
        status=status,
        worker=fields.get("x-flexcache-worker"),
        matched=None if matched is None else int(matched),
        tokens=text.count(b'"text": "x"'),
        is_whole=is_whole,
        is_clear=is_whole or is_error,
        retry_after=fields.get("Retry-After"),
    )
