"""A router before whom more clients stand than it, or its engines, can take at once."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from collections import Counter

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

import aiohttp
from cluster import PATIENCE_S
from fake_openai_engine import FakeEngine
from odd_engine import OddEngine
from proxy_process import ProxyProcess
from router_process import RouterProcess, complete, until


async def crowd(url: str, num: int) -> Counter[int | None]:
    """Send requests at once, each on a connection of its own; returns their statuses."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        requests = (complete(url, [1] * 40, session) for _ in range(num))
        return Counter(ended.status for ended in await asyncio.gather(*requests))


@pytest.mark.parametrize("proxies", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_a_crowd_beyond_the_soft_limit_of_descriptors_is_served(proxies: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        FakeEngine(tokens=4, ttft_s=2.0) as engine,
        RouterProcess([engine], proxies=proxies, descriptors=(256, hard)) as router,
    ):
        assert asyncio.run(crowd(router.url, 300)) == {200: 300}


def test_a_crowd_beyond_the_hard_limit_is_turned_away_and_the_log_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        FakeEngine(tokens=4, ttft_s=2.0) as engine,
        RouterProcess([engine], descriptors=(256, 256)) as router,
    ):
        statuses = asyncio.run(crowd(router.url, 200))
    assert statuses.keys() == {200, None}, "who is let in is served"
    log = capfd.readouterr().err
    limit = re.search(r"router_few_descriptors limit=256 max_clients=(\d+)", log)
    assert limit is not None and "connections_turned_away" in log
    assert statuses[200] >= int(limit[1])


@pytest.mark.whole
def test_connections_to_the_control_port_take_none_from_clients() -> None:
    with FakeEngine() as engine, RouterProcess([engine]) as router, contextlib.ExitStack() as stack:
        assert router.process is not None
        host, port = router.control.removeprefix("http://").split(":")
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(300):
            sock = stack.enter_context(socket.socket())
            sock.connect((host, int(port)))
        assert asyncio.run(crowd(router.url, 20)) == {200: 20}


@pytest.mark.whole
def test_connections_without_the_token_do_not_keep_probes_from_the_control_port() -> None:
    with (
        FakeEngine() as engine,
        RouterProcess([engine], control_token="secret") as router,
        contextlib.ExitStack() as stack,
    ):
        host, port = router.control.removeprefix("http://").split(":")
        for number in range(100):
            sock = stack.enter_context(socket.create_connection((host, int(port))))
            ends = b"\r\n" * (number % 2)  # every other request is whole
            with contextlib.suppress(ConnectionError):  # turned away already
                sock.sendall(b"GET /stats HTTP/1.1\r\nHost: localhost\r\n" + ends)
        assert [router.call("GET", "/readyz")[0] for _ in range(10)] == [200] * 10


@pytest.mark.whole
def test_a_body_that_does_not_come_to_the_control_port_is_given_up() -> None:
    constants = {"control.IDLE_TIMEOUT_S": 2.0}
    with FakeEngine() as engine, RouterProcess([engine], constants=constants) as router:
        host, port = router.control.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(
                b"POST /select HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert b" 408 " in sock.recv(100)


def refusals(proxy: ProxyProcess) -> int:
    num: int = proxy.stats()["outcomes"].get("refused", 0)
    return num


def test_requests_wait_while_the_backlog_of_the_only_engine_is_full() -> None:
    limits = {"connect_timeout_s": 0.5}
    with OddEngine(backlog=1) as engine, ProxyProcess([engine.url], **limits) as proxy:
        assert asyncio.run(crowd(proxy.url, 1)) == {200: 1}
        engine.accepts.clear()

        async def scenario() -> Counter[int | None]:
            waiting = asyncio.create_task(crowd(proxy.url, 12))
            await asyncio.to_thread(until, lambda: refusals(proxy) >= 8)  # some are in the backlog
            engine.accepts.set()
            return await waiting

        assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == {200: 12}
        assert proxy.stats()["num_retries"] == 0, "no other engine was asked"
