"""`flexcache router` before fake engines: where requests go, what happens when a process dies, and
who may use the control API."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the proxy needs the extra `router`")

import aiohttp
from fake_openai_engine import FakeEngine
from ports import free_ports
from router_process import Ended, RouterProcess, complete, until

PROMPT = list(range(1000, 1400))
BLOCK = 16


@contextlib.contextmanager
def engines(count: int, *, events: bool = False, **behaviour: object) -> Iterator[list[FakeEngine]]:
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            pair: list[str | None] = [None, None]
            if events:
                pair = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
            engine = FakeEngine(events=pair[0], replay=pair[1], **behaviour)
            started.append(stack.enter_context(engine))
        yield started


def ask(url: str, prompt: list[int], **options: bool) -> Ended:
    return asyncio.run(complete(url, prompt, **options))


class Load:
    """Clients that send one request after the other, until they are stopped."""

    def __init__(self, url: str, clients: int = 16) -> None:
        self.ended: list[Ended] = []
        self._url = url
        self._clients = clients
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_for_more(self, count: int = 50) -> None:
        """Wait until that many further requests have ended."""
        goal = len(self.ended) + count
        until(lambda: len(self.ended) >= goal)

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(n, session) for n in range(self._clients)))

    async def _client(self, number: int, session: aiohttp.ClientSession) -> None:
        rng = random.Random(number)
        while not self._is_over.is_set():
            prompt = [rng.randrange(50_000) for _ in range(rng.randrange(20, 200))]
            self.ended.append(await complete(self._url, prompt, session))


@pytest.fixture(
    params=[
        pytest.param(0, id="one process", marks=pytest.mark.whole),
        pytest.param(2, id="two proxies"),
    ]
)
def proxies(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_requests_go_where_their_blocks_are(proxies: int) -> None:
    with engines(3, events=True) as three, RouterProcess(three, proxies=proxies) as router:
        three[2].hold(PROMPT)
        until(lambda: router.post("/query", {"token_ids": PROMPT})["workers"][three[2].url]["gpu"])
        answers = [ask(router.url, PROMPT, is_streamed=False) for _ in range(4)]
        assert all(answer.is_whole for answer in answers)
        assert {answer.worker for answer in answers} == {three[2].url}
        assert {answer.matched for answer in answers} == {len(PROMPT) // BLOCK * BLOCK - BLOCK}
        until(lambda: router.stats()["routing"]["cached_tokens"]["exact"] == 4)
        assert router.num_reserved() == 0
        parts = [json.loads(line) for line in router.get("/dump").splitlines()]
        held = {part["holders"][at][0] for part in parts for each in part["sets"] for at in each}
        assert held == {three[2].events}
        assert router.stop() == 0


def test_a_killed_engine_loses_only_answers_that_had_begun(proxies: int) -> None:
    with (
        engines(3, ttft_s=0.02, token_interval_s=0.005, tokens=6) as three,
        RouterProcess(three, proxies=proxies) as router,
    ):
        with Load(router.url) as load:
            load.wait_for_more()
            three[0].kill()
            load.wait_for_more(200)
            until(lambda: router.states()[three[0].url] == "down")
            before = len(load.ended)
            load.wait_for_more()
            assert {each.worker for each in load.ended[before + 16 :]} <= {
                three[1].url, three[2].url,
            }  # fmt: skip
            three[0].start()
            until(lambda: router.states()[three[0].url] == "up")
            load.wait_for_more()
        assert all(each.is_clear for each in load.ended)
        lost = [each for each in load.ended if not each.is_whole]
        assert all(each.worker == three[0].url for each in lost if each.status == 200)
        assert len(lost) <= 16, "one for each client: requests without an answer were tried again"
        until(lambda: router.num_reserved() == 0)


def test_a_killed_decider_is_replaced_and_no_request_notices() -> None:
    with (
        engines(3, events=True, token_interval_s=0.005, tokens=6) as three,
        RouterProcess(three, proxies=2) as router,
    ):
        three[1].hold(PROMPT)
        (decider,) = router.children("decider")
        with Load(router.url) as load:
            load.wait_for_more()
            os.kill(decider, signal.SIGKILL)
            load.wait_for_more(100)
            until(lambda: router.children("decider") not in ([], [decider]))
            until(router.is_ready)
            load.wait_for_more(100)
        assert all(each.is_whole for each in load.ended)
        until(lambda: router.num_reserved() == 0)
        query = {"token_ids": PROMPT}
        until(lambda: router.post("/query", query)["workers"][three[1].url]["gpu"])


@pytest.mark.whole
def test_a_new_decider_counts_the_requests_that_run() -> None:
    with engines(1, ttft_s=3600) as (engine,), RouterProcess([engine], proxies=1) as router:
        sending = threading.Thread(target=lambda: ask(router.url, PROMPT), daemon=True)
        sending.start()
        until(lambda: router.num_reserved() == 1)
        (decider,) = router.children("decider")
        os.kill(decider, signal.SIGKILL)
        until(lambda: router.children("decider") not in ([], [decider]))
        until(router.is_ready)
        until(lambda: router.num_reserved() == 1)
        engine.kill()
        sending.join()
        until(lambda: router.num_reserved() == 0)


@pytest.mark.whole
def test_a_killed_proxy_loses_its_own_requests_and_their_reservations_end() -> None:
    with (
        engines(2, ttft_s=0.02, token_interval_s=0.01, tokens=8) as two,
        RouterProcess(two, proxies=2) as router,
    ):
        victim, survivor = router.children("proxy")
        with Load(router.url) as load:
            load.wait_for_more()
            os.kill(victim, signal.SIGKILL)
            load.wait_for_more(100)
            until(lambda: len(set(router.children("proxy")) - {victim}) == 2)
            load.wait_for_more(50)
        assert survivor in router.children("proxy")
        assert all(each.is_clear for each in load.ended)
        assert sum(not each.is_whole for each in load.ended) <= 16
        assert load.ended[-1].is_whole
        until(lambda: router.num_reserved() == 0)
        until(lambda: sum(engine.stats()["running"] for engine in two) == 0)


@pytest.mark.whole
def test_clients_that_leave_hold_nothing(proxies: int) -> None:
    """They leave at any time: while queued, before the first byte, and within the answer."""

    async def leave_at_any_time(url: str) -> None:
        rng = random.Random(3)
        async with aiohttp.ClientSession() as session:
            for _ in range(10):
                tasks = [
                    asyncio.create_task(complete(url, [rng.randrange(9)] * 40, session))
                    for _ in range(40)
                ]
                for task in tasks:
                    await asyncio.sleep(rng.random() / 200)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with (
        engines(2, ttft_s=0.02, token_interval_s=0.01) as two,
        RouterProcess(two, proxies=proxies, max_requests_per_worker=4) as router,
    ):
        asyncio.run(leave_at_any_time(router.url))
        until(lambda: router.num_reserved() == 0)
        until(lambda: router.stats()["queue"]["waiting"] == 0)
        until(lambda: sum(engine.stats()["running"] for engine in two) == 0)
        assert ask(router.url, PROMPT).is_whole


@pytest.mark.whole
def test_requests_wait_in_a_bounded_queue(proxies: int) -> None:
    async def send(url: str, count: int) -> list[Ended]:
        async with aiohttp.ClientSession() as session:
            return list(
                await asyncio.gather(*(complete(url, PROMPT, session) for _ in range(count)))
            )

    with (
        engines(2, ttft_s=0.3, tokens=1) as two,
        RouterProcess(two, proxies=proxies, max_requests_per_worker=1, queue_size=3) as router,
    ):
        answers = asyncio.run(send(router.url, 12))
        whole = [each for each in answers if each.is_whole]
        refused = [each for each in answers if each.status == 429]
        assert len(whole) + len(refused) == 12
        assert len(whole) >= 5, "two run and three wait"
        assert refused and all(int(each.retry_after or 0) >= 1 for each in refused)
        assert router.stats()["queue"]["refused"]["full"] == len(refused)


@pytest.mark.whole
def test_forms_go_to_an_engine_of_the_model_that_they_name(proxies: int) -> None:
    async def transcribe(url: str, model: str) -> str:
        form = aiohttp.FormData({"file": io.BytesIO(b"speech" * 50_000), "model": model})
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/audio/transcriptions", data=form) as answer,
        ):
            assert answer.status == 200
            return answer.headers["x-flexcache-worker"]

    with (
        FakeEngine(model="writes") as writes, FakeEngine(model="listens") as listens,
        RouterProcess([writes, listens], proxies=proxies) as router,
    ):  # fmt: skip
        for model, engine in [("listens", listens), ("writes", writes)] * 5:
            assert asyncio.run(transcribe(router.url, model)) == engine.url


def test_without_an_engine_that_is_up_the_answer_is_503() -> None:
    with engines(1) as (engine,), RouterProcess([engine]) as router:
        engine.kill()
        until(lambda: router.states()[engine.url] == "down")
        answer = ask(router.url, PROMPT)
        assert answer.status == 503
        assert router.call("GET", "/readyz")[0] == 503
        assert router.call("GET", "/healthz")[0] == 200


def test_sigterm_lets_running_answers_end(proxies: int) -> None:
    with (
        engines(1, token_interval_s=0.1, tokens=20) as (engine,),
        RouterProcess([engine], proxies=proxies) as router,
    ):
        answers: list[Ended] = []
        sending = threading.Thread(target=lambda: answers.append(ask(router.url, PROMPT)))
        sending.start()
        until(lambda: engine.stats()["running"] == 1)
        assert router.stop() == 0
        sending.join()
        assert answers[0].is_whole


def test_children_end_with_a_killed_supervisor() -> None:
    with engines(1) as (engine,), RouterProcess([engine], proxies=2) as router:
        children = [*router.children("decider"), *router.children("proxy")]
        assert len(children) == 3
        router.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.whole
def test_workers_come_drain_and_go_under_load(proxies: int) -> None:
    with (
        engines(3, token_interval_s=0.005, tokens=4) as (a, b, c),
        RouterProcess(
            [a, b], proxies=proxies, allowed_workers=r"http://127\.0\.0\.1:\d+"
        ) as router,
        Load(router.url) as load,
    ):

        def is_used(engine: FakeEngine) -> bool:
            before = engine.stats()["requests"]
            load.wait_for_more(100)
            return bool(engine.stats()["requests"] > before)

        assert is_used(a) and is_used(b)
        router.post("/workers", {"url": c.url})
        until(lambda: router.states()[c.url] == "up")
        assert is_used(c)
        router.post("/workers/drain", {"worker": a.url})
        until(lambda: router.stats()["workers"][a.url]["requests"] == 0)
        assert not is_used(a)
        router.post("/workers/drain", {"worker": a.url, "draining": False})
        assert is_used(a)
        assert router.call("DELETE", f"/workers?worker={b.url}")[0] == 200
        assert set(router.get("/workers")["workers"]) == {a.url, c.url}
        load.wait_for_more(100)  # each client ends a request, of which one may be at b
        until(lambda: b.stats()["running"] == 0)
        assert not is_used(b)
        assert router.call("DELETE", f"/workers?worker={b.url}")[0] == 404
    assert all(each.is_whole for each in load.ended)


@pytest.mark.whole
def test_workers_are_listed_in_a_file_that_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"

    def write(*workers: FakeEngine) -> None:
        new = tmp_path / "new.toml"
        new.write_text("".join(f'[[workers]]\nurl = "{each.url}"\n' for each in workers))
        new.replace(file)

    with engines(2) as (a, b):
        write(a)
        with RouterProcess([], f"--config={file}") as router:
            assert router.states() == {a.url: "up"}
            write(b)
            until(lambda: router.states() == {b.url: "up"})
            assert ask(router.url, PROMPT).worker == b.url


# -- the control API -------------------------------------------------------------------------------


def test_selections_and_reservations() -> None:
    with engines(2, events=True) as (a, b), RouterProcess([a, b]) as router:
        a.hold(PROMPT)
        query = {"token_ids": PROMPT}
        until(lambda: router.post("/query", query)["workers"][a.url]["gpu"])
        held = len(PROMPT) // BLOCK * BLOCK - BLOCK
        selected = router.post("/select", {"token_ids": PROMPT, "model_name": "fake"})
        assert (selected["worker_id"], selected["endpoint"]) == (a.url, a.url)
        assert selected["overlap"] == {
            "longest_matched": held, "gpu": held, "cpu": held, "disk": held,
        }  # fmt: skip
        assert selected["effective_prefill_tokens"] == len(PROMPT) - held
        assert router.num_reserved() == 0
        reserved = router.post("/select_and_reserve", {"token_ids": PROMPT, "selection_id": "x"})
        assert reserved["worker_id"] == a.url and router.num_reserved() == 1
        assert router.call("POST", "/reservations", {**query, "selection_id": "x"})[0] == 409
        router.post("/reservations/x/prefill_complete", {})
        assert router.stats()["workers"][a.url]["waiting_requests"] == 0
        assert router.call("DELETE", "/reservations/x")[0] == 200
        assert router.call("DELETE", "/reservations/x")[0] == 404
        assert router.num_reserved() == 0
        chosen = router.post("/reservations", {"isl_tokens": 9, "worker_id": b.url})
        assert chosen["worker_id"] == b.url
        router.post("/reservations", {"isl_tokens": 9, "lease_s": 0.1, "worker_id": a.url})
        until(lambda: router.num_reserved() == 1)
        scores = router.post("/score", {"token_ids": PROMPT})["scores"]
        assert [score["worker_id"] for score in scores] == [a.url, b.url]
        assert scores[0]["cost"] < scores[1]["cost"]
        request = {"model": "fake", "prompt": PROMPT}
        body = {"request": request, "path": "/v1/completions"}
        assert router.post("/select", body)["worker_id"] == a.url
        for bad in ({}, {"token_ids": "x"}, {"token_ids": [-1]}, {"isl_tokens": -1}, []):
            assert router.call("POST", "/select", bad)[0] == 400


def test_decisions_are_streamed() -> None:
    with engines(1) as (engine,), RouterProcess([engine]) as router:
        with urllib.request.urlopen(f"{router.control}/decisions", timeout=60) as stream:
            assert ask(router.url, PROMPT).is_whole
            events = []
            while len(events) < 2:
                line = stream.readline()
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
        assert [event["event"] for event in events] == ["decided", "ended"]
        assert events[1]["outcome"] == "done"
        assert events[0]["worker"] == events[1]["worker"] == engine.url


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/stats", {}, 200),
        ("GET", "/stats", {"Host": "evil.example"}, 403),
        ("GET", "/stats", {"Host": "127.0.0.1.evil.example"}, 403),
        ("GET", "/stats", {"Origin": "https://evil.example"}, 403),
        ("GET", "/stats", {"Origin": "null"}, 403),
        ("GET", "/stats", {"Origin": "http://["}, 403),
        ("GET", "/stats", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", "/stats", {"Sec-Fetch-Site": "same-site"}, 403),
        ("GET", "/healthz", {"Host": "evil.example"}, 403),
        ("POST", "/workers", {"Content-Type": "text/plain"}, 415),
        ("POST", "/workers", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/workers", {}, 403),
        ("GET", "/ui/../api.py", {}, 404),
        ("GET", "/ui/..%2fapi.py", {}, 404),
        ("GET", "/nothing", {}, 404),
    ],
)
def test_the_control_api_refuses_what_a_web_page_could_send(
    open_router: RouterProcess, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    body = {"url": "http://10.0.0.1:1"} if method == "POST" else None
    assert open_router.call(method, path, body, headers)[0] == status


@pytest.fixture(scope="module")
def open_router() -> Iterator[RouterProcess]:
    with engines(1) as started, RouterProcess(started) as router:
        yield router


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://10.1.2.3:8000", 201),
        ("http://10.1.2.3:8000/", 201),
        ("http://10.1.2.3:8000@evil.example", 400),
        ("http://evil.example:8000", 403),
        ("http://169.254.169.254:80", 403),
        ("http+dns://10.1.2.3:8000", 400),
    ],
)
def test_only_allowed_workers_are_added(
    narrow_router: RouterProcess, url: str, status: int
) -> None:
    assert narrow_router.call("POST", "/workers", {"url": url})[0] == status


@pytest.mark.parametrize(
    ("field", "events", "status"),
    [
        ("events", "tcp://10.1.2.3:5557,tcp://10.1.2.3:5558", 201),
        ("events", "tcp://{host}:5557", 201),
        ("events", "tcp://169.254.169.254:5557", 403),
        ("events", "tcp://10.1.2.3:5557,tcp://169.254.169.254:5558", 403),
        ("shared_events", "tcp://169.254.169.254:5557", 403),
        ("events", "ipc:///run/user/1000/secret.sock", 403),
        ("events", "tcp://10.1.2.3:0;169.254.169.254:5557", 400),
    ],
)
def test_events_of_an_added_worker_come_from_its_host(
    narrow_router: RouterProcess, field: str, events: str, status: int
) -> None:
    body = {"url": "http://10.1.2.3:8000", field: [events]}
    assert narrow_router.call("POST", "/workers", body)[0] == status


@pytest.mark.parametrize(
    ("cache_url", "status"),
    [
        ("http://10.1.2.3:9470", 201),
        ("https://{host}:9470/", 201),
        ("http://169.254.169.254:9470", 403),
        ("http://10.1.2.3:9470@169.254.169.254:80", 400),
    ],
)
def test_the_cache_of_an_added_worker_is_on_its_host(
    narrow_router: RouterProcess, cache_url: str, status: int
) -> None:
    body = {"url": "http://10.1.2.3:8000", "cache_url": cache_url}
    assert narrow_router.call("POST", "/workers", body)[0] == status


@pytest.fixture(scope="module")
def narrow_router() -> Iterator[RouterProcess]:
    """A router that takes workers of one network only."""
    allowed = r"http://10\.1\.2\.\d+:8000"
    with RouterProcess(wait=False, allowed_workers=allowed) as router:
        until(lambda: _answers(router))
        yield router


def _answers(router: RouterProcess) -> bool:
    try:
        return router.call("GET", "/healthz")[0] == 200
    except OSError:
        return False


def test_a_token_guards_everything_but_health() -> None:
    with engines(1) as started, RouterProcess(started, control_token="s3cret") as router:
        for path in ("/stats", "/metrics", "/workers", "/decisions", "/dump"):
            assert router.call("GET", path)[0] == 401
            assert router.call("GET", path, headers={"Authorization": "Bearer wrong"})[0] == 401
        for path in ("/select", "/score", "/reservations", "/workers", "/workers/drain"):
            assert router.call("POST", path, {})[0] == 401
        right = {"Authorization": "Bearer s3cret"}
        assert router.call("GET", "/stats", headers=right)[0] == 200
        assert router.call("GET", "/readyz")[0] == 200
        for path in ("/", "/ui", "/ui/"):
            assert router.call("GET", path)[0] == 200


def refusal(*options: str, **environ: str) -> str:
    """Return what a router says that refuses to start."""
    run = subprocess.run(
        [sys.executable, "-m", "flexcache.cli", "router", *options],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run
    assert "Traceback" not in run.stdout + run.stderr
    return run.stdout + run.stderr


def test_what_cannot_work_is_refused_in_one_line() -> None:
    assert "policy" in refusal("--worker=http://a:1", "--policy=best", "--port=0", "--proxies=1")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ImportError('gone', name='aiohttp')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert "pip install '.[router]'" in refusal(PYTHONPATH=path)


# -- several routers -------------------------------------------------------------------------------


def sync_pairs(count: int) -> list[str]:
    return [",".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2)) for _ in range(count)]


@pytest.mark.whole
def test_routers_count_each_others_requests_and_drop_those_of_a_dead_one() -> None:
    one, two = sync_pairs(2)
    with engines(2, ttft_s=3600) as both, contextlib.ExitStack() as stack:
        first = stack.enter_context(RouterProcess(both, sync_endpoint=one, peers=two))
        second = stack.enter_context(RouterProcess(both, sync_endpoint=two, peers=one))
        until(lambda: first.stats()["peers"][two.split(",")[0]]["is_up"])
        for number in range(6):
            reservation = {"isl_tokens": 1000, "selection_id": str(number)}
            first.post("/reservations", reservation)
        until(lambda: second.num_reserved() == 6)
        loads = [first.stats()["workers"][e.url]["requests"] for e in both]
        assert [second.stats()["workers"][e.url]["requests"] for e in both] == loads
        second.post("/reservations", {"isl_tokens": 9, "selection_id": "0"})
        until(lambda: first.num_reserved() == 7)
        assert first.call("DELETE", "/reservations/0")[0] == 200
        until(lambda: second.num_reserved() == 6)
        late = stack.enter_context(
            RouterProcess(both, sync_endpoint=sync_pairs(1)[0], peers=f"{one} {two}")
        )
        assert late.num_reserved() == 6, "it is ready only once it has caught up"
        first.kill()
        until(lambda: second.num_reserved() == 1)
        until(lambda: late.num_reserved() == 1)


@pytest.mark.whole
def test_a_router_that_restarts_forgets_its_requests_everywhere() -> None:
    one, two = sync_pairs(2)
    with engines(1) as started, RouterProcess(started, sync_endpoint=two, peers=one) as other:
        with RouterProcess(started, sync_endpoint=one, peers=two) as first:
            first.post("/reservations", {"isl_tokens": 5, "lease_s": 3600})
            until(lambda: other.num_reserved() == 1)
            first.kill()
        with RouterProcess(started, sync_endpoint=one, peers=two) as again:
            until(lambda: other.num_reserved() == 0)
            again.post("/reservations", {"isl_tokens": 5})
            until(lambda: other.num_reserved() == 1)


def test_a_router_that_starts_has_the_index_of_another_one() -> None:
    one, two = sync_pairs(2)
    longer = PROMPT + PROMPT

    def held(router: RouterProcess, prompt: list[int]) -> int:
        (found,) = router.post("/query", {"token_ids": prompt})["workers"].values()
        return int(found["gpu"])

    with engines(1, events=True) as (engine,), contextlib.ExitStack() as stack:
        first = stack.enter_context(RouterProcess([engine], sync_endpoint=one))
        engine.hold(PROMPT)
        until(lambda: held(first, PROMPT))
        # To the others it does not tell again what it told.
        options = f"--worker={engine.url}", f"--events={engine.url}={engine.events}"
        alone = stack.enter_context(RouterProcess((), *options))
        second = stack.enter_context(RouterProcess((), *options, sync_endpoint=two, peers=one))
        known = held(first, PROMPT)
        assert held(second, PROMPT) == known, "it is ready only once it has taken over"
        assert held(alone, PROMPT) == 0
        engine.hold(longer)  # new blocks follow those that are not told again
        for router in (first, second):
            until(lambda router=router: held(router, longer) > known)
        engine.clear()
        for router in (first, second):
            until(lambda router=router: not held(router, PROMPT))
