"""Options of the proxy's sockets, in this process, where they can be looked at."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

import pytest

pytest.importorskip("aiohttp", reason="the extra router is not installed")

import aiohttp
import uvloop
from aiohttp import web
from proxy_process import InTurn

from flexcache.router.proxy.proxy import make_app, serve
from flexcache.router.settings import ProxyConfig


def test_small_packets_are_sent_at_once_on_both_sides() -> None:
    assert uvloop.run(connected_sockets()) == {"client": (1, 1), "engine": (1, None)}


async def connected_sockets() -> dict[str, tuple[int, int | None]]:
    """Make a request; return TCP_NODELAY and SO_KEEPALIVE of the proxy's two connections."""
    found: dict[str, tuple[int, int | None]] = {}

    async def answer(_: web.Request) -> web.Response:
        engine_port = runner.addresses[0][1]
        for sock in own_sockets():
            with sock:
                no_delay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                if sock.getsockname()[1] == serving.port:
                    keep_alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    found["client"] = (no_delay, keep_alive)
                elif sock.getpeername()[1] == engine_port:
                    found["engine"] = (no_delay, None)
        return web.Response(text="ok")

    engine = web.Application()
    engine.router.add_get("/x", answer)
    runner = web.AppRunner(engine)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    serving = await serve(
        make_app(InTurn([f"http://127.0.0.1:{runner.addresses[0][1]}"]), ProxyConfig())
    )
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{serving.port}/x") as response,
    ):
        assert response.status == 200
    await serving.stop()
    await runner.cleanup()
    return found


def own_sockets() -> list[socket.socket]:
    """Return copies of this process's connected TCP sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile: the listing itself
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
            if sock.family == socket.AF_INET and is_connected(sock):
                found.append(sock)
            else:
                sock.close()
    return found


def is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
