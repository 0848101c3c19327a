"""Metrics of a real router respond to their causes.

That every statistic has its metric is tested with invented ones, in `test_router_metrics.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from paths import ROOT
from ports import free_ports

pytest.importorskip("prometheus_client")
pytest.importorskip("aiohttp")
pytest.importorskip("uvloop")

from fake_openai_engine import FakeEngine
from router_load import STREAMED, Engines, ask
from router_process import RouterProcess
from scrapes import CHANGES, Expected, Is, Scrapes

from flexcache import __version__
from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import AllBlocksCleared, BlockStored, Event, encode_batch

PROMPT = list(range(100, 100 + 320))


class Watched(Scrapes):
    """A router, and its metrics at each scrape."""

    def __init__(self, router: RouterProcess) -> None:
        super().__init__(lambda: router.get("/metrics"), "flexcache_router_")
        self.router = router

    def open_request(self, **headers: str) -> socket.socket:
        """Send a request and leave its answer unread; closing the socket aborts it."""
        body = json.dumps({"model": "fake", "prompt": PROMPT}).encode()
        fields = {"Host": "x", "Content-Length": len(body), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connection = socket.create_connection(("127.0.0.1", self.router.port))
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection


def total(look: dict[str, float], name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(value for sample, value in look.items() if sample.partition("{")[0] == name)


@contextmanager
def routed(engines: Engines, options: Sequence[str] = (), **settings: object) -> Iterator[Watched]:
    """Run a router before engines.

    Args:
        settings: Of `RouterConfig`.
    """
    with engines, RouterProcess(engines.engines, *options, **settings) as router:
        watched = Watched(router)
        if engines.engines:
            count = len(engines.engines)
            watched.look_until(lambda look: total(look, "source_connected") == count)
        yield watched


# -- what is done to a router ----------------------------------------------------------------------


def serve_prompts() -> tuple[Watched, Expected]:
    engines = Engines(1)
    (engine,) = engines.engines
    held = f'held_blocks{{source="{engines.endpoints[0]}",tier="gpu"}}'
    with routed(engines) as watched:
        for turn in range(1, 26):
            assert ask(watched.router.url, PROMPT[: 16 * turn % 320 + 16], **STREAMED) == 200
            watched.look_until(
                lambda look, turn=turn: (
                    look['ended_requests_total{outcome="done"}'] == turn
                    and look.get(held) == min(turn + 1, 20)  # its events have come, too
                )
            )
        assert ask(watched.router.url, PROMPT) == 200
        engine.behave(reports_usage=False)
        assert ask(watched.router.url, PROMPT) == 200
        engine.behave(fail="hang")
        # A head may have run for as long as predicted; the backlog of one behind it stays.
        with watched.open_request(), watched.open_request():
            watched.look_until(lambda look: total(look, "worker_waiting_requests") == 2)
        watched.look_until(lambda look: look['ended_requests_total{outcome="aborted"}'] == 2)
        watched.look_until(lambda look: total(look, "index_blocks") == 20)
        watched.look()
    worker, source = f'worker="{engine.url}"', f'source="{engines.endpoints[0]}"'
    return watched, {
        'decisions_total{policy="ours",reason="only_one"}': 29,
        'cached_token_predictions_total{result="exact"}': 26,
        'cached_token_predictions_total{result="unreported"}': 1,
        "predicted_cached_tokens_total": CHANGES,
        "actual_cached_tokens_total": CHANGES,
        "compared_prompt_tokens_total": CHANGES,
        "prompt_tokens_total": CHANGES,
        'matched_tokens_total{tier="gpu"}': CHANGES,
        "ttft_seconds_count": CHANGES,
        "predicted_ttft_seconds_count": CHANGES,
        "ttft_error_seconds_count": CHANGES,
        f'worker_state{{state="up",{worker}}}': Is(1),
        f"worker_requests{{{worker}}}": CHANGES,
        f"worker_waiting_requests{{{worker}}}": CHANGES,
        f"worker_wait_seconds{{{worker}}}": CHANGES,
        f"worker_decisions_total{{{worker}}}": 29,
        f"worker_prompt_tokens_total{{{worker}}}": CHANGES,
        f'worker_matched_tokens_total{{tier="gpu",{worker}}}': CHANGES,
        "index_blocks": 20,
        "index_bytes": CHANGES,
        "index_max_blocks": Is(10_000_000),
        f'held_blocks{{{source},tier="gpu"}}': 20,
        'event_blocks_total{kind="stored"}': 20,
        f"source_connected{{{source}}}": Is(1),
        "open_requests": CHANGES,
        "queue_wait_seconds_count": 29,
        "queued_requests": Is(0),
        'converted_requests_total{way="ids"}': 29,
        "converted_tokens_total": CHANGES,
        "conversion_seconds_count": CHANGES,
        f'build_info{{version="{__version__}"}}': Is(1),
        "ready": Is(1),
        "proxies": Is(1),
    }


def lose_engines() -> tuple[Watched, Expected]:
    engines = Engines(2)
    first, second = engines.engines
    with routed(engines, constants={"prober.PROBE_INTERVAL_S": 0.1}) as watched:
        first.behave(fail="502")
        second.behave(fail="502", times=1)
        new_prompts = itertools.count()  # that no engine holds, so both get some

        def opens(look: dict[str, float]) -> bool:
            assert ask(watched.router.url, [next(new_prompts)] * 320) in (200, 502)
            return look[f'worker_circuit{{state="open",worker="{first.url}"}}'] == 1

        watched.look_until(opens)
        first.kill()
        second.kill()
        watched.look_until(lambda look: look["ready"] == 0)
        assert ask(watched.router.url, PROMPT) in (502, 503)
        watched.look_until(lambda look: look['refused_requests_total{reason="no_worker"}'] > 0)
    return watched, {
        "retries_total": CHANGES,
        'ended_requests_total{outcome="refused"}': CHANGES,
        f'worker_circuit{{state="open",worker="{first.url}"}}': CHANGES,
        f'worker_state{{state="down",worker="{first.url}"}}': 1,
        'refused_requests_total{reason="no_worker"}': CHANGES,
        f'source_connected{{source="{engines.endpoints[0]}"}}': -1,
    }


def crowd_the_queue() -> tuple[Watched, Expected]:
    engines = Engines(1, fail="hang")
    limits = {"max_requests_per_worker": 1, "queue_size": 1, "queue_timeout_s": 60}
    with routed(engines, **limits) as watched, watched.open_request():
        watched.look_until(lambda look: total(look, "worker_requests") == 1)
        with watched.open_request():
            watched.look_until(lambda look: look["queued_requests"] == 1)
            assert ask(watched.router.url, PROMPT) == 429
            watched.look()
        watched.look_until(lambda look: look["queued_requests"] == 0)
    return watched, {
        "queued_requests": CHANGES,
        'refused_requests_total{reason="full"}': 1,
    }


def refuse_clients() -> tuple[Watched, Expected]:
    with routed(Engines(1), api_keys="a-key", max_body_mb=0.01) as watched:

        def ask(size: int, **headers: str) -> int:
            fields = {"Content-Type": "application/json", **headers}
            url = f"{watched.router.url}/v1/completions"
            try:
                urllib.request.urlopen(urllib.request.Request(url, b"x" * size, fields))
            except urllib.error.HTTPError as error:
                error.close()
                return error.code
            except urllib.error.URLError:  # closed while the body was being sent
                return 0
            return 200

        assert ask(10) == 401
        assert ask(100_000, Authorization="Bearer a-key") in (413, 0)
        assert ask(10, Authorization="Bearer a-key", Upgrade="websocket") == 400
        watched.look()
    return watched, {
        'rejected_requests_total{reason="unauthorized"}': 1,
        'rejected_requests_total{reason="too_large"}': 1,
        'rejected_requests_total{reason="malformed"}': 1,
    }


def publish_badly() -> tuple[Watched, Expected]:
    """Publish what cannot be used: gaps without a replay, other media, unknown parents, garbage."""

    def blocks(name: int, medium: str, parent: int | None = None) -> BlockStored:
        ids = list(range(name * 16, name * 16 + 16))
        return BlockStored([name], parent, ids, 16, None, medium, None)

    def make_publisher() -> BatchPublisher[Event]:
        publisher: BatchPublisher[Event] = BatchPublisher(
            Address(endpoint, replay, "kv-events"),
            lambda ts, events: b"garbage" if events == ["bad"] else encode_batch(ts, events),
            num_kept=4,
            num_queued=100,
        )
        publisher.start()
        return publisher

    endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    source = f'source="{endpoint}"'
    publisher = make_publisher()
    try:
        with FakeEngine() as engine:
            events = f"--events={engine.url}={endpoint},{replay}"
            with RouterProcess([engine], events, max_blocks=8) as router:
                watched = Watched(router)
                watched.look_until(lambda look: look[f"source_connected{{{source}}}"] == 1)
                publisher.publish([blocks(1, "GPU")])
                publisher.publish([blocks(2, "a tape")])
                publisher.publish([blocks(3, "GPU", parent=99)])
                watched.look_until(lambda look: look["orphan_blocks"] == 1)
                publisher.publish(["bad"])  # type: ignore[list-item]
                publisher.publish([blocks(name, "GPU") for name in range(4, 30)])
                watched.look_until(lambda look: look["refused_blocks_total"] > 0)
                watched.look_until(lambda look: look[f"source_bad_batches_total{{{source}}}"] > 0)
                publisher.publish([AllBlocksCleared()])
                watched.look_until(lambda look: look["index_blocks"] == 0)
                publisher.close()
                publisher = make_publisher()
                publisher.publish([blocks(5, "GPU")])
                watched.look_until(lambda look: look[f"source_restarts_total{{{source}}}"] == 1)
    finally:
        publisher.close()
    return watched, {
        "refused_blocks_total": CHANGES,
        "orphan_blocks": CHANGES,
        'ignored_events_total{reason="medium"}': CHANGES,
        f"source_bad_batches_total{{{source}}}": CHANGES,
        f"source_losses_total{{{source}}}": CHANGES,
        f"source_restarts_total{{{source}}}": CHANGES,
    }


def kill_processes() -> tuple[Watched, Expected]:
    def children(parent: int) -> dict[int, str]:
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as words:
                        if int(stat.read().rpartition(")")[2].split()[1]) == parent:
                            found[int(name)] = words.read()
                except OSError:  # it has ended
                    continue
        return found

    with routed(Engines(1), ["--proxies", "2"]) as watched:
        watched.look_until(lambda look: look["proxies"] == 2)
        assert watched.router.process is not None
        ours = children(watched.router.process.pid)
        proxy = next(pid for pid, words in ours.items() if "proxy" in words)
        os.kill(proxy, signal.SIGKILL)
        watched.look_until(lambda look: look["proxy_restarts_total"] == 1)
        watched.look_until(lambda look: look["proxies"] == 2)
    return watched, {"proxies": CHANGES, "proxy_restarts_total": CHANGES}


SCENARIOS = (
    serve_prompts, lose_engines, crowd_the_queue, refuse_clients, publish_badly, kill_processes,
)  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_metrics_change_as_expected(scenario: Callable[[], tuple[Watched, Expected]]) -> None:
    watched, expected = scenario()
    watched.check(expected)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_finds_data_for_every_panel_of_the_dashboard(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "dashboard.png"
    script = ROOT / "scripts" / "show_router.py"
    done = subprocess.run(
        [sys.executable, script, "--seconds", "10", "--out", picture],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 queries without data, 0 alerts amiss" in done.stdout
    assert picture.stat().st_size > 50_000
