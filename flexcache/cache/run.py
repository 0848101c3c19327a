"""A run: consecutive blocks of one sequence, in the tree of a `prefix_index`.

The blocks that were last used at once are a *segment*. Most runs have one, so the last segment is
kept as the entry that stands for it in the eviction queue, and those before it are listed on the
side. What an eviction has to fetch from memory is most of its cost: a run of few blocks is made of
few objects.

Not thread-safe.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexcache.cache.eviction_queue import EvictionQueue
from flexcache.cache.sorted_tails import Entry
from flexcache.cache.staircase import cover, cut
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

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
