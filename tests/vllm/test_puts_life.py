"""`Puts` against a plain model of the cache and of vLLM's block pool: every pinned block is let go,
also when vLLM waits for it, and only complete blocks are offered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from flexcache.integration.vllm.puts import Puts

BLOCK = 4
MOST_BLOCKS = 30


@dataclass
class FakeRequest:
    """``num_certain``: tokens whose KV is there when the next step begins."""

    request_id: str
    num_prompt_tokens: int
    table: list[int]
    num_computed_tokens: int = 0
    num_certain: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def block_hashes(self) -> range:
        return range(self.num_tokens // BLOCK)


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

    cached: Counter[str] = field(default_factory=Counter)
    matched: dict[int, list[int]] = field(default_factory=dict)
    launched: dict[int, list[int]] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    """Requests by task."""
    is_full: bool = False
    are_shut: bool = False
    """Whether the ranks copy nothing."""

    def match_put(self, request: Any, first: int, stop: int) -> tuple[int, range] | None:
        assert stop * BLOCK <= request.num_certain
        begin = self.cached[request.request_id]
        if begin < first or begin >= stop or self.is_full:
            return None
        task_id = len(self.owners)
        self.owners.append(request.request_id)
        self.cached[request.request_id] = stop
        self.matched[task_id] = request.table[begin:stop]
        return task_id, range(begin, stop)

    def launch(self, task_id: int, block_ids: Sequence[int]) -> bool:
        expected = self.matched.pop(task_id, None)
        if expected is None or self.is_full:
            return False
        assert list(block_ids) == expected
        self.launched[task_id] = expected
        return True

    def cancel(self, task_id: int) -> None:
        self.cached[self.owners[task_id]] = 0
        self.matched.pop(task_id, None)  # what was launched goes on for a while
        if self.are_shut:
            self.launched.pop(task_id, None)

    def wait_ended(self, task_ids: Iterable[int], timeout_s: float) -> None:
        if not self.are_shut:
            for task_id in task_ids:
                self.launched.pop(task_id, None)

    def ended(self, task_ids: Iterable[int]) -> list[int]:
        return [t for t in task_ids if t not in self.matched and t not in self.launched]


class Requests(RuleBasedStateMachine):
    """Requests that are computed in steps, preempted, lost or finished, in any order."""

    requests: Bundle[FakeRequest] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = FakePool(), FakeCache()
        self.puts = Puts(self.cache, BLOCK)  # type: ignore[arg-type]
        self.puts.bind(self.pool)
        self.num_blocks = 0
        self.now = 0.0

    @rule(target=requests, num_tokens=st.integers(1, 60))
    def admit(self, num_tokens: int) -> FakeRequest:
        table = list(range(self.num_blocks, self.num_blocks + MOST_BLOCKS))
        self.num_blocks += MOST_BLOCKS
        request = FakeRequest(f"from {table[0]}", num_tokens, table)
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
            tables = {request.request_id: (request.table,)}
            self.puts.scheduled({request.request_id: num_tokens}, tables.__getitem__)
        if is_lost:  # its first block was not loaded
            self.puts.withdraw(request.table[:1])
            pinned = self.puts._pinned.keys() - self.cache.launched.keys()
            assert not pinned - self.cache.matched.keys()
            request.num_certain = before
        request.num_computed_tokens = request.num_certain
        if request.num_certain == request.num_tokens < MOST_BLOCKS * BLOCK:
            request.num_tokens += 1  # a token was sampled

    @rule(request=requests)
    def preempt(self, request: FakeRequest) -> None:
        request.num_computed_tokens = request.num_certain = 0
        self.puts.admitted(request)

    @rule(request=consumes(requests), is_known=st.booleans())
    def finish(self, request: FakeRequest, is_known: bool) -> None:
        num_blocks = min(request.num_computed_tokens, request.num_tokens - 1) // BLOCK
        has_more = num_blocks > self.puts._num_offered.get(request.request_id, 0)
        self.puts.finished(request, request.table if is_known else ())
        if is_known and has_more and not self.cache.is_full:
            assert self.cache.cached[request.request_id] == num_blocks

    @rule(request=requests)
    def evict(self, request: FakeRequest) -> None:
        self.cache.cached[request.request_id] = 0

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
            copied.update(blocks)
        assert all(self.pool.pins[block] >= count for block, count in copied.items())
        assert self.puts.is_pinning == any(self.pool.pins.values())

    def teardown(self) -> None:
        self.puts.launch()
        self.cache.launched.clear()
        self.puts.release()
        assert not self.puts.is_pinning
        assert not any(self.pool.pins.values())


TestRequests = Requests.TestCase
