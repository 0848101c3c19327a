"""What workers probably hold, judged from the router's own decisions.

`Placements` stands in for a worker that publishes no events: it remembers the prompts that were
sent there, as many as the worker's cache can hold, least recently used first out. `Expectations`
closes the gap between a decision and the events that follow from it.

Both note their guesses in the index, under a source of the worker's own (`guesses_about`). Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier
from flexcache.router.index import Holder, KVIndexer

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_BLOCKS = 8_192
"""Capacity of a worker that tells none: 131,072 tokens. Small, because blocks that are assumed and
not there draw requests to a worker that must compute them."""

EXPECTED_FOR_S = 5.0


def guesses_about(worker: str) -> str:
    """Return the name of the source under which guesses about a worker are noted."""
    return f"guesses about {worker}"


def _holder(worker: str) -> Holder:
    return Holder(guesses_about(worker), Tier.GPU)


@dataclass(slots=True)
class _Cache:
    """A worker's cache as it should be.

    Attributes:
        last_use: Tick of each block's last use, least recently used first.
    """

    holder: Holder
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int = DEFAULT_NUM_BLOCKS
    last_use: OrderedDict[int, int] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request that was sent to a worker.

    Attributes:
        uses: Tick of the last use before it, of each leading block that was there.
        tick: Its own.
    """

    worker: str
    keys: Sequence[int]
    uses: Sequence[int]
    tick: int


class Placements:
    """Caches of workers without events.

    A request uses its blocks when it starts and when it ends, the last block first, as vLLM does.
    """

    def __init__(self, index: KVIndexer) -> None:
        self._index = index
        self._caches: dict[str, _Cache] = {}
        self._placed: dict[str, _Placed] = {}
        self._tick = 0

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes of the workers."""
        return {cache.block_size for cache in self._caches.values()}

    def block_size(self, worker: str) -> int:
        """Return the tokens per block of a worker."""
        cache = self._caches.get(worker)
        return DEFAULT_BLOCK_SIZE if cache is None else cache.block_size

    def set_capacity(self, worker: str, num_blocks: int, block_size: int) -> None:
        """Set the size of a worker's cache; another block size empties it."""
        if worker in self._caches and self._caches[worker].block_size != block_size:
            self.empty(worker)
        cache = self._cache(worker)
        cache.block_size, cache.num_blocks = block_size, num_blocks
        self._evict(cache, len(cache.last_use) - num_blocks)

    def place(self, request_id: str, worker: str, keys: Sequence[int]) -> None:
        """Note that a request was sent to a worker.

        Args:
            keys: The prompt's whole blocks, of the worker's block size.
        """
        cache = self._cache(worker)
        uses = []
        for key in keys:
            use = cache.last_use.get(key)
            if use is None:
                break
            uses.append(use)
        self._placed[request_id] = _Placed(worker, keys, uses, self._use(cache, keys))

    def ended(
        self, request_id: str, *, cached_tokens: int | None = None, was_served: bool = True
    ) -> None:
        """Note that a request ended.

        Args:
            cached_tokens: What the engine reported. If it had fewer blocks than assumed, it has
                evicted the first of those that it lacked, and with it all that was used no later.
            was_served: False: the engine did not take it.
        """
        placed = self._placed.pop(request_id, None)
        cache = self._caches.get(placed.worker) if placed is not None else None
        if placed is None or cache is None:
            return
        if not was_served:
            new = placed.keys[len(placed.uses) :]
            self._drop(cache, [key for key in new if cache.last_use.get(key) == placed.tick])
            return
        if cached_tokens is not None:
            num_cached = cached_tokens // cache.block_size
            if num_cached < len(placed.uses):
                self._evict_until(cache, placed.uses[num_cached])
        self._use(cache, placed.keys)

    def forget(self, worker: str) -> None:
        """Forget a worker, which is gone."""
        self.empty(worker)
        self._caches.pop(worker, None)

    def empty(self, worker: str) -> None:
        """Forget the blocks of a worker, which may have lost them, and keep its capacity."""
        cache = self._caches.get(worker)
        if cache is not None:
            cache.last_use.clear()
            self._index.forget(cache.holder)
            for request_id in [at for at, each in self._placed.items() if each.worker == worker]:
                del self._placed[request_id]

    def _cache(self, worker: str) -> _Cache:
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = _Cache(_holder(worker))
        return cache

    def _use(self, cache: _Cache, keys: Sequence[int]) -> int:
        """Make blocks the most recently used; returns the tick."""
        self._tick += 1
        last_use = cache.last_use
        new = [key for key in keys if key not in last_use]
        taken = self._index.stored(cache.holder, new)
        refused = set(new[taken:])
        for key in reversed(keys):
            if key not in refused:
                last_use[key] = self._tick
                last_use.move_to_end(key)
        self._evict(cache, len(last_use) - cache.num_blocks)
        return self._tick

    def _evict(self, cache: _Cache, count: int) -> None:
        gone = [cache.last_use.popitem(last=False)[0] for _ in range(count)]
        if gone:
            self._index.removed(cache.holder, gone)

    def _evict_until(self, cache: _Cache, tick: int) -> None:
        """Evict all blocks that were used last at ``tick`` or before."""
        count = 0
        for use in cache.last_use.values():
            if use > tick:
                break
            count += 1
        self._evict(cache, count)

    def _drop(self, cache: _Cache, keys: Sequence[int]) -> None:
        for key in keys:
            del cache.last_use[key]
        self._index.removed(cache.holder, keys)

    def check(self) -> None:
        """Raise `InternalError` if a cache and the index disagree, or it exceeds its capacity."""
        for worker, cache in self._caches.items():
            uses = list(cache.last_use.values())
            if len(uses) > cache.num_blocks or uses != sorted(uses):
                raise InternalError(f"the assumed cache of {worker} is too large or out of order")
            bit = self._index.holders.bit(cache.holder)
            is_noted = all(
                bit is not None and self._index.mask(key) >> bit & 1 for key in cache.last_use
            )
            if not is_noted or self._index.num_held(cache.holder) != len(uses):
                raise InternalError(f"the assumed cache of {worker} and the index disagree")


@dataclass(frozen=True, slots=True)
class _Expected:
    worker: str
    keys: Sequence[int]
    until: float


class Expectations:
    """Blocks that workers with events are about to report: until the first token, or for
    `EXPECTED_FOR_S` seconds."""

    def __init__(self, index: KVIndexer) -> None:
        self._index = index
        self._expected: OrderedDict[str, _Expected] = OrderedDict()
        """By request, the first to expire first."""
        self._counts: dict[str, Counter[int]] = {}
        """By worker and block: how many requests expect it."""

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, request_id: str, worker: str, keys: Sequence[int], now: float) -> None:
        """Expect a worker to have a prompt's blocks soon.

        Args:
            keys: All of the prompt, of one block size.
        """
        self.settle(request_id)
        taken = keys[: self._index.stored(_holder(worker), keys)]
        self._expected[request_id] = _Expected(worker, taken, now + EXPECTED_FOR_S)
        self._counts.setdefault(worker, Counter()).update(taken)

    def settle(self, request_id: str) -> None:
        """Drop what is expected from a request: events tell from now on."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        counts = self._counts[expected.worker]
        counts.subtract(expected.keys)
        gone = [key for key in expected.keys if not counts[key]]
        for key in gone:
            del counts[key]
        self._index.removed(_holder(expected.worker), gone)

    def expire(self, now: float) -> None:
        """Drop what was expected for too long."""
        while self._expected:
            request_id, expected = next(iter(self._expected.items()))
            if expected.until > now:
                break
            self.settle(request_id)

    def forget(self, worker: str) -> None:
        """Forget a worker."""
        for request_id in [at for at, each in self._expected.items() if each.worker == worker]:
            self.settle(request_id)
        self._counts.pop(worker, None)

    def check(self) -> None:
        """Raise `InternalError` if the counts, or the index, disagree with what is expected."""
        counts: dict[str, Counter[int]] = {worker: Counter() for worker in self._counts}
        for expected in self._expected.values():
            counts[expected.worker].update(expected.keys)
        if counts != self._counts:
            raise InternalError("expected blocks are miscounted")
        for worker, expected_there in counts.items():
            if self._index.num_held(_holder(worker)) != len(expected_there):
                raise InternalError(f"the index does not have what is expected of {worker}")
