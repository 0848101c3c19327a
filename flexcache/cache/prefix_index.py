"""Prefix index of one tier: which blocks are cached, where, and in which order they are evicted.

Blocks are kept in *runs*: arrays of consecutive blocks of one sequence. A run starts at the root
or at a position in another run, so the runs form a tree:

    root   |0------------------9|            run A, blocks 0..9 of a prompt
                  |5-----------------14|     run B, parent A after 5 blocks
                                 |12--13|    run C, parent B after 7 of B's blocks

    half-open: run B holds depths [5, 15); parent_length = 5 blocks of A precede it.

A dictionary per root maps a key to (run, offset). Since only leaves are evicted, the cached blocks
are closed under prefixes: if the key of block i is there, so are those of all blocks before it. The
longest match is hence a bisection over a handful of keys, and the block ids of a match are slices
of a few arrays; neither takes a Python step per cached block.

A *hold* on its run keeps a block in place: a child that hangs off the run, or a pin. Holds are
counted by length, and all blocks beyond the longest hold are the run's evictable tail. Recency is
kept as segments, because a prompt that matches part of a run makes only that part recent; it never
grows along a run, so the tail is always its least recent part.

Each segment also has the *kind* of its blocks: an `EvictionQueue` finds the tail that goes first by
kind and recency. Under LRU all are of one kind, and the blocks with the lowest time go first. Each
tenant has a queue of its own, if tenants matter.

Not thread-safe. Knows neither what a block id stands for nor the time: `now` is any number that
does not decrease.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.eviction_queue import RETIRED, EvictionQueue, LruRanking, Outlook, Ranking
from flexcache.cache.sorted_tails import Entry
from flexcache.cache.staircase import cover, cut
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

BlockIds = npt.NDArray[np.int64]

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)
_OFFSET_BITS = 24
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_ONE_KIND = Outlook(0, 0, 0)
_DISCARDED = float("-inf")  # recency of blocks that can no longer be found: the first to go


def _view(ids: array[int]) -> BlockIds:
    """Return a view of a run's ids. It must be dropped before their number changes."""
    return np.frombuffer(ids, dtype=np.int64) if ids else NO_BLOCKS


Segment = tuple[int, float, int]
"""Blocks of a run that were last used at once: where they end, when that was, and their kind."""


class Run:
    """Consecutive blocks of one sequence. Internal to the index."""

    __slots__ = (
        "blocks", "children", "depth", "holds", "keys", "longest_holds", "parent",
        "parent_length", "queue", "queued", "recency", "root", "run_id", "uses",
    )  # fmt: skip

    def __init__(
        self, run_id: int, root: RootId, parent: Run | None, parent_length: int,
        queue: EvictionQueue,
    ) -> None:  # fmt: skip
        self.run_id = run_id
        self.root = root
        self.queue = queue
        self.parent = parent
        self.parent_length = parent_length
        self.depth: int = 0 if parent is None else parent.depth + parent_length
        self.keys: list[BlockKey] = []
        self.blocks: array[int] = array("q")  # of a few ids, made and freed faster than numpy's
        self.holds: dict[int, int] | None = None  # length -> how often; below the longest also 0
        self.longest_holds: list[int] | None = None  # heap of the negated lengths
        self.children: dict[int, Run] | None = None
        self.recency: list[Segment] = []  # ends rise, times do not
        self.queued: Entry | None = None  # its entry in the queue
        self.uses: list[tuple[int, int]] | None = None  # see `Retention`

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def held_length(self) -> int:
        return -self.longest_holds[0] if self.longest_holds else 0

    def segment(self, length: int) -> Segment:
        """Return the segment of the last of the first ``length`` blocks. O(segments)."""
        for segment in self.recency:
            if segment[0] >= length:
                return segment
        raise InternalError(f"run {self.run_id} has no segment at {length}")

    def hold(self, length: int) -> None:
        if self.holds is None or self.longest_holds is None:
            self.holds, self.longest_holds = {length: 1}, [-length]
            return
        count = self.holds.get(length)
        self.holds[length] = 1 if count is None else count + 1
        if count is None:
            heapq.heappush(self.longest_holds, -length)

    def release(self, length: int) -> None:
        """Amortised O(log lengths held). An unheld length is dropped once it is the longest."""
        holds, longest = self.holds, self.longest_holds
        assert holds is not None and longest is not None
        holds[length] -= 1
        while longest and not holds[-longest[0]]:
            del holds[-heapq.heappop(longest)]
        if not holds:
            self.holds = self.longest_holds = None

    def touch(self, length: int, now: float, kind: int) -> None:
        """Make the first ``length`` blocks as recent as ``now``, and of a kind. Amortised O(1).

        Blocks that are to be retained for longer are more recent already, and stay so.
        """
        cover(self.recency, (length, now, kind))

    def truncate(self, length: int) -> None:
        del self.keys[length:]
        del self.blocks[length:]
        cut(self.recency, length)


def _like(run: Run, length: int) -> Outlook:
    """Return the kind that the last of a run's first blocks has, for all of a prompt."""
    kind = run.segment(length)[2]
    return Outlook(kind, kind, 0)


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a prompt: ``length`` blocks of ``run`` and all before them.

    Valid until the index changes; `PrefixIndex.pin` keeps it valid.
    """

    run: Run | None
    length: int
    num_blocks: int


EMPTY_MATCH = PrefixMatch(None, 0, 0)


class PrefixIndex:
    """The tree of runs; see the module for its invariants.

    Args:
        ranking: What blocks are worth; None for LRU.
        num_tenants: Parts of the blocks that are evicted each on their own.
        tenant_of: Returns the number of a root's part.
    """

    def __init__(
        self,
        ranking: Ranking | None = None,
        num_tenants: int = 1,
        tenant_of: Callable[[RootId], int] = lambda root: 0,
    ) -> None:
        self.ranking = LruRanking() if ranking is None else ranking
        self._has_kinds = self.ranking.num_kinds > 1
        self._directories: dict[RootId, dict[BlockKey, int]] = {}
        self._runs: dict[int, Run] = {}
        self._next_run_id = 0
        self._tenant_of = tenant_of
        self._now = 0.0
        self._queues = [EvictionQueue(self.ranking, self._is_evictable) for _ in range(num_tenants)]
        self._num_blocks = 0
        self._discarded: dict[int, None] = {}  # runs with blocks that wait for their last unpin
        self.on_removed: list[Callable[[RootId, Sequence[BlockKey]], None]] = []
        """Called with consecutive blocks that can no longer be found."""

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def contains(self, root: RootId, key: BlockKey) -> bool:
        return key in self._directories.get(root, ())

    def run_numbers(self) -> list[int]:
        """Return the numbers of all runs; a run's is above those of the runs before it."""
        return list(self._runs)

    def run(self, number: int) -> Run | None:
        """Return the run of this number, if it is still there."""
        return self._runs.get(number)

    def num_insertable(self, root: RootId, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first keys are neither here nor among those before them."""
        directory, distinct = self._directories.get(root, {}), set(keys)
        if len(distinct) == len(keys) and directory.keys().isdisjoint(distinct):
            return len(keys)
        seen = set[BlockKey]()
        for position, key in enumerate(keys):
            if key in seen or key in directory:
                return position
            seen.add(key)
        return len(keys)

    def locate(self, root: RootId, key: BlockKey) -> PrefixMatch:
        """Return the prefix that ends with ``key``; empty if it is not cached. O(1)."""
        code = self._directories.get(root, {}).get(key)
        if code is None:
            return EMPTY_MATCH
        run, length = self._runs[code >> _OFFSET_BITS], (code & _OFFSET_MASK) + 1
        return PrefixMatch(run, length, run.depth + length)

    def match(self, keys: BlockKeys, near: int | None = None) -> PrefixMatch:
        """Return the longest cached prefix. O(log n) probes in the prompt's blocks; no side effect.

        Probes the first block (most misses end there), then the last (most hits do), then bisects.

        Args:
            near: About how many blocks are cached, if the caller has an idea. That many are probed
                first, then others behind them or else from the front, at growing distances.
        """
        directory = self._directories.get(keys.root)
        count = keys.num_blocks
        if not directory or count == 0:
            return EMPTY_MATCH
        found: int | None = None
        hit, miss, is_bisecting = 0, count + 1, False
        length, step = (1, count) if near is None else (min(max(near, 1), count), 1)
        while miss - hit > 1:
            probe = directory.get(keys.key(length - 1))
            if probe is None:
                miss, is_bisecting = length, hit > 0
            else:
                found, hit = probe, length
            if is_bisecting:
                length = (hit + miss) // 2
            else:
                length, step = min(hit + step, miss - 1), 2 * step
        if found is None:
            return EMPTY_MATCH
        run = self._runs[found >> _OFFSET_BITS]
        length = (found & _OFFSET_MASK) + 1
        if run.depth + length != hit:  # engine keys that do not chain: not a prefix cache's keys
            return EMPTY_MATCH
        return PrefixMatch(run, length, hit)

    def blocks(self, match: PrefixMatch, start: int = 0) -> BlockIds:
        """Return the block ids of the match from depth ``start`` on. O(runs) slices."""
        pieces: list[BlockIds] = []
        run, length = match.run, match.length
        while run is not None and run.depth + length > start:
            pieces.append(_view(run.blocks)[max(0, start - run.depth) : length])
            length, run = run.parent_length, run.parent
        if not pieces:
            return NO_BLOCKS
        return pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces[::-1])

    def path_keys(self, match: PrefixMatch) -> list[BlockKey]:
        """Return the keys of the matched blocks from the prompt's start. O(blocks)."""
        pieces: list[list[BlockKey]] = []
        run, length = match.run, match.length
        while run is not None:
            pieces.append(run.keys[:length])
            length, run = run.parent_length, run.parent
        return list(chain.from_iterable(reversed(pieces)))

    def segments(self, match: PrefixMatch) -> Iterator[Segment]:
        """Yield the segments of the matched blocks, last first; ends count from the prompt's start.

        O(segments).
        """
        run, length = match.run, match.length
        while run is not None:
            count = 1
            while run.recency[count - 1][0] < length:
                count += 1
            for end, time, kind in reversed(run.recency[:count]):
                yield run.depth + min(end, length), time, kind
            length, run = run.parent_length, run.parent

    def starts(self) -> list[tuple[RootId, BlockKey]]:
        """Return the first keys of all prompts, with their roots."""
        return [(run.root, run.keys[0]) for run in self._runs.values() if run.parent is None]

    def blocks_by_root(self) -> Iterator[tuple[RootId, BlockIds]]:
        """Yield the blocks of each run with its root."""
        return ((run.root, _view(run.blocks)) for run in self._runs.values())

    def touch(
        self, match: PrefixMatch, now: float, retain: float = 0.0, outlook: Outlook | None = None
    ) -> None:
        """Make the matched blocks as recent as ``now``, or ``retain`` later. O(runs).

        Args:
            outlook: Their kinds from now on; None to give all the kind of the last.
        """
        if match.run is not None:
            self._now = match.run.queue.now = max(self._now, now)
            self._mark(match.run, match.length, now + retain, outlook)

    def sort(self, match: PrefixMatch, outlook: Outlook) -> None:
        """Set the kinds of those matched blocks that are as recent as the last. O(runs)."""
        if match.run is not None:
            self._mark(match.run, match.length, self.due(match), outlook)

    def _mark(self, last: Run, length: int, due: float, outlook: Outlook | None) -> None:
        """Set the kinds of blocks, and when they are due; not of those that are due later."""
        run: Run | None = last
        if not self._has_kinds:
            outlook = _ONE_KIND
        elif outlook is None:
            outlook = _like(last, length)
        while run is not None:
            num_seen = outlook.num_seen - run.depth
            if num_seen < length:
                run.touch(length, due, outlook.rear)
            if num_seen > 0:
                run.touch(min(num_seen, length), due, outlook.front)
            length, run = run.parent_length, run.parent

    def retire(self, match: PrefixMatch, start: int) -> int:
        """Make the blocks of the match's run due before all others, from depth ``start`` on.

        The match must end with its run. A later use makes them ordinary again.

        Returns:
            The number of blocks that were not due first already.
        """
        run = match.run
        if run is None or run.recency[-1][1] == _DISCARDED:
            return 0
        kept, recency = start - run.depth, run.recency
        ordinary = run.length
        if recency[-1][1] == RETIRED:
            ordinary = recency[-2][0] if len(recency) > 1 else 0
        if kept >= ordinary:
            return 0
        cut(recency, kept)
        recency.append((run.length, RETIRED, 0))
        self._unqueue(run)
        self._queue_if_evictable(run)
        return ordinary - kept

    def due(self, match: PrefixMatch) -> float:
        """Return when the last matched block is due for eviction. O(uses of its run)."""
        assert match.run is not None
        return match.run.segment(match.length)[1]

    def pin(self, match: PrefixMatch) -> None:
        """Keep the matched blocks in place until `unpin` with the same match. O(log holds)."""
        if match.run is not None:
            match.run.hold(match.length)

    def unpin(self, match: PrefixMatch) -> None:
        if match.run is not None:
            match.run.release(match.length)
            self._queue_if_evictable(match.run)

    def insert(
        self, parent: PrefixMatch, root: RootId, keys: Sequence[BlockKey], blocks: BlockIds,
        now: float, retain: float = 0.0, outlook: Outlook | None = None,
    ) -> PrefixMatch:  # fmt: skip
        """Add blocks after ``parent``; none of their keys may be cached. Returns the new prefix.

        The prefix becomes as recent as ``now``, or ``retain`` later. O(1) Python steps per call,
        C speed per block.

        Args:
            outlook: Kinds of the prefix; None for that of the parent's last block, or the first.
        """
        if len(keys) != len(blocks) or not len(keys):
            raise InternalError(f"{len(keys)} keys for {len(blocks)} blocks")
        run, length = parent.run, parent.length
        if not self._has_kinds:
            outlook = _ONE_KIND
        elif outlook is None:
            outlook = _ONE_KIND if run is None else _like(run, length)
        if run is None or length != run.length:
            run = self._add_run(root, run, length)
        offset = run.length
        run.blocks.frombytes(blocks.tobytes())
        run.keys.extend(keys)
        self._enter(run, offset, keys)
        match = PrefixMatch(run, run.length, run.depth + run.length)
        due = now + retain
        last = run.recency[-1][1] if run.recency else due
        self._unqueue(run)  # its tail is another one now
        run.recency.append((run.length, min(due, last), outlook.rear))
        self.touch(match, now, retain, outlook)
        self._queue_if_evictable(run)
        return match

    def restore(
        self, root: RootId, parent: BlockKey | None, keys: list[BlockKey], blocks: BlockIds,
        recency: list[Segment],
    ) -> Run:  # fmt: skip
        """Add a run that is to have these segments, behind the cached block ``parent``.

        None of its keys may be cached; the run keeps the lists. No block may be more recent than
        one before it; those behind ``parent`` become no more recent than that is.
        `queue_restored` must follow.
        """
        before = EMPTY_MATCH if parent is None else self.locate(root, parent)
        if before.run is not None and recency[0][1] > (due := self.due(before)):
            recent = sum(time >= due for _, time, _ in recency)
            recency = [(recency[recent - 1][0], due, 0), *recency[recent:]]
        run = self._add_run(root, before.run, before.length)
        run.keys, run.blocks, run.recency = keys, array("q", blocks.tobytes()), recency
        self._enter(run, 0, keys)
        return run

    def queue_restored(self, runs: Iterable[Run]) -> None:
        """Queue the evictable ones of restored runs, oldest first: each goes to the young end."""
        for run in sorted(runs, key=lambda run: run.recency[-1][1]):
            self._queue_if_evictable(run)

    def _enter(self, run: Run, offset: int, keys: Sequence[BlockKey]) -> None:
        """Make the keys of a run's last blocks findable, from ``offset`` on."""
        code = (run.run_id << _OFFSET_BITS) + offset
        directory = self._directories.setdefault(run.root, {})
        before = len(directory)
        directory.update(zip(keys, range(code, code + len(keys)), strict=True))
        if len(directory) != before + len(keys):
            raise InternalError("a key was inserted twice")
        self._num_blocks += len(keys)

    def evict(
        self, count: int, before: float = math.inf, below: float = math.inf, tenant: int = 0
    ) -> BlockIds:
        """Remove up to ``count`` blocks of a tenant, those worth least first; return their ids.

        Pinned blocks and those with blocks behind them stay. It ends at the first that was used at
        ``before`` or later, or is worth ``below`` or more. Amortised O(log leaves) per run cut,
        slices within a run.
        """
        freed: array[int] = array("q")
        missing, queue = count, self._queues[tenant]
        queue.now = self._now
        while missing > 0 and (entry := queue.pop(below)) is not None:
            time, run_id, kind = entry
            run = self._runs[run_id]
            run.queued = None
            recency, length = run.recency, len(run.keys)
            start = run.held_length if run.longest_holds else 0
            if length <= start:
                continue
            _, last_use, last_kind = recency[-1]
            if last_use != time or last_kind != kind:  # it was used since
                self._queue_if_evictable(run)
                continue
            if time >= before:
                self._queue_if_evictable(run)
                break
            if len(recency) > 1:  # the blocks before it are more recent
                start = max(start, recency[-2][0])
            keep = max(start, length - missing)
            missing -= length - keep
            freed += self._cut(run, keep)
        return _view(freed)

    def discard(self, root: RootId, key: BlockKey) -> BlockIds:
        """Make a block with bad bytes and all after it unfindable; return the freed ids.

        Pinned blocks stay allocated until they are unpinned, and go first then. O(blocks dropped).
        """
        code = self._directories.get(root, {}).get(key)
        if code is None:
            return NO_BLOCKS
        freed: array[int] = array("q")
        tails = [(self._runs[code >> _OFFSET_BITS], code & _OFFSET_MASK)]
        for run, offset in tails:  # grows by the runs behind each, however deep
            children = (run.children or {}).values()
            tails += [(child, 0) for child in children if child.parent_length > offset]
        for run, offset in reversed(tails):  # the runs behind a run go before it
            self._discard_tail(run, offset, freed)
        return _view(freed)

    def sweep(self) -> BlockIds:
        """Remove discarded blocks that are no longer held; return their ids.

        O(runs with discarded blocks), which is O(1) if there are none.
        """
        if not self._discarded:
            return NO_BLOCKS
        freed: array[int] = array("q")
        for run_id in sorted(self._discarded, reverse=True):  # children are younger than parents
            run = self._runs.get(run_id)
            if run is not None and run.recency[-1][1] == _DISCARDED:
                start = run.recency[-2][0] if len(run.recency) > 1 else 0
                keep = max(start, run.held_length)
                if keep < run.length:
                    freed += self._cut(run, keep)
                if keep > start:
                    continue
            del self._discarded[run_id]
        return _view(freed)

    def _discard_tail(self, run: Run, offset: int, freed: array[int]) -> None:
        """Discard a run's blocks from ``offset`` on, behind which no findable run starts."""
        directory = self._directories.get(run.root, {})
        code = run.run_id << _OFFSET_BITS
        if self.on_removed:
            self._tell_removed(run, offset, run.keys[offset:])
        for position in range(offset, run.length):
            if directory.get(run.keys[position]) == code + position:
                del directory[run.keys[position]]
        keep = max(offset, run.held_length)
        if keep < run.length:
            freed.extend(self._cut(run, keep))
        if offset < keep:  # pinned: unfindable now, freed at the unpin
            cut(run.recency, offset)
            run.recency.append((run.length, _DISCARDED, 0))
            self._discarded[run.run_id] = None
            self._unqueue(run)

    def _tell_removed(self, run: Run, offset: int, keys: list[BlockKey]) -> None:
        """Report keys that can no longer be found."""
        directory = self._directories.get(run.root, {})
        code = (run.run_id << _OFFSET_BITS) + offset
        found = [key for i, key in enumerate(keys) if directory.get(key) == code + i]
        if found:
            for tell in self.on_removed:
                tell(run.root, found)

    def _add_run(self, root: RootId, parent: Run | None, parent_length: int) -> Run:
        queue = self._queues[self._tenant_of(root)] if parent is None else parent.queue
        run = Run(self._next_run_id, root, parent, parent_length, queue)
        self._next_run_id += 1
        self._runs[run.run_id] = run
        if parent is not None:
            parent.hold(parent_length)
            if parent.children is None:
                parent.children = {}
            parent.children[run.run_id] = run
        return run

    def _cut(self, run: Run, keep: int) -> array[int]:
        """Drop the run's blocks from ``keep`` on, and the run itself when none is left."""
        directory = self._directories.get(run.root, {})
        code = (run.run_id << _OFFSET_BITS) + keep
        keys = run.keys[keep:] if keep else run.keys
        if self.on_removed:
            self._tell_removed(run, keep, keys)
        for key in keys:
            if directory.get(key) == code:
                del directory[key]
            code += 1
        if not directory:
            self._directories.pop(run.root, None)
        freed = run.blocks[keep:] if keep else run.blocks
        self._num_blocks -= len(freed)
        if keep:
            run.truncate(keep)
            self._unqueue(run)
            self._queue_if_evictable(run)
        else:
            self._remove(run)
        return freed

    def _remove(self, run: Run) -> None:
        """Forget a run without blocks."""
        if run.queued is not None:
            self._unqueue(run)
        del self._runs[run.run_id]
        parent = run.parent
        if parent is None:
            return
        assert parent.children is not None
        del parent.children[run.run_id]
        if not parent.children:
            parent.children = None
        parent.release(run.parent_length)
        self._queue_if_evictable(parent)

    def _queue_if_evictable(self, run: Run) -> None:
        """Queue a run's tail. If it is queued and used again, its entry is corrected at an end."""
        if run.queued is None and run.length > run.held_length:
            _, time, kind = run.recency[-1]
            run.queued = (time, run.run_id, kind)
            run.queue.add(run.queued)

    def _unqueue(self, run: Run) -> None:
        """Take a run's entry out of the queue: it would be found there too late."""
        if run.queued is not None:
            run.queue.remove(run.queued)
            run.queued = None

    def _is_evictable(self, run_id: int) -> bool:
        """Whether a queued run can be evicted. One that is held is queued at its release."""
        run = self._runs[run_id]
        if run.length > run.held_length:
            return True
        run.queued = None
        return False

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(blocks)."""
        num_blocks = 0
        for run in self._runs.values():
            self._check_run(run)
            num_blocks += run.length
        for tenant, queue in enumerate(self._queues):
            runs = [run for run in self._runs.values() if self._tenant_of(run.root) == tenant]
            if any(run.queue is not queue for run in runs):
                raise InternalError("a run is in the queue of another tenant")
            queue.check({run.queued for run in runs if run.queued is not None})
        if num_blocks != self._num_blocks:
            raise InternalError(f"{num_blocks} blocks in runs, {self._num_blocks} counted")
        for directory in self._directories.values():
            for key, code in directory.items():
                found = self._runs.get(code >> _OFFSET_BITS)
                offset = code & _OFFSET_MASK
                if found is None or offset >= found.length or found.keys[offset] != key:
                    raise InternalError("a key leads nowhere")

    def _check_run(self, run: Run) -> None:
        name = f"run {run.run_id}"
        if not run.length == len(run.blocks) > 0:
            raise InternalError(f"{name} has {run.length} keys for {len(run.blocks)} blocks")
        if run.held_length > run.length:
            raise InternalError(f"{name} lost blocks that are held")
        ends = [end for end, _, _ in run.recency]
        times = [time for _, time, _ in run.recency]
        if ends != sorted(set(ends)) or ends[-1] != run.length:
            raise InternalError(f"{name} has recency segments {ends} for {run.length} blocks")
        if times != sorted(times, reverse=True):
            raise InternalError(f"{name} is more recent behind than before")
        if run.length > run.held_length and run.queued is None:
            raise InternalError(f"{name} could be evicted and is not queued")
        attached = [child.parent_length for child in (run.children or {}).values()]
        for length in set(attached):
            if run.holds is None or run.holds.get(length, 0) < attached.count(length):
                raise InternalError(f"{name} does not hold its children")
        if run.parent is not None:
            if self._runs.get(run.parent.run_id) is not run.parent:
                raise InternalError(f"{name} hangs off a run that is gone")
            if run.recency[0][1] > run.parent.recency[0][1]:
                raise InternalError(f"{name} is more recent than its parent")
