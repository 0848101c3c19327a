"""KV events of a real vLLM engine: FlexCache's publisher, and vLLM's, which has ours too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socket import gethostname
from typing import Any

import msgspec
import pytest
import zmq
from engines import Engine, make_prompt
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from flexcache.events.subscriber import KVEventSubscriber, Received

pytestmark = pytest.mark.newest
BLOCK = 32
PATIENCE_MS = 20_000
_seeds = itertools.count(10_000)
_decode_as_vllm = msgspec.msgpack.Decoder(KVEventBatch).decode


@pytest.fixture(autouse=True)
def _clean(engine: Engine) -> Any:
    engine.forget_all()
    yield
    engine.drain()
    engine.manager.check()


class Shelves:
    """The state that a consumer derives from events alone, in order, starting with an empty cache.

    Args:
        cleared: The media that `AllBlocksCleared` applies to: in vLLM's stream the GPU.
    """

    def __init__(self, cleared: Sequence[str]) -> None:
        self._cleared = cleared
        self.blocks: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.told: dict[str, dict[int, tuple[Any, ...]]] = {medium: {} for medium in self.blocks}
        """By medium and hash: parent, tokens, extra keys."""
        self.num_removed = dict.fromkeys(self.blocks, 0)

    def store(
        self, medium: str, hashes: Sequence[int], parent: int | None, tokens: Sequence[int],
        extra_keys: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        assert len(tokens) == BLOCK * len(hashes)
        if medium != "GPU":  # vLLM may have a block twice
            assert self.blocks[medium].isdisjoint(hashes)
        self.blocks[medium] |= set(hashes)
        for i, block in enumerate(hashes):
            extra = None if extra_keys is None else extra_keys[i]
            self.told[medium][block] = (
                parent, list(tokens[i * BLOCK : (i + 1) * BLOCK]), list(extra) if extra else None
            )  # fmt: skip
            parent = block

    def remove(self, medium: str, hashes: Sequence[int]) -> None:
        assert self.blocks[medium] >= set(hashes)
        self.blocks[medium] -= set(hashes)
        self.num_removed[medium] += len(hashes)

    def clear(self) -> None:
        for medium in self._cleared:
            self.blocks[medium].clear()


def follow_as_vllm(shelves: Shelves, payload: bytes) -> None:
    for event in _decode_as_vllm(payload).events:
        match event:
            case BlockStored():
                shelves.store(
                    event.medium, event.block_hashes, event.parent_block_hash, event.token_ids,
                    event.extra_keys,
                )  # fmt: skip
            case BlockRemoved():
                shelves.remove(event.medium, event.block_hashes)
            case AllBlocksCleared():
                shelves.clear()


def follow_plainly(shelves: Shelves, payload: bytes) -> None:
    _, events, _ = msgspec.msgpack.decode(payload)
    for event in events:
        match event:
            case {"type": "BlockStored", "medium": medium, "block_hashes": hashes}:
                shelves.store(
                    medium, hashes, event["parent_block_hash"], event["token_ids"],
                    event.get("extra_keys"),
                )  # fmt: skip
            case {"type": "BlockRemoved", "medium": medium, "block_hashes": hashes}:
                shelves.remove(medium, hashes)
            case {"type": "AllBlocksCleared"}:
                shelves.clear()
            case _:
                raise AssertionError(event)


class Reader:
    """A plain SUB socket, whose messages every decoder reads."""

    def __init__(self, endpoint: str | None, cleared: Sequence[str]) -> None:
        self.by_vllm, self.by_hand = Shelves(cleared), Shelves(cleared)
        self.topics: set[bytes] = set()
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._last: int | None = None

    def hears_something(self) -> bool:
        return bool(self._socket.poll(20))

    def skip(self, until: int) -> None:
        """Skip everything up to a batch that was published already."""
        while self._last != until:
            self._receive(until)

    def follow(self, until: int) -> None:
        """Follow everything up to a batch, in order and without a gap."""
        while self._last != until:
            payload = self._receive(until)
            follow_as_vllm(self.by_vllm, payload)
            follow_plainly(self.by_hand, payload)
        assert self.by_vllm.blocks == self.by_hand.blocks
        assert self.by_vllm.told == self.by_hand.told

    def _receive(self, until: int) -> bytes:
        assert self._socket.poll(PATIENCE_MS)
        topic, number_bytes, payload = self._socket.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        assert self._last in (None, number - 1) and number <= until
        self._last = number
        self.topics.add(topic)
        return payload

    def close(self) -> None:
        self._socket.close(linger=0)


def last_of_ours(engine: Engine) -> int:
    return int(engine.manager.stats()["events"]["sequence"]) - 1


def last_of_vllms(engine: Engine) -> int:
    """Let vLLM publish everything, which takes one more step; return the last batch's number."""
    engine.generate(make_prompt(5, 1), max_tokens=1)
    engine.drain()
    publisher = engine.scheduler.kv_event_publisher
    publisher._event_queue.join()
    return int(publisher._buffer[-1][0])


@contextmanager
def readers(engine: Engine) -> Iterator[tuple[Reader, Reader]]:
    """Read FlexCache's publisher and vLLM's, starting with an empty cache."""
    ours = Reader(engine.server.config.kv_events_endpoint, ["CPU", "STORAGE"])
    vllms = Reader(engine.scheduler.kv_events_config.endpoint, ["GPU"])
    heard = [False, False]
    while not all(heard):  # subscribing takes a moment and is not acknowledged
        engine.generate(make_prompt(40, next(_seeds)))
        engine.settle()
        heard = [heard[0] or ours.hears_something(), heard[1] or vllms.hears_something()]
    engine.forget_all()
    ours.skip(last_of_ours(engine))
    vllms.skip(last_of_vllms(engine))
    try:
        yield ours, vllms
    finally:
        ours.close()
        vllms.close()


def held_by_tiers(engine: Engine) -> dict[str, set[int]]:
    tiers = engine.server.cache.tasks.cache.tiers
    held = [
        {maybe_convert_block_hash(key) for keys in tier.index._directories.values() for key in keys}
        for tier in tiers
    ]
    return {"CPU": held[0], "STORAGE": set().union(*held[1:])}


def held_by_gpu(engine: Engine) -> set[int]:
    cached = engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    return {maybe_convert_block_hash(get_block_hash(key)) for key in cached}


def exercise(engine: Engine) -> None:
    """Store, share, load from each tier, clear one, and evict from every tier."""
    shared = make_prompt(300, next(_seeds))
    prompts = [shared + make_prompt(200, next(_seeds)) for _ in range(3)]
    for prompt in prompts:
        engine.generate(prompt)
    displace(engine)
    assert engine.generate(prompts[0]).num_cached_tokens == 480
    engine.settle()
    assert engine.manager.clear("CPU") > 0
    engine.forget_gpu()
    assert engine.generate(prompts[1]).num_cached_tokens == 480
    while not engine.manager.stats()["tiers"]["SSD"]["evicted_blocks"]:
        displace(engine)


def displace(engine: Engine) -> None:
    """Fill the GPU with new prompts."""
    engine.generate_all([make_prompt(1900, next(_seeds)) for _ in range(9)], max_tokens=2)
    engine.settle()


def test_events_report_in_order_what_every_tier_stored_and_lost(engine: Engine) -> None:
    with readers(engine) as (ours, vllms):
        exercise(engine)
        ours.follow(last_of_ours(engine))
        model = engine.manager.model_config.model_id.split("|")[0]  # as given to vLLM, no dtypes
        assert ours.topics == {f"kv@{gethostname()}@{model}".encode()}
        held = held_by_tiers(engine)
        assert ours.by_vllm.blocks == {"GPU": set(), **held}
        assert held["CPU"] and held["STORAGE"]
        assert ours.by_vllm.num_removed["CPU"] and ours.by_vllm.num_removed["STORAGE"]

        vllms.follow(last_of_vllms(engine))
        assert vllms.by_vllm.blocks == {"GPU": held_by_gpu(engine), **held_by_tiers(engine)}
        assert vllms.topics == {b"kv@pod@tiny"}

        # What both tell of a block's parent, tokens and extra keys is the same.
        on_gpu, below = vllms.by_vllm.told["GPU"], ours.by_vllm.told
        for medium in ("CPU", "STORAGE"):
            assert len(below[medium]) > 100
            assert {block: on_gpu[block] for block in below[medium]} == below[medium]
            assert vllms.by_vllm.told[medium] == below[medium]


def test_a_salted_prompt_is_published_with_its_salt(engine: Engine) -> None:
    with readers(engine) as (ours, vllms):
        prompt = make_prompt(100, next(_seeds))
        engine.generate(prompt, cache_salt="alice")
        engine.settle()
        ours.follow(last_of_ours(engine))
        vllms.follow(last_of_vllms(engine))
        told = ours.by_vllm.told["CPU"]
        assert len(told) == 3
        assert sorted(str(extra) for _, _, extra in told.values()) == ["None", "None", "['alice']"]
        for block, what in told.items():
            assert vllms.by_vllm.told["GPU"][block] == what


def test_a_salted_prompt_of_less_than_a_block_is_served(engine: Engine) -> None:
    assert engine.generate(make_prompt(10, next(_seeds)), cache_salt="bob").num_cached_tokens == 0


@pytest.mark.parametrize("whose", ["ours", "vllms"])
def test_a_lost_message_is_found_by_its_gap_and_repaired_by_replay(
    engine: Engine, whose: str
) -> None:
    config, events = engine.server.config, engine.scheduler.kv_events_config
    endpoints, last_number = {
        "ours": ((config.kv_events_endpoint, config.kv_events_replay_endpoint), last_of_ours),
        "vllms": ((events.endpoint, events.replay_endpoint), last_of_vllms),
    }[whose]

    with KVEventSubscriber(*endpoints) as subscriber:  # type: ignore[arg-type]
        receive_until(subscriber, last_number(engine))
        engine.forget_all()
        receive_until(subscriber, last_number(engine))
        replayed = subscriber.counters.replayed

        first = last_number(engine) + 1
        engine.generate(make_prompt(300, next(_seeds)))
        engine.settle()
        lost = -1
        while lost < first:
            lost = int.from_bytes(subscriber._socket.recv_multipart()[1], "big")
        engine.generate(make_prompt(200, next(_seeds)))
        engine.settle()

        shelves = Shelves(())
        for news in receive_until(subscriber, last_number(engine)):
            follow_plainly(shelves, as_payload(news))
        held = held_by_tiers(engine)
        assert {name: shelves.blocks[name] for name in held} == held
        assert subscriber.counters.replayed - replayed >= 1
        assert subscriber.counters.lost == 0


def receive_until(subscriber: KVEventSubscriber, last: int) -> list[Received]:
    got: list[Received] = []
    while not got or got[-1].number < last:
        news = subscriber.receive(PATIENCE_MS / 1000)
        assert isinstance(news, Received)
        got.append(news)
    return got


def as_payload(news: Received) -> bytes:
    return msgspec.msgpack.encode((news.batch.ts, news.batch.events, None))


def test_after_a_reset_events_match_what_the_tiers_hold(engine: Engine) -> None:
    with readers(engine) as (ours, vllms):
        engine.generate(make_prompt(300, next(_seeds)))
        engine.forget_all()
        assert held_by_tiers(engine) == {"CPU": set(), "STORAGE": set()}
        engine.generate(make_prompt(200, next(_seeds)))
        engine.settle()
        ours.follow(last_of_ours(engine))
        vllms.follow(last_of_vllms(engine))
        held = held_by_tiers(engine)
        assert ours.by_vllm.blocks == {"GPU": set(), **held}
        assert vllms.by_vllm.blocks == {"GPU": held_by_gpu(engine), **held}
