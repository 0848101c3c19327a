"""A proxy as a process of its own, with a chooser that takes its workers in turn.

    with FakeEngine() as engine, ProxyProcess([engine.url]) as proxy:
        ...                            # requests to proxy.url
        proxy.stats()["num_open"]      # choices that were not ended

A second port answers questions about what the chooser has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from paths import ROOT

from flexcache.router.chooser import (
    UNKNOWN,
    Arrival,
    Choice,
    NotRouted,
    Outcome,
    Usage,
    WorkerAddress,
)
from flexcache.router.proxy.proxy import PROXY, make_app, serve
from flexcache.router.settings import ProxyConfig

_KEPT = 1000


class InTurn:
    """Chooses workers in turn, those that were tried last; remembers each call.

    Args:
        headers: Added to every request.
        matched_tokens: Predicted for every request.
    """

    def __init__(
        self,
        urls: list[str],
        headers: dict[str, str] | None = None,
        matched_tokens: int | None = None,
    ) -> None:
        self.urls = urls
        self.headers = headers or {}
        self.matched_tokens = matched_tokens
        self.open: dict[str, str] = {}
        self.first_tokens: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self.ended_last: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.arrivals: deque[tuple[str, Mapping[str, str]]] = deque(maxlen=_KEPT)
        self._turn = 0

    async def choose(self, arrival: Arrival) -> Choice:
        if not self.urls:
            raise NotRouted(503, "no worker is up", 1.5)
        self.arrivals.append((arrival.path, arrival.headers))
        turn = self._turn
        if arrival.tried:
            url = min(self.urls, key=lambda url: (url in arrival.tried, url != self.urls[turn]))
        else:
            url = self.urls[turn]
            self._turn = (turn + 1) % len(self.urls)
        assert arrival.request_id not in self.open
        self.open[arrival.request_id] = url
        return Choice(worker=url, url=url, headers=self.headers, matched_tokens=self.matched_tokens)

    def stored(self, url: str, ids: Iterable[str]) -> None:
        pass

    def addresses(self) -> list[WorkerAddress]:
        return []

    def cards(self) -> dict[str, bytes]:
        return {}

    def models_changed(self) -> None:
        pass

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        assert request_id in self.open and request_id not in self.first_tokens
        self.first_tokens.add(request_id)

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        worker = self.open.pop(request_id)
        self.outcomes[outcome.value] += 1
        self.ended_last.append(
            {
                "worker": worker,
                "outcome": outcome.value,
                "first_token": request_id in self.first_tokens,
                **usage._asdict(),
            }
        )
        self.first_tokens.discard(request_id)


class ProxyProcess:
    """The proxy's process, as tests see it.

    Args:
        urls: Of the engines.
        headers: The chooser adds them to requests.
        config: Fields of `ProxyConfig`.
    """

    def __init__(
        self,
        urls: list[str],
        *,
        port: int = 0,
        headers: dict[str, str] | None = None,
        matched_tokens: int | None = None,
        **config: Any,
    ) -> None:
        self._setup = {
            "urls": urls,
            "port": port,
            "headers": headers or {},
            "matched_tokens": matched_tokens,
            "config": config,
        }
        self._scheme = "https" if "tls_cert" in config else "http"
        self.port = port

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> ProxyProcess:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self._setup)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.port = ports["port"]
        self._questions = f"http://127.0.0.1:{ports['questions']}"
        return self

    def stats(self) -> dict[str, Any]:
        """Return ``num_open`` (choices not ended), ``outcomes``, ``num_retries``, ``ended`` and
        ``arrivals`` (the last ones). Checks the proxy's invariants."""
        with urllib.request.urlopen(f"{self._questions}/stats", timeout=60) as answer:
            stats: dict[str, Any] = json.load(answer)
        return stats

    def terminate(self) -> None:
        """Ask it to stop."""
        self.process.send_signal(signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        self.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


async def _run(setup: dict[str, Any]) -> None:
    config = msgspec.convert(setup["config"], ProxyConfig, dec_hook=lambda kind, text: kind(text))
    chooser = InTurn(setup["urls"], setup["headers"], setup["matched_tokens"])
    app = make_app(chooser, config)
    serving = await serve(app, port=setup["port"])

    async def stats(_: web.Request) -> web.Response:
        app[PROXY].check()
        return web.json_response(
            {
                "num_open": len(chooser.open),
                "outcomes": chooser.outcomes,
                "num_retries": app[PROXY].num_retries,
                "ended": list(chooser.ended_last),
                "arrivals": [
                    {"path": path, "headers": dict(headers)} for path, headers in chooser.arrivals
                ],
            }
        )

    questions = web.Application()
    questions.router.add_get("/stats", stats)
    runner = web.AppRunner(questions, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": serving.port, "questions": runner.addresses[0][1]}), flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await serving.stop()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setup", help="JSON: urls, port, headers, matched_tokens, config")
    uvloop.run(_run(json.loads(parser.parse_args().setup)))


if __name__ == "__main__":
    main()
