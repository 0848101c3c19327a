"""What a router refuses before it starts anything, and what it counts of a proxy of its own."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")

from flexcache.config.router import RouterConfig
from flexcache.errors import ConfigError
from flexcache.router.messages import ProxyCounters
from flexcache.router.process import run_router
from flexcache.router.service import DeciderService
from flexcache.router.stats import ProxyStats

WORKER = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": ()}, "workers = .*--worker"),
        ({"workers": ["127.0.0.1:1"]}, "--worker = '127.0.0.1:1'"),
        ({"workers": [WORKER, WORKER]}, "--worker = .*twice"),
        ({"events": ["http://127.0.0.1:2=tcp://127.0.0.1:3"]}, "--events = .*no --worker"),
        ({"policy": "best"}, "policy = 'best'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    config = {"workers": [WORKER], "port": 0, "control_port": 0}
    with pytest.raises(ConfigError, match=named):
        run_router(RouterConfig(**{**config, **settings}))


@pytest.mark.parametrize("name", ["engine_key_file", "api_key_file"])
def test_a_file_without_a_key_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# none\n\n" if name == "api_key_file" else "two words\n")
    config = {"workers": [WORKER], "port": 0, "control_port": 0}
    with pytest.raises(ConfigError, match=name):
        run_router(RouterConfig(**config, **{name: str(file)}))


@pytest.mark.parametrize("proxies", [0, 1], ids=["one process", "a proxy"])
@pytest.mark.parametrize("name", ["port", "control_port"])
def test_a_port_that_is_in_use_is_refused(name: str, proxies: int) -> None:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # also another router's
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = {"port": 0, "control_port": 0, name: taken.getsockname()[1]}
            with pytest.raises(ConfigError, match=f"{name} = .*in use"):
                run_router(RouterConfig(workers=[WORKER], proxies=proxies, **ports))


def test_a_proxy_in_the_routers_own_process_is_counted() -> None:
    async def read() -> ProxyStats | None:
        service = DeciderService(RouterConfig(workers=(WORKER,)))
        service.count_own_proxy = lambda: ProxyCounters(True, 2, 3, {"malformed": 4})
        return service.stats().proxy

    proxy = asyncio.run(read())
    assert proxy is not None
    assert (proxy.processes, proxy.open_requests, proxy.retries) == (1, 2, 3)
    assert proxy.rejected == {"malformed": 4}
