"""`Puts` against a plain model of the cache and of vLLM's block pool: every pinned block is let go,
also when vLLM waits for it, only complete blocks are offered, and tails are those of the point at
which they are stored.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from flexcache.config.model import KVGroup
from flexcache.integration.vllm.groups import BlockTables
from flexcache.integration.vllm.puts import PutPoints, Puts, tail_interval

BLOCK = 4
MOST_BLOCKS = 30
INTERVAL = 3 * BLOCK
ANSWER_INTERVAL = 2 * BLOCK
MOST_DRAFTS = 3
FULL = KVGroup("full", BLOCK)
WINDOW = KVGroup("window", BLOCK, 2 * BLOCK)
STATE = KVGroup("state", BLOCK)


@dataclass
class FakeRequest:
    """``num_certain``: tokens whose KV is there when the next step begins."""

    request_id: str
    num_prompt_tokens: int
    all_blocks: list[list[int]]
    """GPU blocks of each group, also those that it has no more."""
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_certain: int = 0
    num_tokens: int = 0
    shared_prefix_boundary: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def block_hashes(self) -> range:
        return range(self.num_tokens // BLOCK)

    def tables(self, groups: Sequence[KVGroup]) -> list[list[int]]:
        """What vLLM has while it computes behind ``num_computed_tokens``: 0 for what is gone."""
        tables = []
        for group, blocks in zip(groups, self.all_blocks, strict=True):
            gone = 0
            if group.kind == "window":
                gone = group.first_needed(self.num_computed_tokens)
            elif group.kind == "state":
                gone = len(blocks)
            tables.append([0] * gone + blocks[gone:])
        return tables

    def tail(self, groups: Sequence[KVGroup], stop: int) -> list[list[int]]:
        """The blocks of the tail behind ``stop`` blocks, of each group."""
        return [
            [] if group.is_dense else blocks[group.first_needed(stop * BLOCK) : stop]
            for group, blocks in zip(groups, self.all_blocks, strict=True)
        ]


class FakePool:
    """Counts references. A block is its id."""

    blocks: Sequence[int] = range(1_000_000)

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()

    def touch(self, blocks: Sequence[int], /) -> None:
        self.pins.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int], /) -> None:
        self.pins.subtract(list(ordered_blocks))

    def reset_prefix_cache(self) -> bool:
        return not any(self.pins.values())


@dataclass
class FakeCache:
    """Its tasks with their blocks; ``cached``: how many blocks it has of each request."""

    groups: Sequence[KVGroup]
    cached: Counter[str] = field(default_factory=Counter)
    tails: set[tuple[str, int]] = field(default_factory=set)
    """Requests, and the blocks in front of their tails."""
    matched: dict[int, list[list[int]]] = field(default_factory=dict)
    launched: dict[int, list[list[int]]] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    """Requests by task."""
    max_stored: Callable[[Any], int] = lambda request: sys.maxsize
    pinned: list[str] = field(default_factory=list)
    is_full: bool = False
    are_shut: bool = False
    """Whether the ranks copy nothing."""

    def keys(self, request: Any) -> range:
        return request.block_hashes  # type: ignore[no-any-return]

    def match_put(
        self, request: Any, first: int, stop: int, has_tail: bool
    ) -> tuple[int, range] | None:
        assert 0 <= first < stop <= request.num_certain // BLOCK
        name = request.request_id
        begin = min(self.cached[name], stop)
        needs_tail = has_tail and (name, stop) not in self.tails
        if begin < first or self.is_full or (begin == stop and not needs_tail):
            return None
        task_id = len(self.owners)
        self.owners.append(name)
        self.cached[name] = max(self.cached[name], stop)
        self.tails.add((name, stop))
        tail = request.tail(self.groups, stop)
        self.matched[task_id] = [
            blocks[begin:stop] if group.is_dense else part
            for group, blocks, part in zip(self.groups, request.all_blocks, tail, strict=True)
        ]
        return task_id, range(begin, stop)

    def to_pin(self, request: Any) -> Callable[[], None]:
        return lambda: self.pinned.append(request.request_id)

    def launch_all(self, blocks: Mapping[int, Sequence[Sequence[int]]]) -> list[int]:
        launched = []
        for task_id, of_task in blocks.items():
            expected = self.matched.pop(task_id, None)
            if expected is not None and not self.is_full:
                assert [list(of_group) for of_group in of_task] == expected
                self.launched[task_id] = expected
                launched.append(task_id)
        return launched

    def cancel(self, task_id: int) -> None:
        self.forget(self.owners[task_id])
        self.matched.pop(task_id, None)  # what was launched goes on for a while
        if self.are_shut:
            self.launched.pop(task_id, None)

    def wait_ended(self, task_ids: Iterable[int], timeout_s: float) -> None:
        if not self.are_shut:
            for task_id in task_ids:
                self.launched.pop(task_id, None)

    def forget(self, name: str) -> None:
        self.cached[name] = 0
        self.tails -= {tail for tail in self.tails if tail[0] == name}

    def ended(self, task_ids: Iterable[int]) -> list[int]:
        return [t for t in task_ids if t not in self.matched and t not in self.launched]


class Requests(RuleBasedStateMachine):
    """Requests that are computed in steps, preempted, lost or finished, in any order."""

    requests: Bundle[FakeRequest] = Bundle("requests")
    groups: tuple[KVGroup, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = FakePool(), FakeCache(self.groups or (FULL,))
        tables = BlockTables(self.groups, range(len(self.groups or (FULL,))), BLOCK)
        self.has_tails, self.has_states = tables.has_tails, tables.has_states
        interval = INTERVAL if self.has_tails else 0
        points = PutPoints(BLOCK, interval, ANSWER_INTERVAL, 1 + MOST_DRAFTS)
        self.puts = Puts(self.cache, tables, points)  # type: ignore[arg-type]
        self.puts.bind(self.pool)
        self.num_blocks = 1
        self.now = 0.0

    @rule(target=requests, num_tokens=st.integers(1, 60))
    def admit(self, num_tokens: int) -> FakeRequest:
        tables = []
        for _ in self.cache.groups:
            tables.append(list(range(self.num_blocks, self.num_blocks + MOST_BLOCKS)))
            self.num_blocks += MOST_BLOCKS
        request = FakeRequest(f"from {tables[0][0]}", num_tokens, tables)
        self.puts.admitted(request)
        return request

    @rule(request=requests, num_tokens=st.integers(1, 30), is_lost=st.booleans())
    def step(self, request: FakeRequest, num_tokens: int, is_lost: bool) -> None:
        before = request.num_computed_tokens
        num_tokens = min(num_tokens, request.num_tokens - before)
        self.puts.release()
        self.puts.launch()
        request.num_certain = before + num_tokens
        if num_tokens:
            self.puts.scheduled(self.scheduled(request, num_tokens))
        if is_lost and not self.groups:  # its first block was not loaded
            self.puts.withdraw(request.all_blocks[0][:1])
            pinned = self.puts._pinned.keys() - self.cache.launched.keys()
            assert not pinned - self.cache.matched.keys()
            request.num_certain = before
        elif not self.has_states and self.has_tails:
            self.check_points(request, before)
        request.num_computed_tokens = request.num_certain
        if request.num_certain == request.num_tokens < MOST_BLOCKS * BLOCK:
            request.num_tokens += 1  # a token was sampled

    @rule(
        request=requests, is_ahead=st.booleans(),
        steps=st.lists(st.tuples(st.integers(0, MOST_DRAFTS), st.integers(0, MOST_DRAFTS))),
    )  # fmt: skip
    def generate(
        self, request: FakeRequest, is_ahead: bool, steps: Sequence[tuple[int, int]]
    ) -> None:
        """Compute what was sampled, and drafts, some of which are rejected.

        Args:
            is_ahead: Whether each step is scheduled before it is known what the last one sampled.
        """
        under_way: list[tuple[int, int]] = []
        for num_drafts, num_right in steps:
            num_known = request.num_computed_tokens - request.num_in_flight_tokens
            may_grow = request.num_tokens + 3 * (1 + MOST_DRAFTS) < MOST_BLOCKS * BLOCK
            if num_known < request.num_tokens - 1 or not may_grow:
                break
            self.puts.release()
            self.puts.launch()
            num_right = min(num_right, num_drafts)
            request.num_certain += 1 + num_right
            self.puts.scheduled(self.scheduled(request, 1 + num_drafts, num_drafts))
            self.check_answer(request, num_known)
            request.num_computed_tokens += 1 + num_drafts
            request.num_in_flight_tokens += 1 + num_drafts
            under_way.append((num_drafts, num_right))
            while len(under_way) > is_ahead:
                self.sampled(request, *under_way.pop(0))
        for step in under_way:
            self.sampled(request, *step)

    def sampled(self, request: FakeRequest, num_drafts: int, num_right: int) -> None:
        request.num_in_flight_tokens -= 1 + num_drafts
        request.num_computed_tokens -= num_drafts - num_right
        request.num_tokens += 1 + num_right

    def check_answer(self, request: FakeRequest, num_known: int) -> None:
        """Less than an interval of what is known to be computed was not offered."""
        offered = self.puts._num_offered.get(request.request_id)
        if offered is not None and not self.has_tails:
            assert offered > num_known // BLOCK * BLOCK - ANSWER_INTERVAL

    def scheduled(self, request: FakeRequest, num_tokens: int, num_drafts: int = 0) -> Any:
        """What vLLM says of the step."""
        states = []
        end = (request.num_computed_tokens + num_tokens) // BLOCK
        for number, group in enumerate(self.groups):
            if group.kind == "state" and end * BLOCK > request.num_computed_tokens:
                states.append((number, request.all_blocks[number][end - 1], end * BLOCK))
                states.append((number, 999_999, end * BLOCK + 1))  # within a block: not to be used
        blocks = SimpleNamespace(
            get_block_ids=lambda _: request.tables(self.cache.groups),
            boundary_state_offloads={request.request_id: states} if states else {},
        )
        return SimpleNamespace(
            num_scheduled_tokens={request.request_id: num_tokens},
            scheduled_spec_decode_tokens={request.request_id: [0] * num_drafts},
            kv_connector_block_state=blocks,
        )

    def check_points(self, request: FakeRequest, before: int) -> None:
        """Every point that the step has computed past has its tail, unless there is no room."""
        num_whole = min(request.num_certain, request.num_tokens) // BLOCK
        for stop in range(before // BLOCK + 1, num_whole + 1):
            is_end = stop == (request.num_prompt_tokens - 1) // BLOCK
            if (stop * BLOCK % INTERVAL == 0 or is_end) and not self.cache.is_full:
                is_known = stop * BLOCK <= self.puts._num_offered[request.request_id]
                assert is_known

    @rule(request=requests)
    def preempt(self, request: FakeRequest) -> None:
        request.num_computed_tokens = request.num_certain = 0
        self.puts.admitted(request)

    @rule(request=consumes(requests), is_known=st.booleans())
    def finish(self, request: FakeRequest, is_known: bool) -> None:
        num_blocks = min(request.num_computed_tokens, request.num_tokens - 1) // BLOCK
        has_more = num_blocks * BLOCK > self.puts._num_offered.get(request.request_id, 0)
        has_more &= request.request_id not in self.puts._unscheduled  # since a load was lost
        tail = request.tail(self.cache.groups, num_blocks)
        tables = request.tables(self.cache.groups)
        has_more &= all(set(part) <= set(table) for part, table in zip(tail, tables, strict=True))
        self.puts.finished(request, request.tables(self.cache.groups) if is_known else ())
        if is_known and has_more and not self.cache.is_full and not self.has_states:
            assert self.cache.cached[request.request_id] == num_blocks
            if self.has_tails:
                assert (request.request_id, num_blocks) in self.cache.tails
        assert request.request_id not in {*self.puts._running, *self.puts._num_offered}

    @rule(request=requests)
    def evict(self, request: FakeRequest) -> None:
        self.cache.forget(request.request_id)

    @rule(count=st.integers(0, 3))
    def end_copies(self, count: int) -> None:
        for task_id in list(self.cache.launched)[:count]:
            del self.cache.launched[task_id]
        self.puts.release()

    @rule()
    def reset(self) -> None:
        self.puts.cancel()

    @rule()
    def reset_pool(self) -> None:
        assert self.pool.reset_prefix_cache()

    @rule(are_shut=st.booleans())
    def shut(self, are_shut: bool) -> None:
        self.cache.are_shut = are_shut

    @rule()
    def wait_for_blocks(self) -> None:
        """vLLM asks again in each step until it has blocks, and waits for some seconds at most."""
        begun_s, self.cache.are_shut = self.now, True
        while self.puts.is_worth_waiting(self.now):
            assert self.now < begun_s + 5.0
            self.now += 0.5
            self.puts.release()
        self.puts.launch()
        self.puts.release()
        assert not self.puts.is_pinning

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.cache.is_full = is_full

    @invariant()
    def blocks_are_pinned_as_long_as_they_may_be_copied(self) -> None:
        copied: Counter[int] = Counter()
        for blocks in (*self.cache.matched.values(), *self.cache.launched.values()):
            copied.update(block for of_group in blocks for block in of_group)
        assert all(self.pool.pins[block] >= count for block, count in copied.items())
        assert self.puts.is_pinning == any(self.pool.pins.values())

    def teardown(self) -> None:
        self.puts.launch()
        self.cache.launched.clear()
        self.puts.release()
        assert not self.puts.is_pinning
        assert not any(self.pool.pins.values())


class RequestsWithWindows(Requests):
    groups = (FULL, WINDOW)


class RequestsWithStates(Requests):
    groups = (STATE, FULL)


class RequestsWithStatesOnly(Requests):
    groups = (STATE,)


TestRequests = Requests.TestCase
TestRequestsWithWindows = RequestsWithWindows.TestCase
TestRequestsWithStates = RequestsWithStates.TestCase
TestRequestsWithStatesOnly = RequestsWithStatesOnly.TestCase


def test_states_that_a_preempted_request_comes_to_again_are_offered_with_their_blocks() -> None:
    world = RequestsWithStates()
    request = world.admit(4 * BLOCK)
    world.step(request, 2 * BLOCK, is_lost=False)
    world.preempt(request)
    world.evict(request)
    world.step(request, 2 * BLOCK, is_lost=False)
    assert (request.request_id, 2) in world.cache.tails
    world.teardown()


def test_an_answer_is_looked_at_only_when_it_may_be_at_its_point() -> None:
    class Watched(FakeRequest):
        num_looks = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "num_computed_tokens":
                Watched.num_looks += 1
            return super().__getattribute__(name)

    puts = Puts(FakeCache((FULL,)), BlockTables((), (0,), BLOCK), PutPoints(BLOCK, 0, 64))  # type: ignore[arg-type]
    puts.bind(FakePool())
    request = Watched("watched", 2 * BLOCK, [list(range(1, 100))])
    puts.admitted(request)
    step = SimpleNamespace(
        num_scheduled_tokens={"watched": 2 * BLOCK}, scheduled_spec_decode_tokens={},
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda _: request.all_blocks, boundary_state_offloads={}
        ),
    )  # fmt: skip
    request.num_certain = 300
    for num_computed in (0, *range(2 * BLOCK, 4 * 64)):
        request.num_computed_tokens = num_computed
        request.num_tokens = max(2 * BLOCK, num_computed + 1)
        puts.scheduled(step)
        step.num_scheduled_tokens = {"watched": 1}
    assert puts._num_offered["watched"] == 2 * BLOCK + 3 * 64
    assert Watched.num_looks <= 1 + 3 * 3


def test_a_request_that_ended_far_from_its_point_is_not_kept() -> None:
    engine = Engine(answer_interval=1 << 40)
    request = engine.request
    engine.puts.admitted(request)
    engine.step(NUM_BLOCKS * BLOCK)
    engine.puts.finished(request, ())
    engine.end()
    kept = weakref.ref(request)
    engine.request = FakeRequest("other", 1 << 40, [[]])
    del request
    for _ in range(300):
        engine.step(0)
    engine.cache.match_put = None  # type: ignore[method-assign, assignment]
    gc.collect()
    assert kept() is None


# -- blocks that must not be stored ----------------------------------------------------------------


NUM_BLOCKS = 10


class Engine:
    """Puts of an engine with one request, whose blocks are 1 to 10 in the first group."""

    def __init__(self, *groups: KVGroup, answer_interval: int = 0) -> None:
        self.cache, self.pool = FakeCache(groups or (FULL,)), FakePool()
        self.offered: list[range] = []
        match_put = self.cache.match_put

        def note(request: Any, first: int, stop: int, has_tail: bool) -> Any:
            self.offered.append(range(first, stop))
            return match_put(request, first, stop, has_tail)

        self.cache.match_put = note  # type: ignore[method-assign]
        numbers = range(max(1, len(groups)))
        tables = BlockTables(groups, numbers, BLOCK)
        points = PutPoints(BLOCK, 3 * BLOCK if tables.has_tails else 0, answer_interval)
        self.puts = Puts(self.cache, tables, points)  # type: ignore[arg-type]
        self.puts.bind(self.pool)
        blocks = [[NUM_BLOCKS * n + i for i in range(1, NUM_BLOCKS + 1)] for n in numbers]
        self.request = FakeRequest("mine", NUM_BLOCKS * BLOCK, blocks)

    def step(self, num_tokens: int) -> None:
        request = self.request
        request.num_certain = request.num_computed_tokens + num_tokens
        self.puts.scheduled(
            SimpleNamespace(
                num_scheduled_tokens={request.request_id: num_tokens},
                scheduled_spec_decode_tokens={},
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda _: request.all_blocks, boundary_state_offloads={}
                ),
            )
        )
        request.num_computed_tokens = request.num_certain

    def end(self) -> None:
        self.puts.launch()
        self.cache.launched.clear()
        self.puts.release()
        self.puts.check_idle()
        assert not any(self.pool.pins.values())


@pytest.mark.parametrize("groups", [(), (FULL, WINDOW)], ids=["one group", "window"])
def test_a_request_aborted_while_another_connector_loads_it(groups: tuple[KVGroup, ...]) -> None:
    engine = Engine(*groups)
    request = engine.request
    engine.puts.admitted(request)
    # vLLM counts these as computed as soon as it has allocated their blocks.
    request.num_computed_tokens = request.num_certain = 8 * BLOCK
    engine.puts.finished(request, request.all_blocks)
    assert engine.offered == []
    engine.end()


@pytest.mark.parametrize(
    ("groups", "limit", "offered"),
    [
        ((), 0, []),
        ((), 3, []),
        ((), 5 * BLOCK + 3, [range(5)]),
        ((), 12 * BLOCK, [range(10), range(10, 12)]),
        ((FULL, WINDOW), 0, []),
        ((FULL, WINDOW), 7 * BLOCK, [range(3), range(3, 6)]),
    ],
)
def test_no_more_is_stored_than_may_be(
    groups: tuple[KVGroup, ...], limit: int, offered: list[range]
) -> None:
    engine = Engine(*groups)
    engine.cache.max_stored = lambda request: limit
    request = engine.request
    engine.puts.admitted(request)
    engine.step(NUM_BLOCKS * BLOCK)
    request.all_blocks = [[*range(100 * n + 1, 100 * n + 20)] for n in range(max(1, len(groups)))]
    request.num_tokens = 15 * BLOCK
    engine.step(4 * BLOCK)
    engine.puts.finished(request, request.all_blocks)
    assert engine.offered == offered
    engine.cache.matched.clear()
    engine.end()


@pytest.mark.parametrize("groups", [(), (FULL, WINDOW)], ids=["one group", "window"])
def test_a_prompt_is_pinned_once_when_it_is_stored(groups: tuple[KVGroup, ...]) -> None:
    engine = Engine(*groups)
    request, pinned = engine.request, engine.cache.pinned
    engine.puts.admitted(request)
    engine.step(5 * BLOCK)
    engine.puts.launch()
    engine.cache.launched.clear()
    engine.puts.release()
    assert pinned == []
    engine.step(5 * BLOCK)
    engine.puts.launch()
    assert pinned == []
    engine.cache.launched.clear()
    engine.puts.release()
    assert pinned == ["mine"]
    request.num_computed_tokens = 0  # it is preempted
    engine.puts.admitted(request)
    engine.step(NUM_BLOCKS * BLOCK)
    engine.puts.finished(request, request.all_blocks)
    engine.end()
    assert pinned == ["mine"]


def test_a_prompt_that_is_stored_already_is_pinned_at_once() -> None:
    engine = Engine()
    engine.cache.cached["mine"] = NUM_BLOCKS
    engine.puts.admitted(engine.request)
    engine.step(NUM_BLOCKS * BLOCK)
    assert engine.cache.pinned == ["mine"]


def test_as_much_of_a_prompt_is_pinned_as_may_be_stored() -> None:
    engine = Engine()
    engine.cache.max_stored = lambda request: 3 * BLOCK
    engine.puts.admitted(engine.request)
    engine.step(NUM_BLOCKS * BLOCK)
    engine.puts.finished(engine.request, engine.request.all_blocks)
    engine.end()
    assert engine.cache.pinned == ["mine"]


def test_a_request_preempted_then_aborted_while_another_connector_loads_it() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    engine.step(4 * BLOCK)
    request.num_computed_tokens = 0  # it is preempted
    engine.puts.admitted(request)
    request.num_computed_tokens = request.num_certain = 8 * BLOCK
    engine.puts.finished(request, request.all_blocks)
    assert engine.offered == []
    engine.end()


def test_what_another_connector_has_loaded_is_stored() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    request.num_computed_tokens = 8 * BLOCK
    engine.puts.admitted(request)  # it has arrived
    engine.step(2 * BLOCK)
    assert engine.offered == [range(NUM_BLOCKS)]
    engine.puts.finished(request, request.all_blocks)
    engine.end()


def test_blocks_between_a_prompt_and_the_window_of_its_answer_are_gone() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    engine.step(NUM_BLOCKS * BLOCK)
    engine.puts.launch()
    answer = [NUM_BLOCKS + i for i in range(1, 6)]
    request.all_blocks = [request.all_blocks[0] + answer]
    request.num_tokens = (NUM_BLOCKS + 5) * BLOCK + 1
    engine.step(5 * BLOCK)
    engine.puts.finished(request, [[*request.all_blocks[0][:NUM_BLOCKS], 0, 0, 0, 14, 15]])
    assert not engine.puts._matched
    assert engine.pool.pins[0] == 0
    engine.cache.matched.clear()
    engine.end()


# -- where requests are stored, and which blocks that takes ----------------------------------------


def points(rule: PutPoints, num_prompt_tokens: int, stop: int, junction: int = 0) -> list[int]:
    """All points up to ``stop``."""
    found: list[int] = []
    while (point := rule.next(found[-1] if found else 0, num_prompt_tokens, junction)) is not None:
        if point > stop:
            break
        found.append(point)
    return found


def test_a_model_that_resumes_anywhere_is_stored_at_its_prompts_end() -> None:
    assert points(PutPoints(4), 23, 100) == [20]
    assert points(PutPoints(4), 24, 100) == [24]
    assert points(PutPoints(4), 3, 100) == []


def test_an_answer_is_stored_at_intervals_behind_its_prompt() -> None:
    assert points(PutPoints(4, answer_interval=12), 23, 50) == [20, 32, 44]
    assert points(PutPoints(4, answer_interval=15), 23, 50) == [20, 32, 44]
    assert points(PutPoints(4, answer_interval=1), 3, 12) == [4, 8, 12]
    assert PutPoints(4, answer_interval=12).next(25, 23) == 36


def test_a_prompt_that_another_engine_waits_for_is_stored_as_it_is_computed() -> None:
    rule, found = PutPoints(16, answer_interval=256), [0]
    while found[-1] < 1504:
        found.append(rule.next(found[-1], 1510, hands_over=True) or 0)
    assert found == [0, 512, 1024, 1504]
    assert rule.next(1504, 1510, hands_over=True) == 1760, "its answer as any other"
    assert PutPoints(1024).next(0, 5000, hands_over=True) == 1024


def test_tails_are_at_the_prompts_end_at_junctions_and_at_intervals() -> None:
    rule = PutPoints(4, 12)
    assert points(rule, 23, 50) == [12, 20, 24, 36, 48]
    assert points(rule, 23, 30, junction=18) == [12, 16, 20, 24]
    assert points(rule, 23, 30, junction=40) == [12, 20, 24]
    assert rule.next(0, 23, junction=40) == 12


def test_the_tail_at_a_prompts_end_leaves_a_token_to_compute() -> None:
    assert points(PutPoints(4, 100), 24, 50) == [20]
    assert points(PutPoints(4, 100), 25, 50) == [24]


@given(
    position=st.integers(1, 64), factor=st.integers(1, 9), prompt=st.integers(1, 2000),
    junction=st.integers(0, 2000), num_tokens=st.integers(0, 3000),
)  # fmt: skip
def test_points_are_positions_ahead(
    position: int, factor: int, prompt: int, junction: int, num_tokens: int
) -> None:
    point = PutPoints(position, position * factor).next(num_tokens, prompt, junction)
    assert point is not None
    assert num_tokens < point <= num_tokens + position * factor
    assert point % position == 0


@pytest.mark.parametrize(
    ("groups", "position", "setting", "expected"),
    [
        ((), 16, 64, 0),
        ((KVGroup("full", 16), KVGroup("full", 32)), 32, 64, 0),
        ((KVGroup("window", 16, 100), FULL), 16, None, 512),
        ((KVGroup("window", 16, 256), FULL), 48, None, 1056),
        ((KVGroup("chunked", 16, 8192), KVGroup("window", 16, 64)), 16, None, 32768),
        ((KVGroup("state", 16), FULL), 16, None, 512),
        ((KVGroup("window", 16, 256), FULL), 48, 100, 144),
        ((KVGroup("window", 16, 256), FULL), 48, 1, 48),
    ],
)
def test_intervals_are_whole_positions(
    groups: tuple[KVGroup, ...], position: int, setting: int | None, expected: int
) -> None:
    assert tail_interval(groups, position, setting) == expected


def tables_of(*groups: KVGroup, position: int = 4) -> Any:
    return BlockTables(groups, range(max(1, len(groups))), position)


def test_a_load_fills_what_the_engine_lacks() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL, KVGroup("state", 4))
    mine = [[0, 0, 0, 14, 15], [20, 21, 22, 23, 24], [0, 0, 0, 0, 34]]
    assert tables.to_load(mine, 0, 20) == [[14, 15], [20, 21, 22, 23, 24], [34]]
    assert tables.to_load(mine, 16, 20) == [[-1, 15], [24], [34]]
    longer = [[*table, 99] for table in mine]
    assert tables.to_load(longer, 0, 20) == tables.to_load(mine, 0, 20)


def test_a_load_without_a_block_that_it_needs_is_not_started() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL)
    assert tables.to_load([[0, 0, 0, 0, 15], [20, 21, 22, 23, 24]], 0, 20) is None
    assert tables.to_load([[0, 0, 0, 14], [20, 21, 22, 23, 24]], 0, 20) is None


def test_groups_of_different_block_sizes() -> None:
    tables = tables_of(KVGroup("window", 8, 8), FULL, position=8)
    mine = [[0, 11], [20, 21, 22, 23]]
    assert tables.to_load(mine, 0, 16) == [[11], [20, 21, 22, 23]]
    assert tables.tail(mine, 16, {}) == [[11], []]
    assert tables.dense(mine, 8, 16) == [[], [22, 23]]
    assert tables.num_tokens(mine) == 16


def test_a_tail_is_whole_or_none() -> None:
    tables = tables_of(KVGroup("window", 4, 9), FULL)
    assert tables.tail([[0, 0, 12, 13], [20, 21, 22, 23]], 16, {}) == [[12, 13], []]
    assert tables.tail([[0, 0, 0, 13], [20, 21, 22, 23]], 16, {}) is None


def test_states_are_those_handed_over_never_those_of_the_table() -> None:
    tables = BlockTables((KVGroup("state", 4), FULL), (1, 3), 4)
    mine = tables.select([[1], [0, 12], [2], [20, 21]])
    assert mine == [[0, 12], [20, 21]]
    assert tables.tail(mine, 8, {}) is None
    assert tables.tail(mine, 8, {1: 40}) == [[40], []]


def test_a_chunk_that_begins_at_the_point_needs_no_block() -> None:
    tables = tables_of(KVGroup("chunked", 4, 8), FULL)
    assert tables.tail([[0, 0], [20, 21]], 8, {}) == [[], []]
    assert tables.tail([[0, 0, 12], [20, 21, 22]], 12, {}) == [[12], []]


def test_one_group_of_full_attention() -> None:
    tables = tables_of()
    assert not (tables.has_groups or tables.has_tails or tables.has_states)
    assert tables.to_load([[5, 6, 7]], 4, 8) == [[6]]
