"""Retention: drops from a tier the blocks and tails that were not used for a set time.

Eviction goes by what blocks are worth, and priorities and hints shift when they are due. Retention
goes by time alone, so it keeps a record of its own of when a run's blocks were last used, a
staircase (`prefix_index.cover`).

Times are kept as *stamps*, of which a retention time has `_STAMPS`. If a block has the present
stamp, so have all before it: of all uses within a stamp only the first costs more than a look.

A *sweep* looks at every run and tail, in turns of bounded work.

Pure: no clock. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from flexcache.cache.pins import PinnedBlocks
from flexcache.cache.prefix_index import (
    NO_BLOCKS,
    BlockIds,
    PrefixIndex,
    PrefixMatch,
    Run,
    cover,
    cut,
)
from flexcache.cache.tail_index import Tail, TailIndex
from flexcache.errors import InternalError

# With the time of a sweep, a sixteenth, a stamp makes less than the promised tenth.
_STAMPS = 64
_SWEEPS = 16
"""Sweeps per retention time."""
_PAUSE_S = 0.05
"""Time between the turns of a sweep."""
# Turns are short since the server answers nothing meanwhile.
_LOOKS = 1024
"""Runs and tails that a turn looks at."""
_DROPS = 4096
"""Blocks that it drops."""
_ALL = 1 << 62

Seconds = npt.NDArray[np.float64]


class Retention:
    """The age limit of one tier.

    Args:
        retention_s: Blocks go when they were not used for longer than this: at most a tenth of it
            later, and the time that a sweep takes.
        pinned: These stay until their pins end.

    Attributes:
        next_turn: When the next turn is due.
    """

    def __init__(
        self, index: PrefixIndex, tails: TailIndex, retention_s: float, pinned: PinnedBlocks
    ) -> None:
        self.retention_s = retention_s
        self.next_turn = 0.0
        self._index = index
        self._tails = tails
        self._pinned = pinned
        self._stamp_s = retention_s / _STAMPS
        self._next_sweep = 0.0
        self._runs_left: list[int] = []
        """Numbers of the runs that the present sweep has yet to look at, the next one last."""
        self._tails_left: list[Tail] = []

    # -- uses ------------------------------------------------------------------------------------

    def used(self, match: PrefixMatch, now: float) -> None:
        """Record that the matched blocks were used. Amortised O(1)."""
        self._note(match.run, match.length, self._stamp(now))

    def restored(self, run: Run, used_s: Iterable[tuple[int, float]]) -> None:
        """Record when a restored run's blocks were last used: where they end, and when.

        Times do not rise, nor above those of the blocks that the run hangs off.
        """
        run.uses = []
        for end, time in used_s:
            stamp = self._stamp(time)
            if run.uses and run.uses[-1][1] == stamp:
                run.uses.pop()
            run.uses.append((end, stamp))

    def used_before(self, match: PrefixMatch, times_s: Seconds) -> None:
        """Record that the last blocks of the match, which are new here, were last used at these
        times.

        All that is before a block was used when the block was.
        """
        stamps = np.maximum.accumulate(times_s[::-1] // self._stamp_s)[::-1]
        ends = [*(np.flatnonzero(np.diff(stamps)) + 1).tolist(), len(stamps)]
        start = match.length - len(stamps)
        assert match.run is not None
        cut(match.run.uses or [], start)  # what was there before was evicted
        for end in reversed(ends):
            self._note(match.run, start + end, int(stamps[end - 1]))

    def last_used(self, match: PrefixMatch, start: int) -> Seconds:
        """Return when the matched blocks from position ``start`` on were last used.

        To within half a stamp.
        """
        stamps = np.empty(match.num_blocks - start)
        run, length = match.run, match.length
        while run is not None and run.depth + length > start:
            first = max(0, start - run.depth)
            ends, stamps_of_run = zip(*(run.uses or ()), strict=True)
            steps = np.searchsorted(ends, np.arange(first, length), side="right")
            low = run.depth + first - start
            stamps[low : low + length - first] = np.array(stamps_of_run)[steps]
            length, run = run.parent_length, run.parent
        return (stamps + 0.5) * self._stamp_s

    def _stamp(self, time: float) -> int:
        return int(time // self._stamp_s)

    def _note(self, run: Run | None, length: int, stamp: int) -> None:
        """Give a stamp to a run's first blocks, and to all before them, unless theirs is later."""
        while run is not None:
            if run.uses is None:
                run.uses = []
            # Nothing changes here, so nothing does further up: what is before was used as late.
            if not cover(run.uses, (length, stamp)):
                return
            length, run = run.parent_length, run.parent

    # -- sweeps ----------------------------------------------------------------------------------

    def turn(self, now: float) -> BlockIds:
        """Do a part of a sweep; return the ids of the blocks that it freed.

        Blocks that are pinned can no longer be found, and are freed when they are unpinned.
        """
        return self._turn(now, _LOOKS, _DROPS)

    def sweep(self, now: float) -> BlockIds:
        """Do a whole sweep. O(runs + tails)."""
        self._runs_left, self._tails_left = [], []
        return self._turn(now, _ALL, _ALL)

    def _turn(self, now: float, looks: int, drops: int) -> BlockIds:
        if not self._runs_left and not self._tails_left:
            self._runs_left, self._tails_left = self._index.run_numbers(), self._tails.all_tails()
            self._next_sweep = now + self.retention_s / _SWEEPS
        freed = [NO_BLOCKS]
        oldest = self._stamp(now) - _STAMPS
        while self._runs_left and looks > 0 and drops > 0:
            looks -= 1
            freed.append(self._drop_from_run(self._runs_left.pop(), oldest, drops))
            drops -= len(freed[-1])
        while self._tails_left and looks > 0 and drops > 0:
            looks -= 1
            tail = self._tails_left.pop()
            is_old = tail.is_indexed and self._stamp(tail.used) < oldest
            if is_old and tail not in self._pinned.tails:
                freed.append(self._tails.discard(tail.root, tail.key))
                drops -= len(freed[-1])
        # Between turns others have the lock.
        self.next_turn = now + _PAUSE_S
        if not self._runs_left and not self._tails_left:
            self.next_turn = max(self.next_turn, self._next_sweep)
        return np.concatenate(freed)

    def _drop_from_run(self, number: int, oldest: int, most: int) -> BlockIds:
        """Drop blocks of a run with stamps before ``oldest``, from its end; about ``most`` of them.

        Runs that hang off these blocks are as old, and younger in number: they are gone already,
        or go with them.
        """
        run = self._index.run(number)
        if run is None:
            return NO_BLOCKS
        since = [end for end, stamp in run.uses or () if stamp >= oldest]
        # A pin promises more than an age limit takes; a sweep after its end drops what is too old.
        kept = max(since[-1] if since else 0, self._pinned.length(number))
        kept = min(kept, run.length)
        start = max(kept, run.length - most)
        if start == run.length or self._index.locate(run.root, run.keys[start]).run is not run:
            return NO_BLOCKS  # the rest can be found no more, and waits to be unpinned
        freed = self._index.discard(run.root, run.keys[start])
        if start > kept and len(freed):
            self._runs_left.append(number)  # the rest in the next turn
        return freed

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(runs)."""
        for number in self._index.run_numbers():
            run = self._index.run(number)
            assert run is not None
            uses = run.uses or [(0, 0)]
            ends, stamps = [end for end, _ in uses], [stamp for _, stamp in uses]
            if ends != sorted(set(ends)) or stamps != sorted(set(stamps), reverse=True):
                raise InternalError(f"run {number} has uses {uses}")
            if ends[-1] < run.length:
                raise InternalError(f"run {number} has blocks that were never used")
            if run.parent is not None and _stamp_at(run.parent, run.parent_length) < stamps[0]:
                raise InternalError(f"run {number} was used later than what is before it")


def _stamp_at(run: Run, length: int) -> int:
    """Return the stamp of the last of a run's first blocks."""
    return next(stamp for end, stamp in run.uses or () if end >= length)
