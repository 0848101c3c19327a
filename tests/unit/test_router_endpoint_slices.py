"""The watch of EndpointSlices, against an API server of the test: HTTPS, tokens, faults."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate

from flexcache.errors import ConfigError
from flexcache.router.listing import WorkerUrl

web = pytest.importorskip("aiohttp.web", reason="the extra router is not installed")
from flexcache.router.discovery import ApiServer, slice_members  # noqa: E402

PATIENCE_S = 30
PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
URL = WorkerUrl.parse("http+k8s://engines.prod:8000")


def endpoint_slice(
    name: str, *addresses: str, not_ready: tuple[str, ...] = (), family: str = "IPv4"
) -> dict[str, Any]:
    ready = [{"addresses": [address]} for address in addresses]  # no condition means ready
    ready += [{"addresses": [a], "conditions": {"ready": False}} for a in not_ready]
    return {"metadata": {"name": name}, "addressType": family, "endpoints": ready}


class FakeApiServer:
    """Serves one service's slices.

    Attributes:
        slices: What a list contains.
        events: What the watch sends; None ends it.
        statuses: Answers of the next requests, instead of the usual ones.
        queries: Parameters of all requests.
    """

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.statuses: list[int] = []
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.version = 100

    async def handle(self, request: Any) -> Any:
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        assert request.path == PATH
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if "watch" not in request.query:
            self.version += 1
            metadata = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": metadata, "items": self.slices})
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def send(self, kind: str, content: dict[str, Any], *, is_last: bool = False) -> None:
        self.events.put_nowait({"type": kind, "object": content})
        if is_last:
            self.events.put_nowait(None)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a self-signed certificate of this host, as a pod finds it."""
    directory = tmp_path_factory.mktemp("account")
    make_certificate(directory)
    (directory / "token").write_text("first\n")
    return directory


@asynccontextmanager
async def serving(server: FakeApiServer, certificate: Path) -> AsyncIterator[ApiServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "ca.crt", certificate / "key")
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = str(runner.addresses[0][1])
    env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    try:
        yield ApiServer.of_pod(env, certificate)
    finally:
        await runner.cleanup()


Next = Callable[[], Awaitable[tuple[str, ...]]]


def run(
    certificate: Path,
    scenario: Callable[[FakeApiServer, Next], Awaitable[None]],
    slices: list[dict[str, Any]],
) -> FakeApiServer:
    """Run a scenario, which gets the server and a function that awaits the next set."""
    server = FakeApiServer()
    server.slices = slices

    async def main() -> None:
        async with serving(server, certificate) as api:
            sets = slice_members(URL, server=api, pause_s=0.01, max_pause_s=0.05)
            try:
                await scenario(server, lambda: asyncio.wait_for(anext(sets), PATIENCE_S))
            finally:
                await sets.aclose()

    asyncio.run(main())
    return server


def test_slices_are_listed_and_changes_followed(certificate: Path) -> None:
    async def scenario(server: FakeApiServer, following: Next) -> None:
        assert await following() == ("10.0.0.7", "10.0.0.8")
        server.send("ADDED", endpoint_slice("b", "10.0.0.9"))
        assert await following() == ("10.0.0.7", "10.0.0.8", "10.0.0.9")
        server.send("BOOKMARK", {"metadata": {"resourceVersion": "200"}})
        server.send("MODIFIED", endpoint_slice("a", "10.0.0.8", not_ready=("10.0.0.7",)))
        assert await following() == ("10.0.0.8", "10.0.0.9")
        server.send("MODIFIED", {"metadata": {"name": "b"}, "endpoints": None})
        assert await following() == ("10.0.0.8",)
        server.send("DELETED", endpoint_slice("a"))
        assert await following() == ()

    server = run(
        certificate,
        scenario,
        [endpoint_slice("a", "10.0.0.8", "10.0.0.7", not_ready=("10.0.0.6",))],
    )
    listing, watch = server.queries
    assert listing == {"labelSelector": "kubernetes.io/service-name=engines"}
    assert watch["resourceVersion"] == "101"
    assert watch["labelSelector"] == listing["labelSelector"]
    assert set(server.tokens) == {"Bearer first"}


def test_an_engine_with_two_families_counts_once(certificate: Path) -> None:
    async def scenario(server: FakeApiServer, following: Next) -> None:
        assert await following() == ("10.0.0.7",)
        server.send("DELETED", endpoint_slice("four"))
        assert await following() == ("2001:db8::7",)

    run(
        certificate,
        scenario,
        [
            endpoint_slice("six", "2001:db8::7", family="IPv6"),
            endpoint_slice("four", "10.0.0.7"),
        ],
    )


def gone_event(server: FakeApiServer) -> None:
    server.send("ERROR", {"kind": "Status", "code": 410, "message": "too old"}, is_last=True)


def gone_status(server: FakeApiServer) -> None:
    server.statuses = [410]


def ended(server: FakeApiServer) -> None:
    server.events.put_nowait(None)


def failed(server: FakeApiServer) -> None:
    server.statuses = [500, 403, 401]  # of the watch, and of two attempts to list


def refused(server: FakeApiServer) -> None:
    server.send("ERROR", {"kind": "Status", "code": 500, "message": "etcd is away"}, is_last=True)


def garbled(server: FakeApiServer) -> None:
    server.send("MODIFIED", {"metadata": 7}, is_last=True)


@pytest.mark.parametrize("end", [gone_event, gone_status, ended, failed, refused, garbled])
def test_after_a_watch_ends_the_slices_are_listed_again(
    certificate: Path, end: Callable[[FakeApiServer], None]
) -> None:
    async def scenario(server: FakeApiServer, following: Next) -> None:
        assert await following() == ("10.0.0.7",)
        server.slices = [endpoint_slice("b", "10.0.0.8")]
        end(server)
        assert await following() == ("10.0.0.8",)
        server.send("ADDED", endpoint_slice("c", "10.0.0.9"))
        assert await following() == ("10.0.0.8", "10.0.0.9")

    run(certificate, scenario, [endpoint_slice("a", "10.0.0.7")])


def test_faults_are_logged_once_and_their_end(
    certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: FakeApiServer, following: Next) -> None:
        await following()
        server.slices = [endpoint_slice("b", "10.0.0.8")]
        failed(server)
        await following()

    with caplog.at_level(logging.INFO):
        run(certificate, scenario, [endpoint_slice("a", "10.0.0.7")])
    texts = [str(record.msg) for record in caplog.records if record.name.startswith("flexcache")]
    events = [text.split()[0] for text in texts]
    assert events == ["endpoint_slices_failed", "endpoint_slices_recovered"]


def test_a_renewed_token_is_used(certificate: Path) -> None:
    async def scenario(server: FakeApiServer, following: Next) -> None:
        await following()
        (certificate / "token").write_text("second")
        server.slices = [endpoint_slice("b", "10.0.0.8")]
        ended(server)
        await following()

    try:
        server = run(certificate, scenario, [endpoint_slice("a", "10.0.0.7")])
    finally:
        (certificate / "token").write_text("first\n")
    assert server.tokens[-1] == "Bearer second"


def test_a_server_with_another_certificate_is_not_trusted(
    certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(FakeApiServer(), certificate) as api:
            strange = ApiServer(url=api.url)  # trusts the system's authorities only
            sets = slice_members(URL, server=strange, pause_s=0.01)
            failing = asyncio.ensure_future(anext(sets))
            while not any("CERTIFICATE_VERIFY_FAILED" in str(r.msg) for r in caplog.records):
                await asyncio.sleep(0.01)
            assert not failing.done()
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_outside_of_a_pod_the_setting_is_refused(tmp_path: Path) -> None:
    for env in ({}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}):
        with pytest.raises(ConfigError, match="in a pod"):
            ApiServer.of_pod(env, tmp_path)


@pytest.mark.parametrize("host", ["engines", "engines.prod.svc"])
def test_a_url_names_service_and_namespace(host: str) -> None:
    async def main() -> None:
        url = WorkerUrl.parse(f"http+k8s://{host}:8000")
        await anext(slice_members(url, server=ApiServer(url="https://127.0.0.1:1")))

    with pytest.raises(ConfigError, match=r"SERVICE\.NAMESPACE"):
        asyncio.run(main())
