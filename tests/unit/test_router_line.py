"""The line of requests that wait for a worker: order, bounds, and that nothing is held by a request
that left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.router.chooser import NotRouted
from flexcache.router.decider import WaitingLine


class Room:
    """Workers with places; an attempt takes one."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.served: list[int] = []

    def attempt(self, number: int) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        self.served.append(number)
        return number


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_what_waits_is_weighed_once_and_as_long_as_it_waits() -> None:
    async def test() -> None:
        room, line = Room(1), WaitingLine(10, 60)

        def place(number: int) -> asyncio.Task[int]:
            attempt = lambda: room.attempt(number)  # noqa: E731
            return asyncio.create_task(line.place(attempt, weigh=lambda: 2.0**number))

        tasks = [place(number) for number in range(4)]
        await settle()
        assert line.service_s == 2 + 4 + 8, "the first did not wait"
        tasks[2].cancel()
        room.free = 1
        line.wake()
        await settle()
        assert line.service_s == 8
        room.free = 1
        line.wake()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert line.service_s == 0

    run(test())


def test_requests_are_served_in_the_order_of_arrival() -> None:
    async def test() -> None:
        room, line = Room(1), WaitingLine(10, 60)
        tasks = [asyncio.create_task(line.place(lambda n=n: room.attempt(n))) for n in range(4)]
        await settle()
        assert (room.served, len(line)) == ([0], 3)
        room.free = 2
        line.wake()
        await settle()
        assert room.served == [0, 1, 2]
        room.free = 1  # a new request does not overtake the one that waits
        late = asyncio.create_task(line.place(lambda: room.attempt(9)))
        await settle()
        assert room.served == [0, 1, 2]
        line.wake()
        await settle()
        assert room.served == [0, 1, 2, 3]
        line.check()
        room.free = 1
        line.wake()
        assert await late == 9
        assert [await task for task in tasks] == [0, 1, 2, 3]
        assert len(line) == 0

    run(test())


def test_a_full_line_refuses_and_says_when_to_come_back() -> None:
    async def test() -> None:
        line = WaitingLine(1, 60)
        waiting = asyncio.create_task(line.place(lambda: None))
        await settle()
        with pytest.raises(NotRouted) as refusal:
            await line.place(lambda: None)
        assert refusal.value.status == 429
        assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s >= 1
        assert line.counts.refused == {"full": 1, "expired": 0, "no_worker": 0}
        waiting.cancel()

    run(test())


def test_a_request_waits_only_so_long_and_lets_the_next_one_try() -> None:
    async def test() -> None:
        room = Room(0)
        line = WaitingLine(2, 0.01)
        with pytest.raises(NotRouted) as refusal:
            await line.place(lambda: room.attempt(0))
        assert refusal.value.status == 429
        assert line.counts.refused == {"full": 0, "expired": 1, "no_worker": 0}
        assert len(line) == 0

    run(test())


def test_an_error_of_an_attempt_reaches_its_caller_and_not_the_next_one() -> None:
    async def test() -> None:
        room, line = Room(0), WaitingLine(10, 60)
        is_broken = False

        def fails() -> int | None:
            if is_broken:
                raise NotRouted(503, "no worker")
            return room.attempt(1)

        first = asyncio.create_task(line.place(fails))
        second = asyncio.create_task(line.place(lambda: room.attempt(2)))
        await settle()
        is_broken, room.free = True, 1
        line.wake()
        await settle()
        with pytest.raises(NotRouted, match="no worker"):
            await first
        assert await second == 2

    run(test())


def test_requests_of_other_kinds_do_not_wait_for_busy_workers() -> None:
    async def test() -> None:
        small, large, line = Room(0), Room(2), WaitingLine(3, 60)
        waiting = asyncio.create_task(line.place(lambda: small.attempt(0), "small"))
        await settle()
        assert await line.place(lambda: large.attempt(1), "large") == 1
        large.free = 0
        late = [
            asyncio.create_task(line.place(lambda n=n: large.attempt(n), "large")) for n in (2, 3)
        ]
        await settle()
        assert len(line) == 3
        with pytest.raises(NotRouted):
            await line.place(lambda: large.attempt(4), "large")
        large.free = 2
        line.wake()
        assert [await task for task in late] == [2, 3]
        line.check()
        small.free = 1
        line.wake()
        assert await waiting == 0

    run(test())


def test_of_several_kinds_the_oldest_request_tries_first() -> None:
    async def test() -> None:
        room, line = Room(0), WaitingLine(10, 60)
        tasks = []
        for number, kind in enumerate("abab"):
            tasks.append(asyncio.create_task(line.place(lambda n=number: room.attempt(n), kind)))
            await settle()
        for _ in tasks:
            room.free = 1
            line.wake()
            await settle()
        assert room.served == [0, 1, 2, 3]

    run(test())


STEPS = st.lists(
    st.one_of(
        st.just(("arrive", 0)),
        st.tuples(st.just("leave"), st.integers(0, 8)),
        st.tuples(st.just("free"), st.integers(1, 3)),
        st.just(("settle", 0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_no_place_is_lost_when_requests_leave(steps: list[tuple[str, int]]) -> None:
    """Requests leave between being woken and running, too: the steps in between do not settle."""

    async def test() -> None:
        room, line = Room(1), WaitingLine(1000, 60)
        tasks: list[asyncio.Task[int]] = []
        freed = 1
        for step, number in steps:
            if step == "arrive":
                me = len(tasks)
                tasks.append(asyncio.create_task(line.place(lambda me=me: room.attempt(me))))
            elif step == "leave" and number < len(tasks):
                tasks[number].cancel()
            elif step == "free":
                room.free += number
                freed += number
                line.wake()
            elif step == "settle":
                await settle()
            line.check()
        await asyncio.sleep(0)
        await settle()
        for _ in tasks:  # each that is served wakes the next
            await settle()
        assert room.served == sorted(room.served)
        assert len(room.served) + room.free == freed
        waiting = [task for task in tasks if not task.done()]
        assert len(line) == len(waiting)
        assert not (room.free and waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(line) == 0

    run(test())
