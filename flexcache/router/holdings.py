"""Holdings: what the workers' caches have of a prompt, from KV events or guessed from decisions.

A worker either has sources of events or is guessed about. Where there are events, the blocks of a
request that was just sent count too, until the events that tell of them have come. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.events.wire import EventBatch
from flexcache.router.chooser import RouteRequest
from flexcache.router.events import EventApplier
from flexcache.router.fleet import Tier, WorkerSpec
from flexcache.router.index import (
    BlockForm,
    Holder,
    Holders,
    KVIndexer,
    Space,
    Tokens,
    chain_of,
)
from flexcache.router.load import FloatArray, Running
from flexcache.router.placements import (
    DEFAULT_BLOCK_SIZE,
    Expectations,
    LowerTiers,
    Placements,
    guesses_about,
)
from flexcache.router.stats import IndexStats

TokenCounts = npt.NDArray[np.int64]


class WorkerTable:
    """Which holders supply each worker.

    A worker uses all tiers of its sources. If a source publishes for several data-parallel ranks, a
    worker with a rank uses those of its own and those without any.

    Args:
        holders: The index's.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._workers: list[tuple[frozenset[str], int | None]] = []
        self._version = -1
        self._columns: dict[Tier, npt.NDArray[np.intp]] = {}

    def set_workers(self, workers: Sequence[WorkerSpec]) -> None:
        """Replace all workers."""
        self._workers = [
            (
                frozenset(source.endpoint for source in worker.sources)
                | set(map(guesses_about, filter(None, (worker.name, worker.cache_url)))),
                worker.data_parallel_rank,
            )
            for worker in workers
        ]
        self._version = -1

    def matched(self, depths: TokenCounts) -> FloatArray:
        """Return the tokens that each tier of each worker supplies; shape (3, workers).

        A token counts for the fastest tier that has it; the sum of the tiers is the prefix that
        need not be computed.

        Args:
            depths: Tokens of each holder, by position of its bit; the last entry is 0.
        """
        if self._version != self._holders.version:
            self._refresh()
        gpu, dram, disk = (depths[self._columns[tier]].max(axis=1) for tier in Tier)
        dram = np.maximum(gpu, dram)
        disk = np.maximum(dram, disk)
        return np.array((gpu, dram - gpu, disk - dram), dtype=np.float64)

    def _refresh(self) -> None:
        """Find the holders of each worker."""
        holders = self._holders
        self._version = holders.version
        by_source: dict[str, list[Holder]] = {}
        for holder in holders:
            by_source.setdefault(holder.source, []).append(holder)
        rows: dict[Tier, list[list[int]]] = {tier: [] for tier in Tier}
        for sources, rank in self._workers:
            row: dict[Tier, list[int]] = {tier: [] for tier in Tier}
            for source in sources:
                for holder in holders_of_rank(by_source.get(source, []), rank):
                    bit = holders.bit(holder)
                    assert bit is not None
                    row[holder.tier].append(bit)
            for tier in Tier:
                rows[tier].append(row[tier])
        self._columns = {tier: _padded(rows[tier]) for tier in Tier}


def holders_of_rank(holders: Collection[Holder], rank: int | None) -> Collection[Holder]:
    """Return those holders of a source that supply a data-parallel rank."""
    ranks = {holder.rank for holder in holders} - {None}
    if rank is None or len(ranks) < 2:
        return holders
    return [holder for holder in holders if holder.rank in (None, rank)]


def _padded(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.intp]:
    """Return a table with -1, the position of the entry that is always 0, where rows end."""
    width = max(map(len, rows), default=0) or 1
    table = np.full((len(rows), width), -1, np.intp)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return table


class Found(NamedTuple):
    """What the index knows of a prompt.

    Attributes:
        tokens: Tokens that each holder has, for `WorkerTable.matched`.
        keys: Keys of the prompt's blocks in each form.
    """

    tokens: TokenCounts
    keys: dict[BlockForm, list[int]]


def find(
    index: KVIndexer,
    forms: Iterable[BlockForm],
    tokens: Tokens,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    limit: int | None = None,
) -> Found:
    """Look a prompt up.

    Args:
        forms: Forms of the blocks that may be found.
        limit: Tokens at most that an engine takes from a cache: one less than the prompt has,
            because the last one must be computed.

    Raises:
        ValueError: A token id is out of range.
    """
    known = np.zeros(index.holders.num_bits + 1, np.int64)
    by_form: dict[BlockForm, list[int]] = {}
    for form in sorted(forms):  # runs follow their blocks
        keys = by_form.get(form._replace(run_blocks=1))
        if keys is None:
            chain = chain_of(Space(form.size, adapter, form.lookahead))
            keys = chain.block_keys(tokens, salt=salt)
        keys = by_form[form] = keys[form.run_blocks - 1 :: form.run_blocks]
        size = form.size * form.run_blocks
        usable = keys if limit is None else keys[: limit // size]
        np.maximum(known, index.depths(index.match(usable)) * size, out=known)
    return Found(known, by_form)


Approximate = Literal["auto", "always", "never"]

_WORTH_AN_EARLY_LOAD = 256
"""Tokens; fewer are loaded, or computed, about as fast as a cache can be asked."""
_NO_WORKER = WorkerSpec(name="", url="")


class Holdings:
    """Joins index, events and guesses.

    Args:
        max_blocks: Different blocks in the index at most.
        approximate: See `KVRouter`.
    """

    def __init__(self, max_blocks: int, approximate: Approximate) -> None:
        self.index = KVIndexer(max_blocks)
        self.applier = EventApplier(self.index)
        self.expectations = Expectations(self.index)
        self.placements = Placements(self.index)
        self.lower_tiers = LowerTiers(self.index)
        self._table = WorkerTable(self.index.holders)
        self._approximate = approximate
        self._num_workers = 0
        self._used: dict[str, WorkerSpec] = {}
        """By name, without the sources that are not asked."""
        self._users: dict[str, list[WorkerSpec]] = {}
        """By source."""
        self._guessed: dict[str, bool] = {}
        """By worker: whether its blocks are guessed."""
        self._has_guessed = False

    # -- workers and events ------------------------------------------------------------------------

    @property
    def guessed_caches(self) -> set[str]:
        """URLs of the caches whose blocks are guessed."""
        specs = self._used.values()
        return {spec.cache_url for spec in specs if spec.cache_url and self.is_guessed(spec.name)}

    def is_guessed(self, worker: str) -> bool:
        """Return whether a worker's blocks are guessed."""
        return self._guessed.get(worker, False)

    def set_workers(self, specs: Sequence[WorkerSpec | None]) -> None:
        """Replace the workers.

        Args:
            specs: By number; None: the number is free.
        """
        guessed = {spec.name: self._is_guessed(spec) for spec in specs if spec}
        for name, was_guessed in self._guessed.items():
            if guessed.get(name) is not was_guessed:
                self.forget_guesses(name)
            if name not in guessed:
                self.placements.forget(name)
        self._guessed, self._num_workers = guessed, len(specs)
        self._has_guessed = any(guessed.values())
        used = [self._as_used(spec) for spec in specs]
        self._follow(used)
        self.lower_tiers.keep(self.guessed_caches)
        self._table.set_workers(used)

    def _follow(self, used: Sequence[WorkerSpec]) -> None:
        """Keep what the sources of these workers hold, and forget what others do."""
        users: dict[str, list[WorkerSpec]] = {}
        for spec in used:
            for source in spec.sources:
                users.setdefault(source.endpoint, []).append(spec)
        for gone in sorted(self._users.keys() - users.keys()):
            self.applier.forget(gone)
        self._users, self._used = users, {spec.name: spec for spec in used}
        self.applier.on_disk.keep(
            source.endpoint for spec in used if spec.cache_url for source in spec.sources
        )

    def _is_guessed(self, spec: WorkerSpec) -> bool:
        if self._approximate == "auto":
            return not spec.sources
        return self._approximate == "always"

    def _as_used(self, spec: WorkerSpec | None) -> WorkerSpec:
        """Return a worker without the sources that are not asked."""
        if spec is None:
            return _NO_WORKER
        return msgspec.structs.replace(spec, sources=()) if self._is_guessed(spec) else spec

    def apply(self, source: str, batch: EventBatch) -> None:
        """Apply events of a source; those of one that no worker uses are ignored."""
        if self.uses(source):
            self.applier.apply(source, batch)

    def uses(self, source: str) -> bool:
        """Return whether events of a source are applied."""
        return source in self._users

    def only_user(self, source: str, rank: int | None) -> str | None:
        """Return the name of the only worker that has the blocks of a source's rank; None: there
        are none or several, as of a shared cache."""
        users = self._users.get(source, [])
        if rank is not None and len(users) > 1:
            users = [spec for spec in users if spec.data_parallel_rank == rank]
        return users[0].name if len(users) == 1 else None

    def forget_guesses(self, worker: str) -> None:
        """Drop what is guessed of a worker, which may have lost its cache: the DRAM of one that no
        other shares, too."""
        self.placements.empty(worker)
        self.expectations.forget(worker)
        spec = self._used.get(worker, _NO_WORKER)
        caches = [each.cache_url for each in self._used.values()]
        if spec.cache_url and caches.count(spec.cache_url) == 1:
            self.lower_tiers.empty(spec.cache_url, Tier.DRAM)

    # -- requests ----------------------------------------------------------------------------------

    def find(self, request: RouteRequest) -> Found | None:
        """Look up a request; None if its tokens are unknown or are none."""
        forms = {*self.applier.forms}
        if self._has_guessed:
            sizes = {*self.placements.block_sizes, *self.lower_tiers.block_sizes}
            forms |= set(map(BlockForm, {DEFAULT_BLOCK_SIZE, *sizes}))
        if request.token_ids is None or not forms:
            return None
        try:
            return find(
                self.index,
                forms,
                request.token_ids,
                adapter=request.adapter,
                salt=request.cache_salt,
                limit=request.num_tokens - 1,
            )
        except ValueError:  # the engine will say so
            return None

    def matched(self, found: Found | None) -> FloatArray:
        """Return the tokens that each tier of each worker supplies; shape (3, workers)."""
        if found is None:
            return np.zeros((len(Tier), self._num_workers))
        return self._table.matched(found.tokens)

    def disk_block(self, spec: WorkerSpec, found: Found | None, num_tokens: int) -> int | None:
        """Return what a worker's cache calls the last block of a prompt that it has below DRAM.

        Args:
            num_tokens: How much of the prompt is only there.

        Returns:
            None if it is unknown, or the cache is not to be asked for it.
        """
        if found is None or spec.cache_url is None or num_tokens < _WORTH_AN_EARLY_LOAD:
            return None
        deepest, holding = self._deepest_on_disk(spec, found)
        if holding is None:
            return None
        for (size, _, _), keys in found.keys.items():
            if deepest % size == 0 and deepest <= len(keys) * size:
                name = self.applier.on_disk.find(holding, keys[deepest // size - 1])
                if name is not None:
                    return name
        return None

    def _deepest_on_disk(self, spec: WorkerSpec, found: Found) -> tuple[int, Holder | None]:
        """Return how much of a prompt a worker's caches have below DRAM, and which has the most."""
        deepest, holding = 0, None
        for source in spec.sources:
            holders = self.applier.holders(source.endpoint)
            for holder in holders_of_rank(holders, spec.data_parallel_rank):
                bit = self.index.holders.bit(holder)
                if holder.tier is Tier.DISK and bit is not None and found.tokens[bit] > deepest:
                    deepest, holding = int(found.tokens[bit]), holder
        return deepest, holding

    def placed(self, running: Running, found: Found | None) -> None:
        """Note that a request was sent to a worker."""
        if found is None:
            return
        if self.is_guessed(running.worker):
            keys = found.keys[BlockForm(self.placements.block_size(running.worker))]
            self.placements.place(running, keys)
        elif found.keys and self._approximate != "never":
            self.expectations.expect(running, found.keys[self._finest_form(running.worker, found)])

    def _finest_form(self, worker: str, found: Found) -> BlockForm:
        """Return the form with the smallest blocks that a worker's own publishers have used, or
        that any has: blocks in a form with less lookahead would be found by too many prompts."""
        told = [self.applier.form(source.endpoint) for source in self._used[worker].sources]
        its = {form for form in told if form is not None}
        return min(its & set(found.keys) or set(found.keys))

    def ended(self, running: Running, cached_tokens: int | None) -> None:
        """Note the end of a request.

        Args:
            cached_tokens: What the engine reported; None if it did not.
        """
        self.expectations.settle(running)
        self.placements.ended(running, cached_tokens=cached_tokens, was_served=running.was_served)
        spec = self._used.get(running.worker, _NO_WORKER)
        if spec.cache_url and running.was_served and self.is_guessed(spec.name):
            size = self.placements.block_size(spec.name)
            keys = running.keys[: (running.work.num_tokens - 1) // size]
            self.lower_tiers.served(spec.cache_url, keys, size, cached_tokens)

    def stats(self) -> IndexStats:
        index, applier = self.index, self.applier
        held: dict[str, dict[str, int]] = {}
        for holder in index.holders:
            tiers = held.setdefault(holder.source, {})
            name = holder.tier.value
            tiers[name] = tiers.get(name, 0) + index.num_held(holder)
        return IndexStats(
            blocks=index.num_blocks,
            held_blocks=held,
            bytes=applier.num_bytes,
            max_blocks=index.max_blocks,
            refused_blocks=index.num_refused,
            orphans=applier.num_waiting,
            events=dict(applier.applied),
            event_blocks=dict(applier.blocks),
            ignored_events=dict(applier.ignored),
        )

    def check(self, in_flight: Iterable[Running]) -> None:
        """Verify index and guesses.

        Raises:
            InternalError: They do not hold together.
        """
        self.applier.check()
        self.placements.check()
        self.lower_tiers.check()
        self.expectations.check(in_flight)
