"""The decider over a real `KVRouter`, its watchers, and the link to its proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flexcache.router import link as link_module
from flexcache.router import messages
from flexcache.router.chooser import (
    Arrival,
    Choice,
    Decided,
    NotRouted,
    Outcome,
    RequestEnded,
    RouteRequest,
    Skipped,
    Usage,
)
from flexcache.router.decider import Decider, Terms, WaitingLine, Watchers
from flexcache.router.fleet import ModelCard, WorkerSpec
from flexcache.router.link import LinkServer, RemoteChooser
from flexcache.router.load import Work
from flexcache.router.messages import RunningRequest
from flexcache.router.roster import Probe, Roster
from flexcache.router.router import KVRouter
from flexcache.router.tokens.body import named_model

A, B = "http://a:1", "http://b:1"
PATIENCE_S = 60


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def arrival(name: str, *, tried: tuple[str, ...] = (), body: bytes = b"x") -> Arrival:
    return Arrival(request_id=name, method="POST", path="/v1/completions", body=body, tried=tried)


@dataclass
class World:
    """A decider with a clock that the test moves, before two engines of which B has two ranks."""

    max_requests: int | None = None
    now: float = 0.0
    is_failing: bool = False
    routing: KVRouter = field(init=False)
    decider: Decider = field(init=False)

    def __post_init__(self) -> None:
        self.routing = KVRouter(max_requests=self.max_requests)
        line = WaitingLine(10, PATIENCE_S)
        roster = Roster(self.routing, on_state=line.wake)
        self.decider = Decider(
            self.routing, roster, self.read, line,
            engine_headers={"Authorization": "Bearer key"}, clock=lambda: self.now,
        )  # fmt: skip
        ranks = [WorkerSpec(name=f"{B}#{n}", url=B, data_parallel_rank=n) for n in range(2)]
        roster.set_listed([WorkerSpec(name=A, url=A), *ranks])
        for url in (A, B):
            roster.probed(url, Probe.GOOD, 0.0)

    async def read(self, arrival: Arrival) -> RouteRequest:
        if self.is_failing:
            raise RuntimeError("a tokenizer with a fault")
        return RouteRequest(
            request_id=arrival.request_id, num_tokens=3, token_ids=[1, 2, 3],
            model=named_model(arrival),
        )  # fmt: skip

    @property
    def load(self) -> int:
        self.decider.check()
        return sum(w.requests for w in self.routing.stats(self.now).workers.values())


def test_a_choice_says_how_to_reach_the_worker_and_counts_until_it_ends() -> None:
    async def test() -> None:
        world = World()
        chosen = {}
        for number in range(3):
            choice = await world.decider.choose(arrival(str(number)))
            chosen[choice.worker] = choice
        assert set(chosen) == {A, f"{B}#0", f"{B}#1"}, "the idle ones first"
        assert chosen[A].headers == {"Authorization": "Bearer key"}
        assert chosen[f"{B}#1"].headers["X-data-parallel-rank"] == "1"
        assert chosen[f"{B}#1"].url == B and A in chosen[f"{B}#1"].others
        assert chosen[A].matched_tokens == 0
        assert world.load == 3
        with pytest.raises(ValueError, match="is running"):
            await world.decider.choose(arrival("1"))
        for number in range(3):
            world.decider.first_token(str(number))
            world.decider.ended(str(number), Outcome.DONE, Usage(cached_tokens=0))
            world.decider.ended(str(number), Outcome.DONE)
        assert world.load == 0 and world.decider.running == {}

    run(test())


def test_a_failing_tokenizer_does_not_stop_routing() -> None:
    async def test() -> None:
        world = World(is_failing=True)
        choice = await world.decider.choose(arrival("a"))
        assert choice.matched_tokens is None and world.load == 1

    run(test())


def test_a_fault_in_what_learns_from_answers_does_not_reach_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        world = World()
        await world.decider.choose(arrival("a"))
        routing = world.routing
        for part, name in ((routing.dispatcher, "first_token"), (routing.holdings, "ended")):
            monkeypatch.setattr(part, name, lambda *_, **__: 1 / 0)
        world.decider.first_token("a")
        world.decider.ended("a", Outcome.DONE)
        assert world.decider.running == {}
        assert caplog.text.count("routing_failed") == 2

    run(test())


def test_a_tried_worker_comes_last() -> None:
    async def test() -> None:
        world = World()
        for _ in range(20):
            choice = await world.decider.choose(arrival("a", tried=(A, f"{B}#0")))
            assert choice.worker == f"{B}#1"
            world.decider.ended("a", Outcome.DONE)

    run(test())


def test_a_reservation_whose_lease_is_over_ends() -> None:
    async def test() -> None:
        world = World(max_requests=1)
        for number in range(3):
            request = await world.decider.read(arrival(str(number)))
            await world.decider.decide(request, Terms(lease_s=10 + number))
        waiting = asyncio.create_task(world.decider.choose(arrival("late")))
        await asyncio.sleep(0)
        assert len(world.decider.line) == 1
        world.now = 10
        world.decider.expire()
        await waiting
        assert set(world.decider.running) == {"1", "2", "late"}
        world.now = 1000
        world.decider.expire()
        assert set(world.decider.running) == {"late"} and world.load == 1

    run(test())


def test_without_a_worker_requests_are_refused_also_those_that_wait() -> None:
    async def test() -> None:
        world = World(max_requests=1)
        for number in range(3):
            await world.decider.choose(arrival(str(number)))
        waiting = asyncio.create_task(world.decider.choose(arrival("late")))
        await asyncio.sleep(0)
        for url in (A, B):
            world.decider.roster.probed(url, Probe.BAD, 0.0)
        for task in (waiting, world.decider.choose(arrival("later"))):
            with pytest.raises(NotRouted) as refusal:
                await task
            assert refusal.value.status == 503
        assert world.decider.line.counts.refused["no_worker"] == 2

    run(test())


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_model_whose_workers_are_down_is_refused_at_once(is_failing: bool) -> None:
    async def test() -> None:
        world = World(is_failing=is_failing)
        world.routing.set_models(A, ["small"])
        for rank in range(2):
            world.routing.set_models(f"{B}#{rank}", ["large"])
        world.decider.roster.probed(A, Probe.BAD, 0.0)
        with pytest.raises(NotRouted, match="'small' is up") as refusal:
            await world.decider.choose(arrival("a", body=b'{"model": "small"}'))
        assert refusal.value.status == 503 and refusal.value.retry_after_s
        choice = await world.decider.choose(arrival("b", body=b'{"model": "large"}'))
        assert choice.url == B
        assert world.decider.line.counts.refused["no_worker"] == 1

    run(test())


def test_a_request_does_not_wait_for_workers_that_do_not_serve_its_model() -> None:
    async def test() -> None:
        world = World(max_requests=1)
        world.decider.roster.set_cards(A, [ModelCard("small")])
        world.decider.roster.set_cards(B, [ModelCard("large")])
        await world.decider.choose(arrival("a", body=b'{"model": "small"}'))
        waiting = asyncio.create_task(
            world.decider.choose(arrival("b", body=b'{"model": "small"}'))
        )
        await asyncio.sleep(0)
        assert len(world.decider.line) == 1
        choice = await world.decider.choose(arrival("c", body=b'{"model": "large"}'))
        assert choice.url == B
        world.decider.ended("a", Outcome.DONE)
        assert (await waiting).url == A

    run(test())


def test_complete_answers_are_compared_with_predictions() -> None:
    async def test() -> None:
        world = World()
        seen: list[tuple[Any, ...]] = []
        world.decider.on_answer = lambda *answer: seen.append(answer)
        for name, outcome in (("a", Outcome.DONE), ("b", Outcome.ABORTED)):
            await world.decider.choose(arrival(name))
            world.decider.ended(name, outcome, Usage(cached_tokens=2))
        ((running, cached_tokens),) = seen
        assert (running.work.num_tokens, running.predicted_tokens, cached_tokens) == (3, 0, 2)

    run(test())


def test_watchers_see_decisions_and_a_slow_one_what_it_missed() -> None:
    async def test() -> None:
        world = World()
        world.decider.watchers = Watchers(kept=3)
        events = world.decider.watchers.watch()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for number in range(3):
            await world.decider.choose(arrival(str(number)))
            world.decider.ended(str(number), Outcome.BROKEN)
        seen = [await first, *[await anext(events) for _ in range(3)]]
        assert [type(event) for event in seen] == [Decided, RequestEnded, Decided, Skipped]
        assert isinstance(seen[3], Skipped) and seen[3].count == 3
        await events.aclose()
        assert len(world.decider.watchers) == 0

    run(test())


# -- the link --------------------------------------------------------------------------------------


@asynccontextmanager
async def linked(world: World, path: Path) -> AsyncIterator[tuple[LinkServer, RemoteChooser]]:
    """The decider's and a proxy's end, here in one process."""
    endpoint = f"ipc://{path / 'link.sock'}"
    link = LinkServer(world.decider, endpoint)
    link.start()
    chooser = RemoteChooser(endpoint)
    await chooser.open()
    try:
        yield link, chooser
    finally:
        await chooser.close()
        await link.close()


def test_a_proxy_chooses_over_the_link(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (_, chooser):
            assert chooser.has_workers
            choice = await chooser.choose(arrival("a"))
            assert choice.worker in (A, f"{B}#0", f"{B}#1") and choice.matched_tokens == 0
            assert world.load == 1
            chooser.first_token("a")
            await until(lambda: world.decider.running["a"].first_token_s is not None)
            chooser.ended("a", Outcome.DONE, Usage(cached_tokens=0))
            await until(lambda: world.load == 0)
            assert chooser.num_unsupervised == 0

    run(test())


def test_refusals_pass_the_link(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        for url in (A, B):
            world.decider.roster.probed(url, Probe.BAD, 0.0)
        async with linked(world, tmp_path) as (_, chooser):
            with pytest.raises(NotRouted, match="no worker is up") as refusal:
                await chooser.choose(arrival("a"))
            assert refusal.value.status == 503 and refusal.value.retry_after_s

    run(test())


def test_a_client_that_leaves_the_line_holds_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(max_requests=1)
        async with linked(world, tmp_path) as (_, chooser):
            for number in range(3):
                await chooser.choose(arrival(str(number)))
            waiting = asyncio.create_task(chooser.choose(arrival("late")))
            await until(lambda: len(world.decider.line) == 1)
            waiting.cancel()
            await until(lambda: len(world.decider.line) == 0)
            chooser.ended("0", Outcome.DONE)
            await until(lambda: world.load == 2)

    run(test())


def test_a_fault_with_one_message_stops_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (_, chooser):
            await chooser.choose(arrival("a"))
            with monkeypatch.context() as patch:
                patch.delattr(world.decider, "line")
                chooser.first_token("a")
                await until(lambda: world.decider.running["a"].first_token_s is not None)
            await chooser.choose(arrival("b"))
            assert world.load == 2 and chooser.num_unsupervised == 0

    run(test())


def test_a_proxy_that_cannot_connect_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, faults = link_module.find_listener, [OSError("no descriptors left")]

    def find_listener(endpoint: str, has_keys: bool) -> Any:
        if faults:
            raise faults.pop()
        return real(endpoint, has_keys)

    monkeypatch.setattr(link_module, "find_listener", find_listener)

    async def test() -> None:
        async with linked(World(), tmp_path) as (_, chooser):
            assert chooser.is_linked

    run(test())


def test_the_requests_of_a_lost_proxy_end(tmp_path: Path) -> None:
    async def test() -> None:
        world = World(max_requests=1)
        async with linked(world, tmp_path) as (link, chooser):
            for number in range(3):
                await chooser.choose(arrival(str(number)))
            waiting = asyncio.create_task(chooser.choose(arrival("late")))
            await until(lambda: len(world.decider.line) == 1)
            (identity,) = link._proxies
            link._lose(identity, "test")
            assert world.load == 0 and link.num_lost == 1
            await until(lambda: len(world.decider.line) == 0)
            waiting.cancel()

    run(test())


def test_a_new_decider_learns_of_running_requests_and_those_begun_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "DECIDER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(link_module, "BEAT_S", 0.05)

    async def test() -> None:
        old, new = World(), World()
        async with linked(old, tmp_path) as (link, chooser):
            await chooser.choose(arrival("before"))
            chooser.first_token("before")
            await link.close()
            asked = asyncio.create_task(chooser.choose(arrival("asked in vain")))
            assert (await asked).matched_tokens is None
            assert not chooser.is_linked
            alone = [(await chooser.choose(arrival(f"alone {n}"))).worker for n in range(1)]
            assert len({*alone, asked.result().worker}) == 2, "the one with the fewest"
            chooser.ended("alone 0", Outcome.DONE)
            again = LinkServer(new.decider, chooser._endpoint)
            again.start()
            await until(lambda: chooser.is_linked)
            assert set(new.decider.running) == {"before", "asked in vain"}
            assert new.decider.running["before"].first_token_s is not None
            assert new.load == 2
            for name in ("before", "asked in vain"):
                chooser.ended(name, Outcome.DONE)
            await until(lambda: new.load == 0)
            assert chooser.num_unsupervised == 2
            await again.close()

    run(test())


def test_a_worker_that_fails_without_a_decider_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (_, chooser):
            chooser._lose("test")
            first = await chooser.choose(arrival("a"))
            chooser.ended("a", Outcome.REFUSED)
            for number in range(20):
                choice = await chooser.choose(arrival(str(number)))
                assert choice.worker != first.worker
                chooser.ended(str(number), Outcome.DONE)

    run(test())


def test_without_a_decider_a_model_is_served_by_those_that_list_it(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (link, chooser):
            world.decider.roster.set_cards(A, [ModelCard("small")])
            world.decider.roster.set_cards(B, [ModelCard("large")])
            world.decider.roster.probed(A, Probe.BAD, 0.0)
            link.announce()
            await until(lambda: chooser._models == {"small", "large"})
            chooser._lose("test")
            for body in (b'{"model": "large"}', b'{"model": "new"}', b"{}"):
                choice = await chooser.choose(arrival(str(body), body=body))
                assert choice.url == B
            with pytest.raises(NotRouted) as refusal:
                await chooser.choose(arrival("a", body=b'{"model": "small"}'))
            assert refusal.value.status == 503

    run(test())


def test_an_answer_that_comes_too_late_is_corrected(tmp_path: Path) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (_, chooser):
            await world.decider.choose(arrival("left"))
            await world.decider.choose(arrival("moved"))
            moved = RunningRequest("moved", f"{B}#1", Work(7, 7))
            chooser._running["moved"] = moved
            for name in ("left", "moved"):
                choice = Choice(worker=A, url=A, headers={}, matched_tokens=None)
                said = messages.Chosen(RunningRequest(name, A, Work(1, 1)), choice)
                chooser._take(said)
            await until(lambda: set(world.decider.running) == {"moved"})
            await until(lambda: world.decider.running["moved"].worker == f"{B}#1")
            assert world.load == 1

    run(test())


def test_a_silent_proxy_loses_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        world = World()
        async with linked(world, tmp_path) as (link, chooser):
            await chooser.choose(arrival("a"))
            link.expire()
            assert world.load == 1
            monkeypatch.setattr(link_module, "PROXY_LEASE_S", -1.0)
            link.expire()
            assert world.load == 0

    run(test())
