"""Guesses of what workers hold, from the router's own decisions.

`Placements` stands in for a worker that publishes no events: it remembers the prompts that were
sent there, as many as the worker's cache can hold, least recently used first out. `LowerTiers` does
the same for the tiers below such workers' GPUs. `Expectations` closes the gap between a decision
and the events that follow from it.

All note their guesses in the index, under a source of the worker's or the cache's own
(`guesses_about`). Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
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


def guesses_about(name: str) -> str:
    """Return the name of the source under which guesses about a worker, or the cache at a URL, are
    noted."""
    return f"guesses about {name}"


def _holder(worker: str) -> Holder:
    return Holder(guesses_about(worker), Tier.GPU)


@dataclass(slots=True)
class _AssumedCache:
    """A tier of a worker or a cache as it should be.

    Attributes:
        last_use: Tick of each block's last use, least recently used first.
    """

    index: KVIndexer
    holder: Holder
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int = DEFAULT_NUM_BLOCKS
    last_use: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def use(self, keys: Sequence[int], tick: int) -> None:
        """Make blocks the most recently used."""
        new = [key for key in keys if key not in self.last_use]
        taken = self.index.stored(self.holder, new)
        refused = set(new[taken:])
        for key in reversed(keys):
            if key not in refused:
                self.last_use[key] = tick
                self.last_use.move_to_end(key)
        self.evict(len(self.last_use) - self.num_blocks)

    def evict(self, count: int) -> None:
        """Drop blocks, least recently used first."""
        gone = [self.last_use.popitem(last=False)[0] for _ in range(count)]
        if gone:
            self.index.removed(self.holder, gone)

    def evict_until(self, tick: int) -> None:
        """Evict all blocks that were used last at ``tick`` or before."""
        count = 0
        for use in self.last_use.values():
            if use > tick:
                break
            count += 1
        self.evict(count)

    def drop(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.last_use[key]
        self.index.removed(self.holder, keys)

    def emptied(self) -> _AssumedCache:
        """Forget all blocks; returns another one, so that requests of before are known by the one
        that they were noted in."""
        self.index.forget(self.holder)
        return replace(self, last_use=OrderedDict())

    def check(self) -> None:
        """Raise `InternalError` if the index disagrees, or it exceeds its capacity."""
        uses = list(self.last_use.values())
        if len(uses) > self.num_blocks or uses != sorted(uses):
            raise InternalError(f"{self.holder} is assumed to be too large or out of order")
        bit = self.index.holders.bit(self.holder)
        is_noted = all(bit is not None and self.index.mask(key) >> bit & 1 for key in self.last_use)
        if not is_noted or self.index.num_held(self.holder) != len(uses):
            raise InternalError(f"what {self.holder} is assumed to have and the index disagree")


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
        cache.evict(len(cache.last_use) - num_blocks)

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
            cache.drop([key for key in new if cache.last_use.get(key) == running.tick])
            return
        if cached_tokens is not None:
            num_cached = cached_tokens // cache.block_size
            # The last token is computed in any case, and the block that it ends is never reported.
            usable = (running.work.num_tokens - 1) // cache.block_size
            if num_cached < min(len(running.uses), usable):
                cache.evict_until(running.uses[num_cached])
        self._use(cache, running.keys)

    def forget(self, worker: str) -> None:
        """Forget a worker, which is gone."""
        self.empty(worker)
        self._caches.pop(worker, None)

    def empty(self, worker: str) -> None:
        """Forget the blocks of a worker, which may have lost them, and keep its capacity."""
        cache = self._caches.get(worker)
        if cache is not None:
            self._caches[worker] = cache.emptied()

    def _cache(self, worker: str) -> _AssumedCache:
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = _AssumedCache(self._index, _holder(worker))
        return cache

    def _use(self, cache: _AssumedCache, keys: Sequence[int]) -> int:
        """Make blocks the most recently used; returns the tick."""
        self._tick += 1
        cache.use(keys, self._tick)
        return self._tick

    def check(self) -> None:
        """Raise `InternalError` if a cache and the index disagree, or it exceeds its capacity."""
        for cache in self._caches.values():
            cache.check()


class LowerTiers:
    """Tiers below the GPUs of workers without events: a cache stores the prompts that its workers
    were sent, each tier as many as it has room for, least recently used first out.

    Several workers may share a cache, which is known by its URL. It stores a prompt when it was
    computed, so that one which is not served leaves nothing.

    Attributes:
        block_sizes: Block sizes of the caches.
    """

    def __init__(self, index: KVIndexer) -> None:
        self.block_sizes: set[int] = set()
        self._index = index
        self._tiers: dict[str, dict[Tier, _AssumedCache]] = {}
        self._tick = 0

    def set_capacities(self, url: str, num_blocks: Mapping[Tier, int], block_size: int) -> None:
        """Set the sizes of a cache's tiers; a tier of another block size is emptied."""
        tiers = self._tiers.setdefault(url, {})
        for tier, count in num_blocks.items():
            holder = Holder(guesses_about(url), tier)
            cache = tiers.setdefault(tier, _AssumedCache(self._index, holder, block_size, count))
            if cache.block_size != block_size:
                cache = tiers[tier] = cache.emptied()
            cache.block_size, cache.num_blocks = block_size, count
            cache.evict(len(cache.last_use) - count)
        self._note_sizes()

    def _note_sizes(self) -> None:
        sizes = (tier.block_size for tiers in self._tiers.values() for tier in tiers.values())
        self.block_sizes = set(sizes)  # read with each request

    def served(
        self, url: str, keys: Sequence[int], block_size: int, cached_tokens: int | None = None
    ) -> None:
        """Note that a worker of a cache has computed a prompt.

        Args:
            keys: The prompt's whole blocks that can be found again, of this block size.
            cached_tokens: What the engine reported. Of what it lacked, no tier has anything.
        """
        self._tick += 1
        for cache in self._tiers.get(url, {}).values():
            if cache.block_size != block_size:
                continue
            lacked = () if cached_tokens is None else keys[cached_tokens // block_size :]
            if lacked and (use := cache.last_use.get(lacked[0])) is not None:
                cache.evict_until(use)
            cache.use(keys, self._tick)

    def empty(self, url: str, *lost: Tier) -> None:
        """Forget what some tiers of a cache had; their sizes stay."""
        tiers = self._tiers.get(url, {})
        for tier in tiers.keys() & set(lost):
            tiers[tier] = tiers[tier].emptied()

    def keep(self, urls: Iterable[str]) -> None:
        """Forget all caches but these: the others are gone."""
        for url in self._tiers.keys() - set(urls):
            self.empty(url, *Tier)
            del self._tiers[url]
        self._note_sizes()

    def check(self) -> None:
        """Raise `InternalError` if a tier and the index disagree, or it exceeds its capacity."""
        for tiers in self._tiers.values():
            for cache in tiers.values():
                cache.check()


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
