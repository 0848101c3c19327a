"""Requests of other routers: events, snapshots, gaps and leases give the right load."""

from __future__ import annotations

import asyncio
import random

from ports import free_port

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.router.fleet import WorkerSpec
from flexcache.router.load import GONE, Work
from flexcache.router.messages import (
    TOPIC,
    Alive,
    AllRunning,
    Began,
    End,
    FirstToken,
    Life,
    RunningRequest,
    decode_life,
    encode_life,
)
from flexcache.router.peers import LEASE_S, Follower, Peer
from flexcache.router.router import KVRouter


class Book:
    """The load of a router before workers, as a plain table: worker, and whether it answers."""

    def __init__(self, *workers: str) -> None:
        self.routing = KVRouter()
        self.know("w", *workers)

    def know(self, *workers: str) -> None:
        self.routing.set_workers([WorkerSpec(name=name, url=f"http://{name}") for name in workers])

    @property
    def requests(self) -> dict[str, tuple[str, bool]]:
        self.routing.check()
        counting = {k: v for k, v in self.routing.running.items() if v.number != GONE}
        workers = self.routing.stats(0.0).workers.values()
        assert sum(worker.requests for worker in workers) == len(counting)
        return {k: (v.worker, v.first_token_s is not None) for k, v in counting.items()}


def request(name: str, worker: str = "w", has_first_token: bool = False) -> RunningRequest:
    return RunningRequest(name, worker, Work(10, 5), has_first_token)


def test_batches_survive_the_wire() -> None:
    events: list[Life] = [
        Began(request("a")), FirstToken("a"), End("a"), AllRunning([request("b")]), Alive(),
    ]  # fmt: skip
    assert decode_life(encode_life(1.0, events)) == events
    assert encode_life(1.0, [Alive()]) != encode_life(2.0, [Alive()])


def test_requests_at_a_worker_count_once_it_is_known() -> None:
    book = Book()
    peer = Peer("other", book.routing)
    running = [request("a"), request("b", "new", has_first_token=True), request("c", "new")]
    peer.apply([Began(each) for each in running], 0.0)
    peer.apply([FirstToken("c"), End("c")], 0.0)
    assert set(book.requests) == {"other a"}
    book.know("w", "new")
    peer.apply([AllRunning(running[:2])], 1.0)
    assert book.requests == {"other a": ("w", False), "other b": ("new", True)}


def test_a_snapshot_repairs_what_was_lost() -> None:
    book = Book("x")
    peer = Peer("p", book.routing)
    peer.apply([Began(request("a")), Began(request("b"))], 0.0)
    peer.lost()
    peer.apply([End("never heard of"), FirstToken("nor of this")], 1.0)
    peer.apply([AllRunning([request("b", has_first_token=True), request("c", "x")])], 2.0)
    assert book.requests == {"p b": ("w", True), "p c": ("x", False)}
    assert peer.stats(2.5).gaps == 1 and peer.stats(2.5).last_batch_age_s == 0.5


def test_a_silent_peer_is_dropped_once_and_may_come_back() -> None:
    book = Book()
    peer = Peer("p", book.routing)
    assert not peer.expire(100.0)
    peer.apply([Began(request("a"))], 0.0)
    assert not peer.expire(LEASE_S - 0.1)
    assert peer.expire(LEASE_S) and book.requests == {}
    assert not peer.expire(2 * LEASE_S)
    assert not peer.stats(2 * LEASE_S).is_up
    peer.apply([AllRunning([request("a")])], 3 * LEASE_S)
    assert set(book.requests) == {"p a"} and peer.stats(3 * LEASE_S).is_up


def test_a_restarted_peer_begins_with_nothing() -> None:
    book = Book()
    peer = Peer("p", book.routing)
    peer.apply([Began(request("a"))], 0.0)
    peer.restarted(1.0)
    assert book.requests == {}


def test_with_losses_the_load_is_right_after_each_snapshot() -> None:
    rng = random.Random(5)
    book = Book("w0", "w1", "w2")
    peer = Peer("p", book.routing)
    truth: dict[str, RunningRequest] = {}
    for step in range(5000):
        event: Life = Alive()
        name = str(rng.randrange(30))
        kind = rng.randrange(5)
        if kind == 0 and name not in truth:
            truth[name] = request(name, f"w{step % 3}")
            event = Began(truth[name])
        elif kind == 1 and name in truth:
            truth[name] = request(name, truth[name].worker, True)
            event = FirstToken(name)
        elif kind == 2 and truth.pop(name, None) is not None:
            event = End(name)
        elif kind == 3 and step % 10 == 0:
            event = AllRunning(list(truth.values()))
        if not isinstance(event, AllRunning) and rng.random() < 0.1:
            peer.lost()
            continue
        peer.apply([event], float(step))
        if isinstance(event, AllRunning):
            expected = {f"p {n}": (r.worker, r.has_first_token) for n, r in truth.items()}
            assert book.requests == expected


def test_a_peer_whose_replay_is_lost_is_known_from_its_next_snapshot() -> None:
    """What is published now does not tell which requests began before."""
    endpoint, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    nothing_listens = f"tcp://127.0.0.1:{free_port()}"
    running = [request("a"), request("b")]
    address = Address(endpoint, replay, TOPIC)

    async def follow(publisher: BatchPublisher[Life]) -> None:
        book = Book()
        follower = Follower([f"{endpoint},{nothing_listens}"], book.routing)
        follower.start()
        try:
            while not follower.stats(0.0)[endpoint].requests:
                publisher.publish([Began(running[1])])
                await asyncio.sleep(0.05)
            assert not await follower.caught_up(timeout_s=1.0)
            publisher.publish([AllRunning(running)])
            assert await follower.caught_up(timeout_s=60.0)
            assert set(book.requests) == {f"{endpoint} a", f"{endpoint} b"}
        finally:
            await follower.close()

    publisher = BatchPublisher(address, encode_life, num_kept=9, num_queued=9, gather_s=0.001)
    publisher.start()
    try:
        publisher.publish([Began(running[0])])
        asyncio.run(follow(publisher))
    finally:
        publisher.close()
