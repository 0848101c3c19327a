"""Guesses of what workers hold, from the router's own decisions.

`Placements` stands in for a worker that publishes no events: it remembers the prompts that were
sent there, as many as the worker's cache can hold, least recently used first out. `Expectations`
closes the gap between a decision and the events that follow from it.

Both note their guesses in the index, under a source of the worker's own (`guesses_about`). Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier
from flexcache.router.index import Holder, KVIndexer
from flexcache.router.load import Running

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_BLOCKS = 8_192
"""Capacity of a worker that tells none: 131,072 tokens. Small, because blocks that are assumed and
not there draw requests to a worker that must compute them: three times too many cost 11 to 47 % of
the time to the first token in simulations."""

EXPECTED_FOR_S = 5.0


def guesses_about(worker: str) -> str:
    """Return the name of the source under which guesses about a worker are noted."""
    return f"guesses about {worker}"


def _holder(worker: str) -> Holder:
    return Holder(guesses_about(worker), Tier.GPU)


@dataclass(slots=True)
class _AssumedCache:
    """A worker's cache as it should be.

    Attributes:
        last_use: Tick of each block's last use, least recently used first.
    """

    holder: Holder
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int = DEFAULT_NUM_BLOCKS
    last_use: OrderedDict[int, int] = field(default_factory=OrderedDict)


class Placements:
    """Caches of workers without events.

    A request uses its blocks when it starts and when it ends, the last block first, as vLLM does.
    """

    def __init__(self, index: KVIndexer) -> None:
        self._index = index
        self._caches: dict[str, _AssumedCache] = {}
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

    def place(self, running: Running, keys: Sequence[int]) -> None:
        """Note that a request was sent to a worker.

        Args:
            keys: The prompt's whole blocks, of the worker's block size.
        """
        cache = self._cache(running.worker)
        uses = []
        for key in keys:
            use = cache.last_use.get(key)
            if use is None:
                break
            uses.append(use)
        running.keys, running.uses, running.tick = keys, uses, self._use(cache, keys)
        running.noted_in = cache

    def ended(
        self, running: Running, *, cached_tokens: int | None = None, was_served: bool = True
    ) -> None:
        """Note that a request ended.

        Args:
            cached_tokens: What the engine reported. If it had fewer blocks than assumed, it has
                evicted the first of those that it lacked, and with it all that was used no later.
            was_served: False: the engine did not take it.
        """
        cache = self._caches.get(running.worker)
        if cache is None or running.noted_in is not cache:
            return
        if not was_served:
            new = running.keys[len(running.uses) :]
            self._drop(cache, [key for key in new if cache.last_use.get(key) == running.tick])
            return
        if cached_tokens is not None:
            num_cached = cached_tokens // cache.block_size
            if num_cached < len(running.uses):
                self._evict_until(cache, running.uses[num_cached])
        self._use(cache, running.keys)

    def forget(self, worker: str) -> None:
        """Forget a worker, which is gone."""
        self.empty(worker)
        self._caches.pop(worker, None)

    def empty(self, worker: str) -> None:
        """Forget the blocks of a worker, which may have lost them, and keep its capacity."""
        cache = self._caches.get(worker)
        if cache is not None:
            self._index.forget(cache.holder)
            # Another one, so that requests of before are known by the one that they were noted in.
            self._caches[worker] = replace(cache, last_use=OrderedDict())

    def _cache(self, worker: str) -> _AssumedCache:
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = _AssumedCache(_holder(worker))
        return cache

    def _use(self, cache: _AssumedCache, keys: Sequence[int]) -> int:
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

    def _evict(self, cache: _AssumedCache, count: int) -> None:
        gone = [cache.last_use.popitem(last=False)[0] for _ in range(count)]
        if gone:
            self._index.removed(cache.holder, gone)

    def _evict_until(self, cache: _AssumedCache, tick: int) -> None:
        """Evict all blocks that were used last at ``tick`` or before."""
        count = 0
        for use in cache.last_use.values():
            if use > tick:
                break
            count += 1
        self._evict(cache, count)

    def _drop(self, cache: _AssumedCache, keys: Sequence[int]) -> None:
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


class Expectations:
    """Blocks that workers with events are about to report: until the first token, or for
    `EXPECTED_FOR_S` seconds."""

    def __init__(self, index: KVIndexer) -> None:
        self._index = index
        self._counts: dict[str, Counter[int]] = {}
        """By worker and block: how many requests expect it."""

    def expect(self, running: Running, keys: Sequence[int]) -> None:
        """Expect a worker to have a prompt's blocks soon.

        Args:
            keys: All of the prompt, of one block size.
        """
        running.keys = keys[: self._index.stored(_holder(running.worker), keys)]
        counts = self._counts.setdefault(running.worker, Counter())
        counts.update(running.keys)
        running.noted_in = counts

    def settle(self, running: Running) -> None:
        """Drop what is expected from a request: events tell from now on."""
        counts = self._counts.get(running.worker)
        if counts is None or running.noted_in is not counts:
            return
        running.noted_in = None
        counts.subtract(running.keys)
        gone = [key for key in running.keys if not counts[key]]
        for key in gone:
            del counts[key]
        self._index.removed(_holder(running.worker), gone)

    def expire(self, running: Running, now: float) -> None:
        """Drop what was expected from a request for too long."""
        if running.noted_in is not None and now - running.since_s >= EXPECTED_FOR_S:
            self.settle(running)

    def forget(self, worker: str) -> None:
        """Forget a worker; its requests are known by the counts that they were noted in."""
        self._index.removed(_holder(worker), list(self._counts.pop(worker, ())))

    def check(self, in_flight: Iterable[Running]) -> None:
        """Raise `InternalError` if the counts, or the index, disagree with what is expected."""
        counts: dict[str, Counter[int]] = {worker: Counter() for worker in self._counts}
        for running in in_flight:
            expected_in = self._counts.get(running.worker)
            if expected_in is not None and running.noted_in is expected_in:
                counts[running.worker].update(running.keys)
        if counts != self._counts:
            raise InternalError("expected blocks are miscounted")
        for worker, expected_there in counts.items():
            if self._index.num_held(_holder(worker)) != len(expected_there):
                raise InternalError(f"the index does not have what is expected of {worker}")
