"""Prefix index of one tier: which blocks are cached, where, and in which order they are evicted.

Blocks are kept in *runs*: arrays of consecutive blocks of one sequence. A run starts at the root or
at a position in another run, so the runs form a tree:

    root   |0------------------9|            run A, blocks 0..9 of a prompt
                  |5-----------------14|     run B, parent A after 5 blocks
                                 |12--13|    run C, parent B after 7 of B's blocks

    half-open: run B holds depths [5, 15); parent_length = 5 blocks of A precede it.

A dictionary per root maps a key to a *code*: its offset in its run, and the run's number. Since
only leaves are evicted, the cached blocks are closed under prefixes: if the key of block i is
there, so are those of all blocks before it. The longest match is hence a bisection over a handful
of keys, and the block ids of a match are slices of a few arrays; neither takes a Python step per
cached block.

A *hold* on its run keeps a block in place: a child that hangs off the run, or a pin. Holds are
counted by length, and all blocks beyond the longest hold are the run's evictable tail. Recency is
kept as segments, because a prompt that matches part of a run makes only that part recent; it never
grows along a run, so the tail is always its least recent part.

Each segment also has the *kind* of its blocks, where the policy tells kinds apart: an
`EvictionQueue` finds the tail that goes first by kind and recency. Each tenant has a queue of its
own, if tenants matter.

Not thread-safe. Knows neither what a block id stands for nor the time: `now` is any number that
does not decrease.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.eviction_policy import (
    RETIRED,
    Entry,
    EvictionQueue,
    LruQueue,
    MakeQueue,
    Outlook,
)
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

Step = TypeVar("Step", tuple[int, float, int], tuple[int, int])


def cover(steps: list[Step], step: Step) -> bool:
    """Put a step over those up to its end, but for later ones; return whether that changes any.

    Uses begin at a run's start and end anywhere, so a later one covers earlier ones up to its end:

        run     |0------------------9|
        steps   |---day 5---|--day 3-|      its last four blocks were last used on day 3

    A step is its end, its time, and what else is known of its blocks. Ends rise, times do not.

    Amortised O(1).
    """
    length, time = step[0], step[1]
    kept = 0
    while kept < len(steps) and steps[kept][1] > time:
        kept += 1
    if kept and steps[kept - 1][0] >= length:
        return False
    covered = kept
    while covered < len(steps) and steps[covered][0] <= length:
        covered += 1
    if covered == kept and covered < len(steps) and steps[covered][1:] == step[1:]:
        return False
    steps[kept:covered] = [step]
    return True


def cut(steps: list[Step], length: int) -> None:
    """Drop what the steps say of blocks from ``length`` on."""
    while steps and (steps[-2][0] if len(steps) > 1 else 0) >= length:
        steps.pop()
    if steps and steps[-1][0] > length:
        steps[-1] = (length, *steps[-1][1:])


BlockIds = npt.NDArray[np.int64]

ID_BYTES = 8
FEW_KEYS = 16
"""Up to so many keys are put in a tuple: one object, where a list would be two."""

NUMBER_BITS = 40
"""A block's code is the number of its run, and above these bits its offset in the run."""
NUMBER_MASK = (1 << NUMBER_BITS) - 1
CODE_STEP = 1 << NUMBER_BITS
"""Difference between the codes of a block and of the next one."""

DISCARDED = -math.inf
"""Time of blocks that can no longer be found: the first to go."""

Segment = tuple[int, float, int]
"""Blocks of a run that were last used at once: where they end, when that was, and their kind."""


class Run:
    """Consecutive blocks of one sequence. Internal to the index.

    The blocks that were last used at once are a *segment*. Most runs have one, so the last segment
    is kept as the entry that stands for it in the eviction queue, and those before it are listed on
    the side. What an eviction has to fetch from memory is most of its cost: a run of few blocks is
    made of few objects.

    Attributes:
        ids: Ids of its blocks, `ID_BYTES` each, maybe with some that have gone: one object, where
            an array would be two.
        tail: The last segment, as it is queued: its time, the run's number, its kind.
        queued: What of the run is in the queue; another than its tail, once that is used again.
        front: The segments before the last; their ends rise, times do not. None without any.
        uses: See `Retention`.
    """

    __slots__ = (
        "children", "depth", "front", "holds", "ids", "keys", "longest_holds", "parent",
        "parent_length", "queue", "queued", "root", "run_id", "tail", "uses",
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
        self.keys: Sequence[BlockKey] = ()
        self.ids = b""
        self.holds: dict[int, int] | None = None  # length -> how often; below the longest also 0
        self.longest_holds: list[int] | None = None  # heap of the negated lengths
        self.children: dict[int, Run] | None = None
        self.tail: Entry = (math.inf, run_id, 0)
        self.queued: Entry | None = None
        self.front: list[Segment] | None = None
        self.uses: list[tuple[int, int]] | None = None

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def blocks(self) -> BlockIds:
        """Ids of its blocks, read-only. They stay as they are when the run changes."""
        return np.frombuffer(self.ids, dtype=np.int64, count=len(self.keys))

    @property
    def num_findable(self) -> int:
        """How many of its first blocks have not been discarded."""
        return self.tail_start if self.tail[0] == DISCARDED else len(self.keys)

    @property
    def held_length(self) -> int:
        return -self.longest_holds[0] if self.longest_holds else 0

    @property
    def segments(self) -> list[Segment]:
        """All segments, in order. O(segments)."""
        time, _, kind = self.tail
        return [*(self.front or ()), (len(self.keys), time, kind)]

    @segments.setter
    def segments(self, segments: list[Segment]) -> None:
        _, time, kind = segments[-1]
        # Nothing is called between the two, so that no signal's handler runs there.
        self.front, self.tail = segments[:-1] or None, (time, self.run_id, kind)

    @property
    def tail_start(self) -> int:
        """Where the last segment begins."""
        return self.front[-1][0] if self.front else 0

    def code(self, offset: int) -> int:
        """Return the code of the block at this offset."""
        return (offset << NUMBER_BITS) + self.run_id

    def segment(self, length: int) -> Segment:
        """Return the segment of the last of the first ``length`` blocks. O(segments)."""
        for segment in self.segments:
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
            # A dict beside a heap: hold, longest and release take 0.6 to 2.1 us, with a SortedDict
            # 2.1 to 6.8. Every match pins, so each would get slower.
            heapq.heappush(self.longest_holds, -length)

    def release(self, length: int) -> None:
        """Amortised O(log lengths held). An unheld length is dropped once it is the longest."""
        holds, longest = self.holds, self.longest_holds
        assert holds is not None and longest is not None
        holds[length] -= 1
        while longest and not holds.get(-longest[0]):
            # Interrupted between the two, it leaves a length that is asked for again.
            holds.pop(-longest[0], None)
            heapq.heappop(longest)
        if not holds:
            self.holds = self.longest_holds = None

    def extend(self, keys: Sequence[BlockKey], blocks: BlockIds, time: float, kind: int) -> None:
        """Add blocks at its end. They were last used then, but not after those before them."""
        if self.keys:
            listed = self._listed_keys()
            self.front = self.segments
            # `truncate` may have left ids of blocks that are gone.
            self.ids = self.ids[: ID_BYTES * len(listed)] + blocks.tobytes()
            listed.extend(keys)
        else:
            self.keys = tuple(keys) if len(keys) <= FEW_KEYS else list(keys)
            self.ids = blocks.tobytes()
        self.tail = (min(time, self.tail[0]), self.run_id, kind)

    def touch(self, length: int, now: float, kind: int) -> None:
        """Make the first ``length`` blocks as recent as ``now``, and of a kind. O(segments).

        Blocks that are to be retained for longer are more recent already, and stay so. Discarded
        ones stay what they are.
        """
        if self.tail[0] == DISCARDED:
            length = min(length, self.tail_start)
            if not length:
                return
        if self.front is None and length == len(self.keys):
            if now >= self.tail[0]:
                self.tail = (now, self.run_id, kind)
            return
        segments = self.segments
        if cover(segments, (length, now, kind)):
            self.segments = segments

    def end_with(self, start: int, time: float) -> None:
        """Make the blocks from ``start`` on one segment of that time, of the first kind."""
        segments = self.segments
        cut(segments, start)
        self.segments = [*segments, (len(self.keys), time, 0)]

    def truncate(self, length: int) -> None:
        listed = self._listed_keys()
        if self.front:
            segments = self.segments
            cut(segments, length)
            self.segments = segments
        del listed[length:]
        if len(self.ids) > 2 * ID_BYTES * length:  # so that no more are copied than have gone
            self.ids = self.ids[: ID_BYTES * length]

    def _listed_keys(self) -> list[BlockKey]:
        """Return its keys as the list that they are once they change."""
        if not isinstance(self.keys, list):
            self.keys = list(self.keys)
        return self.keys


NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)
_ONE_KIND = Outlook(0, 0, 0)
_ALL = 1 << 62
"""More blocks than there are."""


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


class RestoredRun(NamedTuple):
    """Consecutive blocks of a prompt that survived the last process.

    Attributes:
        parent: Key of the block before them; None at the prompt's start.
        ends: Where blocks end that were last used at once; none for all of them, now.
        ages: How many blocks of the tier were written since, and one.
        written_s: When that was.
    """

    root: RootId
    parent: BlockKey | None
    keys: list[BlockKey]
    blocks: BlockIds
    ends: Sequence[int] = ()
    ages: Sequence[int] = (1,)
    written_s: Sequence[float] = ()


# Runs and bisection, and no radix tree: with keys over the whole prefix and leaves evicted first no
# tree has to be walked. One node per block would cost one Python step per block.
#
# It stays interpreted. mypyc compiles it nearly unchanged: `match` then costs half and an
# allocation 0.6, but `get_match` 0.95, since numpy, dictionaries, locks and messages are most of
# that. No user would feel it, and every fault would have to be sought in two forms of the code.


class PrefixIndex:
    """The tree of runs; see the module for its invariants.

    Args:
        make_queue: Makes the order of eviction of each tenant.
        num_tenants: Parts of the blocks that are evicted each on their own.
        tenant_of: Returns the number of a root's part.
    """

    def __init__(
        self,
        make_queue: MakeQueue = LruQueue,
        num_tenants: int = 1,
        tenant_of: Callable[[RootId], int] = lambda root: 0,
    ) -> None:
        self._directories: dict[RootId, dict[BlockKey, int]] = {}
        self._runs: dict[int, Run] = {}
        self._next_run_id = 0
        self._tenant_of = tenant_of
        self._now = 0.0
        self.queues = [make_queue(self) for _ in range(num_tenants)]
        self._has_kinds, self._sees_uses = self.queues[0].has_kinds, self.queues[0].sees_uses
        self.num_blocks = 0
        self._discarded: dict[int, int] = {}  # tenant -> its blocks that wait for their last unpin
        self.on_removed: list[Callable[[RootId, Sequence[BlockKey]], None]] = []
        """Called with consecutive blocks that can no longer be found."""

    @property
    def has_discarded(self) -> bool:
        """Whether discarded blocks wait for their last unpin."""
        return bool(self._discarded)

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
        # At C speed, since nearly always all of them are new.
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
        run, length = self._runs[code & NUMBER_MASK], (code >> NUMBER_BITS) + 1
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
        run, length = self._runs[found & NUMBER_MASK], (found >> NUMBER_BITS) + 1
        if run.depth + length != hit:  # engine keys that do not chain: not a prefix cache's keys
            return EMPTY_MATCH
        return PrefixMatch(run, length, hit)

    def blocks(self, match: PrefixMatch, start: int = 0) -> BlockIds:
        """Return the block ids of the match from depth ``start`` on. O(runs) slices."""
        pieces: list[BlockIds] = []
        run, length = match.run, match.length
        while run is not None and run.depth + length > start:
            pieces.append(run.blocks[max(0, start - run.depth) : length])
            length, run = run.parent_length, run.parent
        if not pieces:
            return NO_BLOCKS
        return pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces[::-1])

    def path_keys(self, match: PrefixMatch, start: int = 0) -> list[BlockKey]:
        """Return the keys of the matched blocks from depth ``start`` on. O(blocks)."""
        pieces: list[Sequence[BlockKey]] = []
        run, length = match.run, match.length
        while run is not None and run.depth + length > start:
            pieces.append(run.keys[max(0, start - run.depth) : length])
            length, run = run.parent_length, run.parent
        return list(chain.from_iterable(reversed(pieces)))

    def segments(self, match: PrefixMatch) -> Iterator[Segment]:
        """Yield the segments of the matched blocks, last first; ends count from the prompt's start.

        O(segments).
        """
        run, length = match.run, match.length
        while run is not None:
            segments, count = run.segments, 1
            while segments[count - 1][0] < length:
                count += 1
            for end, time, kind in reversed(segments[:count]):
                yield run.depth + min(end, length), time, kind
            length, run = run.parent_length, run.parent

    def keys_by_root(self) -> list[tuple[RootId, list[BlockKey]]]:
        """Return all keys that can be found, by root; also where a call has failed half-way."""
        return [(root, list(directory)) for root, directory in self._directories.items()]

    def starts(self) -> list[tuple[RootId, BlockKey]]:
        """Return the first keys of all prompts, with their roots."""
        return [(run.root, run.keys[0]) for run in self._runs.values() if run.parent is None]

    def blocks_by_root(self) -> Iterator[tuple[RootId, BlockIds]]:
        """Yield the blocks of each run with its root."""
        return ((run.root, run.blocks) for run in self._runs.values())

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
            if self._sees_uses:
                self._tell_used(match.run)

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

    def _tell_used(self, run: Run | None) -> None:
        while run is not None:
            run.queue.used(run.run_id)
            run = run.parent

    def retire(self, match: PrefixMatch, start: int) -> int:
        """Make the blocks of the match's run due before all others, from depth ``start`` on.

        The match must end with its run. A later use makes them ordinary again.

        Returns:
            The number of blocks that were not due first already.
        """
        run = match.run
        if run is None or run.tail[0] == DISCARDED:
            return 0
        kept = start - run.depth
        ordinary = run.tail_start if run.tail[0] == RETIRED else run.length
        if kept >= ordinary:
            return 0
        self._end_with(run, kept, RETIRED)
        return ordinary - kept

    def retire_root(self, root: RootId) -> None:
        """Make all blocks under a root due before all others. O(its blocks), at C speed, and O(log
        leaves) per run.

        A later use makes those ordinary again that it uses.
        """
        for run in self._runs_of(root):
            if run.tail[0] == DISCARDED:  # these go first in any case, once they are unpinned
                run.front = [(run.tail_start, RETIRED, 0)] if run.front else None
            elif run.front or run.tail[0] != RETIRED:
                self._end_with(run, 0, RETIRED)

    def starts_of(self, root: RootId) -> list[BlockKey]:
        """Return the first keys of all prompts under a root."""
        return [run.keys[0] for run in self._runs_of(root) if run.parent is None]

    def _runs_of(self, root: RootId) -> list[Run]:
        """Return a root's runs that have blocks which can be found."""
        codes = self._directories.get(root, {}).values()
        return [self._runs[number] for number in {code & NUMBER_MASK for code in codes}]

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
        offset = len(run.keys)
        self._unqueue(run)  # its tail is another one from here on
        run.extend(keys, blocks, now + retain, outlook.rear)
        match = PrefixMatch(run, run.length, run.depth + run.length)
        self.touch(match, now, retain, outlook)
        self._queue_if_evictable(run)
        self._enter(run, offset, keys)  # last: what fails before it has made nothing findable
        return match

    def restore(
        self, root: RootId, parent: BlockKey | None, keys: list[BlockKey], blocks: BlockIds,
        segments: list[Segment],
    ) -> Run:  # fmt: skip
        """Add a run that is to have these segments, behind the cached block ``parent``.

        None of its keys may be cached; the run may keep their list. No block may be more recent
        than one before it; those behind ``parent`` become no more recent than that is.
        `queue_restored` must follow.
        """
        before = EMPTY_MATCH if parent is None else self.locate(root, parent)
        # Recency never grows along a path: else what stands behind would stay, and not be found.
        if before.run is not None and segments[0][1] > (due := self.due(before)):
            recent = sum(time >= due for _, time, _ in segments)
            segments = [(segments[recent - 1][0], due, 0), *segments[recent:]]
        run = self._add_run(root, before.run, before.length)
        run.keys = tuple(keys) if len(keys) <= FEW_KEYS else keys
        run.ids, run.segments = blocks.tobytes(), segments
        self._enter(run, 0, keys)
        return run

    def queue_restored(self, runs: Iterable[Run]) -> None:
        """Queue the evictable ones of restored runs, oldest first: each goes to the young end."""
        for run in sorted(runs, key=lambda run: run.tail[0]):
            self._queue_if_evictable(run)

    def _enter(self, run: Run, offset: int, keys: Sequence[BlockKey]) -> None:
        """Make the keys of a run's last blocks findable, from ``offset`` on."""
        directory = self._directories.setdefault(run.root, {})
        before = len(directory)
        codes = range(run.code(offset), run.code(run.length), CODE_STEP)
        self.num_blocks += len(keys)
        directory.update(zip(keys, codes, strict=True))
        if not offset:
            directory[keys[0]] = run.run_id  # the same number, and no object of its own
        if len(directory) != before + len(keys):
            raise InternalError("a key was inserted twice")

    def evict(
        self, count: int, before: float = math.inf, below: float = math.inf, tenant: int = 0
    ) -> BlockIds:
        """Remove up to ``count`` blocks of a tenant, those worth least first; return their ids.

        Pinned blocks and those with blocks behind them stay. It ends at the first that was used at
        ``before`` or later, or is worth ``below`` or more. Amortised O(log leaves) per run cut,
        slices within a run.
        """
        freed: list[bytes] = []
        missing, queue, runs = count, self.queues[tenant], self._runs
        queue.now, retired = self._now, queue.retired
        while missing > 0:
            if retired.oldest is not None and retired.oldest[0] < below:
                entry: Entry | None = retired.pop_oldest()
            else:
                entry = queue.pop(below) if below > RETIRED else None
            if entry is None:
                break
            run = runs[entry[1]]
            run.queued, keys = None, run.keys
            length = len(keys)
            start = 0
            if run.longest_holds and length <= (start := run.held_length):
                continue
            if entry is not run.tail:  # it was used since
                self._queue_if_evictable(run)
                continue
            if entry[0] >= before:
                self._queue_if_evictable(run)
                break
            if run.front:  # these blocks are more recent
                start = max(start, run.tail_start)
            keep = length - missing
            if keep < start:
                keep = start
            num_gone = length - keep
            missing -= num_gone
            if entry[0] > DISCARDED:
                self._hide(run.root, keys[keep:])
            else:
                self._count_discarded(tenant, -num_gone)
            self.num_blocks -= num_gone
            freed.append(run.ids[ID_BYTES * keep : ID_BYTES * length])
            if keep:
                run.truncate(keep)
                self._queue_if_evictable(run)
                continue
            parent = run.parent
            # Nothing is called between the two, so that no signal's handler runs there.
            del runs[entry[1]]
            if parent is not None and parent.children is not None:
                del parent.children[entry[1]]
                self._let_go(parent, run.parent_length)
        return np.frombuffer(b"".join(freed), np.int64)

    def discard(self, root: RootId, key: BlockKey) -> BlockIds:
        """Make a block with bad bytes and all after it unfindable; free them, and return their ids.

        Pinned blocks stay allocated until they are unpinned, and go first then: with the next
        `evict`, `sweep`, or `discard` of a block that is found. O(blocks dropped).
        """
        code = self._directories.get(root, {}).get(key)
        if code is None:
            return NO_BLOCKS
        tenant = self._tenant_of(root)
        tails = self.behind(self._runs[code & NUMBER_MASK], code >> NUMBER_BITS)
        for run, offset in reversed(tails):  # the runs behind a run go before it
            stop = run.num_findable
            if offset < stop:
                self._count_discarded(tenant, stop - offset)
                self._hide(run.root, run.keys[offset:stop])
            self._end_with(run, offset, DISCARDED)
        return self._evict_discarded(tenant)

    def behind(self, run: Run, offset: int) -> list[tuple[Run, int]]:
        """Return the run and all runs that build on its blocks from ``offset`` on, each before
        those that hang off it, with the offsets from which on they do."""
        found = [(run, offset)]
        # The list grows in the loop: a recursion would be as deep as the tree of runs.
        for each, start in found:
            children = (each.children or {}).values()
            found += [(child, 0) for child in children if child.parent_length > start]
        return found

    def sweep(self) -> BlockIds:
        """Remove discarded blocks that are not held; return their ids.

        O(tenants with discarded blocks), and O(1) without any.
        """
        if not self._discarded:
            return NO_BLOCKS
        return np.concatenate([self._evict_discarded(tenant) for tenant in list(self._discarded)])

    def _evict_discarded(self, tenant: int) -> BlockIds:
        return self.evict(_ALL, below=RETIRED, tenant=tenant)

    def _count_discarded(self, tenant: int, change: int) -> None:
        count = self._discarded.get(tenant, 0) + change
        if count:
            self._discarded[tenant] = count
        else:
            self._discarded.pop(tenant, None)

    def _hide(self, root: RootId, keys: Sequence[BlockKey]) -> None:
        """Make these blocks unfindable.

        Only after an interrupted call are some of them so already.
        """
        directory = self._directories.get(root)
        if directory is not None:
            for key in keys:
                directory.pop(key, None)
            if not directory:
                del self._directories[root]
        for tell in self.on_removed:
            tell(root, keys)

    def _add_run(self, root: RootId, parent: Run | None, parent_length: int) -> Run:
        queue = self.queues[self._tenant_of(root)] if parent is None else parent.queue
        run = Run(self._next_run_id, root, parent, parent_length, queue)
        # Never used twice: an entry of the eviction queue names its run by number only.
        self._next_run_id += 1
        self._runs[run.run_id] = run
        if parent is not None:
            parent.hold(parent_length)
            if parent.children is None:
                parent.children = {}
            parent.children[run.run_id] = run
        return run

    def _let_go(self, run: Run, length: int) -> None:
        """End the hold of a child that is gone; the run may be evictable now."""
        if not run.children:
            run.children = None
        run.release(length)
        self._queue_if_evictable(run)

    def _end_with(self, run: Run, start: int, time: float) -> None:
        """Make the blocks of a run from ``start`` on due at a time that is before all others."""
        run.end_with(start, time)
        self._unqueue(run)
        self._queue_if_evictable(run)

    def _queue_if_evictable(self, run: Run) -> None:
        """Queue a run's tail. If it is queued and used again, its entry is corrected at an end."""
        if run.queued is None and len(run.keys) > run.held_length:
            run.queued = run.tail
            (run.queue if run.tail[0] > RETIRED else run.queue.retired).add(run.tail)

    def _unqueue(self, run: Run) -> None:
        """Take a run's entry out of the queue: it would be found there too late."""
        if run.queued is not None:
            queued, run.queued = run.queued, None
            (run.queue if queued[0] > RETIRED else run.queue.retired).remove(queued)

    def is_evictable(self, number: int) -> bool:
        """Whether a queued run can be evicted. One that is held is queued at its release."""
        run = self._runs[number]
        if run.length > run.held_length:
            return True
        run.queued = None
        return False

    def last_key(self, number: int) -> tuple[RootId, BlockKey]:
        """Return the root and the key of a run's last block."""
        run = self._runs[number]
        return run.root, run.keys[-1]

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(blocks)."""
        num_blocks, discarded = 0, dict[int, int]()
        for run in self._runs.values():
            self._check_run(run)
            num_blocks += run.length
            if run.tail[0] == DISCARDED:
                tenant = self._tenant_of(run.root)
                discarded[tenant] = discarded.get(tenant, 0) + run.length - run.tail_start
        for tenant, queue in enumerate(self.queues):
            runs = [run for run in self._runs.values() if self._tenant_of(run.root) == tenant]
            if any(run.queue is not queue for run in runs):
                raise InternalError("a run is in the queue of another tenant")
            queue.check({run.queued for run in runs if run.queued is not None})
        if num_blocks != self.num_blocks:
            raise InternalError(f"{num_blocks} blocks in runs, {self.num_blocks} counted")
        if discarded != self._discarded:
            raise InternalError(f"{discarded} discarded, {self._discarded} counted")
        for directory in self._directories.values():
            for key, code in directory.items():
                found, offset = self._runs.get(code & NUMBER_MASK), code >> NUMBER_BITS
                if found is None or offset >= found.length or found.keys[offset] != key:
                    raise InternalError("a key leads nowhere")

    def _check_run(self, run: Run) -> None:
        name = f"run {run.run_id}"
        if not 0 < run.length <= len(run.ids) // ID_BYTES <= 2 * run.length:
            raise InternalError(f"{name} has {run.length} keys for {len(run.ids)} bytes of ids")
        if run.held_length > run.length:
            raise InternalError(f"{name} lost blocks that are held")
        ends = [end for end, _, _ in run.segments]
        times = [time for _, time, _ in run.segments]
        if ends != sorted(set(ends)):
            raise InternalError(f"{name} has segments that end at {ends}")
        if times != sorted(times, reverse=True):
            raise InternalError(f"{name} is more recent behind than before")
        if run.length > run.held_length and run.queued is None:
            raise InternalError(f"{name} could be evicted and is not queued")
        attached = [child.parent_length for child in (run.children or {}).values()]
        # Pins hold too, so there may be more holds than children, never fewer.
        for length in set(attached):
            if run.holds is None or run.holds.get(length, 0) < attached.count(length):
                raise InternalError(f"{name} does not hold its children")
        if run.parent is not None:
            if self._runs.get(run.parent.run_id) is not run.parent:
                raise InternalError(f"{name} hangs off a run that is gone")
            if run.segments[0][1] > run.parent.segments[0][1]:
                raise InternalError(f"{name} is more recent than its parent")


class Shadow:
    """Keys, without bytes, that a tier of ``capacity`` blocks would hold in a queue's order."""

    def __init__(self, capacity: int, make_queue: MakeQueue = LruQueue) -> None:
        self._capacity = capacity
        self._num_seen = 0
        self.index = PrefixIndex(make_queue)

    def see(
        self, keys: BlockKeys, stop: int, now: float | None = None, outlook: Outlook | None = None
    ) -> int:
        """Return how many of a prompt's blocks are there, and store what of the first ``stop`` is
        not. O(log n) probes, and O(1) per block stored or evicted.

        Args:
            now: As in `PrefixIndex.touch`; None to count the calls.
        """
        self._num_seen += 1
        index, now = self.index, self._num_seen if now is None else now
        match = index.match(keys)
        index.touch(match, now, outlook=outlook)
        missing = min(stop, self._capacity) - match.num_blocks
        if missing > 0:
            # Its own beginning must not make room for its end.
            index.pin(match)
            room = self._capacity - index.num_blocks
            if room < missing:
                bar = math.inf if outlook is None else index.queues[0].bar(outlook)
                room += len(index.evict(missing - room, below=bar))
            index.unpin(match)
            new = keys.slice(match.num_blocks, match.num_blocks + min(room, missing))
            # Keys of an engine may not chain: then seeing the last implies nothing.
            count = index.num_insertable(keys.root, new)
            if count:
                no_ids = np.zeros(count, dtype=np.int64)
                index.insert(match, keys.root, new[:count], no_ids, now, outlook=outlook)
        return match.num_blocks
