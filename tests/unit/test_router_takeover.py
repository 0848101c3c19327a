"""A router that starts has the index of another one, and if it cannot, goes on without."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from event_publisher import stored
from ports import free_ports

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.subscriber import Position
from flexcache.events.wire import (
    NUMBER_BYTES,
    BlockRemoved,
    Event,
    Page,
    encode_batch,
)
from flexcache.router import takeover
from flexcache.router.chooser import RouteRequest
from flexcache.router.events import KnownSource
from flexcache.router.feed import Feed
from flexcache.router.fleet import EventSource, Tier, WorkerSpec
from flexcache.router.index import BlockForm, Holder, IndexPart, KVIndexer
from flexcache.router.messages import TOPIC, encode_life
from flexcache.router.peers import LifePublisher
from flexcache.router.router import KVRouter
from flexcache.router.takeover import VERSION, Heading, IndexPages, take_over

PATIENCE_S = 60.0
PROMPTS = [range(start, start + 20) for start in (100, 200, 300)]
ANY_PORT = "tcp://127.0.0.1:0"


def pair() -> str:
    return ",".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2))


class Engine:
    """Publishes events and repeats none, as engines do unless they are told to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self.source = EventSource(f"tcp://127.0.0.1:{free_ports(1)[0]}")
        self.begin()

    def begin(self) -> None:
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.xpub_verbose = True
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._socket.bind(self.source.endpoint)
                break
            except zmq.ZMQError:  # a socket lets go of its address some time after it is closed
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self._number = 0

    async def is_followed(self) -> None:
        """Wait for a subscription more."""
        await until(lambda: bool(self._socket.poll(0)))
        self._socket.recv()

    def publish(self, *events: Event) -> None:
        number = self._number.to_bytes(NUMBER_BYTES, "big")
        self._socket.send_multipart([b"kv@pod@model", number, encode_batch(1.0, events)])
        self._number += 1

    async def lose(self) -> None:
        """Have a batch get lost."""
        self._number += 1

    async def restart(self) -> None:
        """Begin again, for two followers."""
        self.close()
        self.begin()
        await self.is_followed()
        await self.is_followed()

    def close(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def engine() -> Iterator[Engine]:
    with zmq.Context() as context:
        started = Engine(context)
        try:
            yield started
        finally:
            started.close()


class Router:
    """What a router knows of one source, and where it tells others."""

    def __init__(
        self, source: EventSource, *, is_held: bool = False, max_blocks: int = 1000
    ) -> None:
        self.sync = pair()
        self.endpoint = source.endpoint
        self.routing = KVRouter(max_blocks=max_blocks)
        self.routing.set_workers([WorkerSpec(name="w", url="http://w", sources=(source,))])
        self.feed = Feed(self.routing, asyncio.get_running_loop(), is_held=is_held)
        self.feed.set_sources([source])
        pages = IndexPages(self.feed, self.routing.holdings)
        self.publisher = LifePublisher(self.sync, list, pages.page)
        self.publisher.start()

    @property
    def known(self) -> list[int]:
        """How much is known of each prompt."""
        found = []
        for prompt in PROMPTS:
            tokens = np.array([*prompt, 0], np.uint32)
            request = RouteRequest(request_id="r", num_tokens=len(tokens), token_ids=tokens)
            (score,) = self.routing.scores(request, 0.0)
            found.append(sum(score.matched.values()))
        self.routing.check()
        return found

    async def take_over(self, *pairs: str) -> None:
        await asyncio.wait_for(take_over(pairs, self.feed, self.routing.holdings), PATIENCE_S)

    async def close(self) -> None:
        await asyncio.to_thread(self.publisher.close)
        self.feed.close()


@asynccontextmanager
async def routing(source: EventSource, **options: Any) -> AsyncIterator[Router]:
    router = Router(source, **options)
    try:
        yield router
    finally:
        await router.close()


@asynccontextmanager
async def known(*prompts: range) -> AsyncIterator[tuple[Engine, Router]]:
    """Run an engine that has stored prompts, and a router that knows it."""
    with engine() as one:
        async with routing(one.source) as first:
            await one.is_followed()
            for prompt in prompts:
                one.publish(stored(prompt))
            await until(lambda: first.known == [20 * (each in prompts) for each in PROMPTS])
            yield one, first


async def until(holds: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE_S)

    asyncio.run(bounded())


def test_a_router_that_starts_knows_what_an_engine_does_not_tell_again() -> None:
    async def test() -> None:
        with engine() as one:
            async with routing(one.source) as first:
                await one.is_followed()
                one.publish(stored(PROMPTS[0]), stored(PROMPTS[1]))
                await until(lambda: first.known == [20, 20, 0])
                async with (
                    routing(one.source) as alone, routing(one.source, is_held=True) as second
                ):  # fmt: skip
                    await one.is_followed()
                    await one.is_followed()
                    one.publish(BlockRemoved([*PROMPTS[0][15:]], "GPU"))  # waits in its socket
                    await second.take_over(first.sync)
                    assert second.known in ([20, 20, 0], [15, 20, 0])
                    one.publish(stored(PROMPTS[2]), BlockRemoved([*PROMPTS[1][:]], "GPU"))
                    for router in (first, second):
                        await until(lambda router=router: router.known == [15, 0, 20])
                    await until(lambda: alone.known == [0, 0, 20])
                    # and gives it on
                    async with routing(one.source, is_held=True) as third:
                        await one.is_followed()
                        await third.take_over(second.sync)
                        assert third.known == [15, 0, 20]

    run(test)


@pytest.mark.parametrize("happens", [Engine.lose, Engine.restart])
def test_what_was_taken_over_is_forgotten_as_soon_as_it_may_be_wrong(
    happens: Callable[[Engine], Awaitable[None]],
) -> None:
    async def test() -> None:
        async with (
            known(*PROMPTS[:2]) as (one, first),
            routing(one.source, is_held=True) as second,
        ):
            await one.is_followed()
            await second.take_over(first.sync)
            assert second.known == [20, 20, 0]
            await happens(one)
            one.publish(stored(PROMPTS[2]))
            await until(lambda: second.known == [0, 0, 20])

    run(test)


@pytest.mark.parametrize("is_back_before", [True, False])
def test_what_an_engine_stores_after_a_restart_is_known_to_a_router_that_starts(
    is_back_before: bool,
) -> None:
    async def test() -> None:
        async with known(*PROMPTS[:2]) as (one, first):
            one.close()
            if is_back_before:
                one.begin()
                await one.is_followed()
                await until(lambda: first.known == [0, 0, 0])
            async with routing(one.source, is_held=True) as second:
                if is_back_before:
                    await one.is_followed()
                await second.take_over(first.sync)
                if not is_back_before:
                    one.begin()
                    await one.is_followed()
                    await one.is_followed()
                one.publish(stored(PROMPTS[2]))
                for router in (first, second):
                    await until(lambda router=router: router.known == [0, 0, 20])

    run(test)


def test_an_index_that_does_not_fit_is_not_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with (
            known(PROMPTS[0]) as (one, first),
            routing(one.source, is_held=True, max_blocks=19) as second,
        ):
            await second.take_over(first.sync)
            assert second.known == [0, 0, 0]
            assert "are more than max_blocks" in caplog.text

    run(test)


def test_a_router_that_knows_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at the first, the second has just started too."""
    monkeypatch.setattr(takeover, "_ANSWER_S", 0.2)

    async def test() -> None:
        async with (
            known(PROMPTS[0]) as (one, first),
            routing(one.source, is_held=True) as other,
            routing(one.source, is_held=True) as second,
        ):
            await one.is_followed()
            await one.is_followed()
            await second.take_over(pair(), other.sync, first.sync)
            assert second.known == [20, 0, 0]
            await other.take_over(pair())
            one.publish(stored(PROMPTS[1]))
            await until(lambda: other.known == [0, 20, 0])

    run(test)


def test_a_source_that_leaves_and_returns_meanwhile_begins_with_nothing() -> None:
    async def test() -> None:
        source = EventSource("tcp://127.0.0.1:9", "tcp://127.0.0.1:10")
        feed = Feed(KVRouter(), asyncio.get_running_loop(), is_held=True)
        feed.set_sources([source])
        feed.begin_at({source.endpoint: Position(7, 1), "tcp://127.0.0.1:10": Position(7, 1)})
        assert feed.taken_over == {source.endpoint}
        feed.set_sources([])
        feed.set_sources([source])
        assert feed.taken_over == set()
        feed.release(is_whole=True)
        feed.close()

    run(test)


# -- others that answer at a router's port ---------------------------------------------------------

Answers = Callable[[int, str], tuple[Any, int | None] | None]
"""For a page's number and the source: its content, and the number of the next one."""


def heading(source: str, **fields: Any) -> Heading:
    known = KnownSource(source, [(None, "GPU", False, Tier.GPU)], {None: True}, BlockForm(1))
    fields = {"version": VERSION, "num_blocks": 5, **fields}
    return Heading(runs=[], sources=[(known, Position(3, 1))], **fields)


def part(source: str, rank: int | None = None, **fields: Any) -> IndexPart:
    index = KVIndexer()
    index.stored(Holder(source, Tier.GPU, rank), [1, 2, 3])
    found = index.part(list(index.holders), [1, 2, 3], [1, 1, 1], [4, 5, 6], BlockForm(1))
    assert found is not None
    return msgspec.structs.replace(found, **fields)


def after_a_heading(content: Callable[[str], Any], following: int | None = None) -> Answers:
    return lambda number, source: (
        (heading(source), 1) if not number else (content(source), following)
    )


LIARS: dict[str, Answers] = {
    "is silent": lambda number, source: None,
    "is silent after the heading": lambda n, source: None if n else (heading(source), 1),
    "is silent after a part": lambda n, source: (
        None if n > 1 else (part(source) if n else heading(source), n + 1)
    ),
    "is silent after a part of ranks that its heading does not name": lambda n, source: (
        None if n > 1 else (part(source, rank=3) if n else heading(source), n + 1)
    ),
    "has no heading": lambda number, source: ([1, 2], 1),
    "has another version": lambda number, source: (heading(source, version=2), 1),
    "has too much": lambda number, source: (heading(source, num_blocks=10**9), 1),
    "has no parts": after_a_heading(lambda source: "part"),
    "has no end": after_a_heading(part, 1),
    "leaves a name out": after_a_heading(lambda source: part(source, names=bytes(16))),
    "cuts keys": after_a_heading(lambda source: part(source, keys=b"1234567")),
    "has too few sets": after_a_heading(lambda source: part(source, sets=[])),
    "names others": after_a_heading(lambda source: part(source, sets=[[9]])),
    "has no form": after_a_heading(lambda source: part(source, form=None)),
    "has blocks of no size": after_a_heading(lambda source: part(source, form=BlockForm(0))),
}


async def answer(context: zmq.asyncio.Context, replay: str, answers: Answers, source: str) -> None:
    """Answer requests for pages."""
    socket = context.socket(zmq.ROUTER)
    socket.bind(replay)
    try:
        while True:
            peer, _, request = await socket.recv_multipart()
            number = int.from_bytes(request[1:], "big")
            found = answers(number, source)
            if found is not None:
                page = Page(b"it", 0, found[1], msgspec.msgpack.encode(found[0]))
                packed = msgspec.msgpack.encode(page)
                await socket.send_multipart([peer, b"", TOPIC.encode(), request, packed])
    finally:
        socket.close(linger=0)


@pytest.mark.parametrize("answers", LIARS.values(), ids=LIARS.keys())
def test_whatever_another_router_answers_sources_are_followed(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "_ANSWER_S", 0.2)

    async def test() -> None:
        address = Address(ANY_PORT, ANY_PORT, "kv@pod@model")
        publisher: BatchPublisher[Event] = BatchPublisher(
            address, encode_batch, num_kept=9, num_queued=9
        )
        publisher.start()
        source = EventSource(publisher.address.endpoint, publisher.address.replay_endpoint)
        for prompt in PROMPTS:
            publisher.publish([stored(prompt)])
        context, sync = zmq.asyncio.Context(), pair()
        liar = asyncio.create_task(answer(context, sync.split(",")[1], answers, source.endpoint))
        try:
            async with routing(source, is_held=True) as second:
                await second.take_over(sync)
                await until(lambda: second.known == [20, 20, 20])
                assert second.routing.holdings.index.num_holdings == 60
                assert caplog.text.count("index_not_taken_over") == 1
                stats = second.feed.stats()[source.endpoint]
                assert (stats.losses, stats.restarts) == (0, 0)
        finally:
            liar.cancel()
            await asyncio.gather(liar, return_exceptions=True)
            context.term()
            publisher.close()

    with caplog.at_level(logging.WARNING):
        run(test)


def test_a_router_of_an_earlier_version_gives_nothing_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        earlier: BatchPublisher[Any] = BatchPublisher(
            Address(ANY_PORT, ANY_PORT, TOPIC), encode_life, num_kept=9, num_queued=9
        )
        earlier.start()
        try:
            async with routing(EventSource("tcp://127.0.0.1:9"), is_held=True) as second:
                address = earlier.address
                await second.take_over(f"{address.endpoint},{address.replay_endpoint}")
                assert "does not give its index away" in caplog.text
        finally:
            earlier.close()

    with caplog.at_level(logging.WARNING):
        run(test)
