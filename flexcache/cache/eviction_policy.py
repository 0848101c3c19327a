"""Eviction policies: which evictable blocks of a tier go next.

A policy is a class that the setting ``eviction_policy`` names. One object of it serves a cache: it
may follow the prompts, and makes the order of each tier, an `EvictionQueue`. What it orders are
*tails*: the last blocks of a run that nothing builds on and nothing pins (`prefix_index`).

    inserted, unpinned, the last block behind it gone --> add
    used ------------------------------> (used)           only if the queue `sees_uses`
    extended, dropped, retired --------> remove
    room is needed --------------------> pop              answers the next victim

The index sees to what must hold under every policy: only tails go, pinned ones stay, a tenant's
room is its own, what is discarded or retired goes first. Uses are told late, so that a match costs
nothing per tail: one that was used since `add` is added again, with its later time, when it comes
up as a victim.

To add a policy: write a subclass of `EvictionPolicy`, and set ``eviction_policy`` to its path,
``MODULE:CLASS``. `tests/support/s3_fifo.py` is one. An entry of `EVICTION_POLICIES` names it.

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, Protocol

from flexcache.cache.block_keys import BlockKeys
from flexcache.config.cache import EVICTION_POLICIES
from flexcache.config.values import reject
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId

Entry = tuple[float, int, int]
"""Time of last use, number and kind of a tail."""

MAX_LENGTH = 512
"""Entries of a list; the cost of an insertion is that of moving so many pointers."""


class SortedTails:
    """Entries in order. Each is there once.

    Both ends are at hand, and most tails come in at the young one:

        oldest |e e e e| |e e e e| |e e| youngest       sorted lists of bounded length, in order

    To add a tail elsewhere, or to take one out, is a bisection over the lists and one within a
    list. The list from which the oldest are being taken is kept the other way round, so that none
    moves for it; it is turned back when a tail comes in among its own, or one of them is taken out.

    Attributes:
        oldest: The oldest, if there are any.
    """

    __slots__ = ("_going", "_lists", "oldest")

    def __init__(self) -> None:
        self.oldest: Entry | None = None
        self._going: list[Entry] = []  # the oldest, in the order youngest to oldest
        self._lists: list[list[Entry]] = []  # the others; none is empty

    def __bool__(self) -> bool:
        return bool(self._going or self._lists)

    def __iter__(self) -> Iterator[Entry]:
        return chain(reversed(self._going), chain.from_iterable(self._lists))

    @property
    def youngest(self) -> Entry | None:
        if self._lists:
            return self._lists[-1][-1]
        return self._going[0] if self._going else None

    def add(self, entry: Entry) -> None:
        """O(1) for the youngest, mostly for the oldest; else O(log entries) and a bounded move."""
        lists, going = self._lists, self._going
        if self.oldest is None or entry < self.oldest:
            self.oldest = entry
            if going and len(going) < MAX_LENGTH:
                going.append(entry)
                return
        if not lists or lists[-1][-1] < entry:
            if lists and len(lists[-1]) < MAX_LENGTH:
                lists[-1].append(entry)
                return
            if lists or not going or going[0] < entry:
                lists.append([entry])
                return
        if going and entry < going[0]:
            self._turn_back()
        at = self._list_of(entry)
        entries = lists[at]
        insort(entries, entry)
        if len(entries) > MAX_LENGTH:
            lists.insert(at + 1, entries[MAX_LENGTH // 2 :])
            del entries[MAX_LENGTH // 2 :]

    def pop_oldest(self) -> Entry:
        """O(1), but for turning each list once, or as often as it has been turned back."""
        going = self._going
        if not going:
            going = self._going = self._lists[0]
            del self._lists[0]
            going.reverse()
        entry = going.pop()
        if going:
            self.oldest = going[-1]
        else:
            self._look_for_oldest()
        return entry

    def pop_youngest(self) -> Entry:
        if not self._lists:
            self._turn_back()
        entries = self._lists[-1]
        entry = entries.pop()
        if not entries:
            del self._lists[-1]
            self._look_for_oldest()
        return entry

    def _look_for_oldest(self) -> None:
        if self._going:
            self.oldest = self._going[-1]
        else:
            self.oldest = self._lists[0][0] if self._lists else None

    def _turn_back(self) -> None:
        """Have the oldest among the other lists again."""
        self._going.reverse()
        self._lists.insert(0, self._going)
        self._going = []

    def remove(self, entry: Entry) -> None:
        """Take out an entry. O(log entries) and a bounded move."""
        if self._going and entry <= self._going[0]:
            self._turn_back()
        at = self._list_of(entry) if self._lists else 0
        entries = self._lists[at] if self._lists else []
        position = bisect_left(entries, entry)
        if position == len(entries) or entries[position] != entry:
            raise InternalError(f"tail {entry[1]} is not in the eviction queue")
        del entries[position]
        if not entries:
            del self._lists[at]
        self._look_for_oldest()

    def _list_of(self, entry: Entry) -> int:
        """Return the number of the list that an entry belongs to."""
        return max(0, bisect_right(self._lists, entry, key=itemgetter(0)) - 1)

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(entries)."""
        lengths = [len(entries) for entries in self._lists]
        if 0 in lengths or max((len(self._going), *lengths)) > MAX_LENGTH:
            raise InternalError("a list of sorted tails is empty or too long")
        if self.oldest != next(iter(self), None):
            raise InternalError("the oldest of sorted tails is another")
        if any(one >= other for one, other in pairwise(self)):
            raise InternalError("sorted tails are out of order, or one is there twice")


RETIRED = -1e300
"""Time of use of tails that go before all that are not retired."""


class Outlook(NamedTuple):
    """Kinds of a prompt's blocks, for policies that tell blocks apart by more than their use.

    Attributes:
        front: Kind of the first ``num_seen`` blocks, which earlier prompts had too.
        rear: Kind of those behind them.
    """

    front: int
    rear: int
    num_seen: int


class Leaves(Protocol):
    """What a policy may ask of the index whose tails it orders, each by the number of its run."""

    def is_evictable(self, number: int) -> bool:
        """Whether a queued tail may go. One that may not is no longer queued: it is added again
        once it may."""

    def last_key(self, number: int) -> tuple[RootId, BlockKey]:
        """Return the root and the key of the last block."""


class EvictionQueue(ABC):
    """The order in which the tails of one tier go, or those of one tenant in it.

    A time of use in the future means that the tail is to be retained until then, if possible.

    Attributes:
        now: The time, in seconds. It does not decrease.
        retired: Tails that the index evicts before all others; they are not in the order.
    """

    has_kinds = False
    """Whether the third item of an entry, the kind of its blocks, matters."""
    sees_uses = False
    """Whether `used` is to be called."""

    def __init__(self, leaves: Leaves) -> None:
        self.now = 0.0
        self.leaves = leaves
        self.retired = SortedTails()

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """Add a tail that is not in the queue: it is new, was let go, is what an eviction has left
        of a run, or was used since it came up as a victim."""

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Take out a tail that was added with this entry."""

    @abstractmethod
    def pop(self, below: float = math.inf) -> Entry | None:
        """Take out the next victim; None if there is none, or if all are worth ``below`` or more,
        in a policy that knows worths."""

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries that are in the queue."""

    def used(self, number: int) -> None:
        """Note that the run of this number was used; its tail may be in the queue or not."""
        raise NotImplementedError

    def bar(self, outlook: Outlook) -> float:
        """Return the worth from which on a tail is not evicted for blocks of a new prompt."""
        return math.inf

    def worth_of_hold(self, hold_s: float, now: float) -> float:
        """Return what blocks are worth that are held so long for each use."""
        return math.inf

    def worth_at(self, age_s: float, now: float) -> float:
        """Return what blocks are worth that were last used this long ago, elsewhere; in a policy
        without worths nothing is evicted for them."""
        return -math.inf

    def check(self, queued: set[Entry]) -> None:
        """Raise `InternalError` if the queue has others than these entries, or an invariant does
        not hold. O(entries)."""
        self.retired.check()
        if wrong := queued.symmetric_difference(chain(self.retired, self)):
            numbers = sorted({number for _, number, _ in wrong})
            raise InternalError(f"runs {numbers} and their entries in the eviction queue differ")


MakeQueue = Callable[[Leaves], EvictionQueue]


class LruQueue(EvictionQueue):
    """The least recently used tail goes first."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__(leaves)
        self._tails = SortedTails()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._tails)

    def add(self, entry: Entry) -> None:
        self._tails.add(entry)

    def remove(self, entry: Entry) -> None:
        self._tails.remove(entry)

    def pop(self, below: float = math.inf) -> Entry | None:
        oldest = self._tails.oldest
        return None if oldest is None or oldest[0] >= below else self._tails.pop_oldest()

    def worth_of_hold(self, hold_s: float, now: float) -> float:
        return now - hold_s  # age stands for the time to the next use

    def worth_at(self, age_s: float, now: float) -> float:
        return now - age_s

    def check(self, queued: set[Entry]) -> None:
        super().check(queued)
        self._tails.check()


class Study(ABC):
    """What a policy is to learn next. Run once, on any thread, and then adopted."""

    @abstractmethod
    def run(self) -> None:
        """Learn. Touches nothing that the policy uses meanwhile."""


class EvictionPolicy:
    """The eviction policy of one cache. Most policies need no more than `for_tier`.

    Args:
        tokens_per_block: Tokens of a block.
    """

    follows_prompts = False
    """Whether its methods from `look_up` to `recall` are called."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block

    def for_tier(self, capacity: int) -> MakeQueue:
        """Return what makes the queue of each tenant in a tier of ``capacity`` blocks."""
        raise NotImplementedError

    def look_up(self, keys: BlockKeys, now: float, near: int | None = None) -> None:
        """Record the look-up of a prompt.

        Args:
            near: About how many of its blocks earlier prompts had, if that is known.
        """

    def name(self, keys: BlockKeys, session_id: str, near: int | None = None) -> None:
        """Record which session the last look-up of a prompt belongs to."""

    def end(self, session_id: str) -> None:
        """Record that a session is over."""

    def store(self, keys: BlockKeys, stop: int) -> Outlook | None:
        """Record that a prompt's first ``stop`` blocks were computed; return their kinds."""
        return None

    def recall(self, keys: BlockKeys, near: int | None = None) -> Outlook | None:
        """Return the kinds of a prompt's blocks by its last look-up; None if there was none."""
        return None

    @property
    def wants_study(self) -> bool:
        """Whether there is something to learn that is worth it. Asked after each change."""
        return False

    def begin_study(self) -> Study | None:
        """Return what there is to learn, if it is worth it. The study must be run and adopted."""
        return None

    def adopt(self, study: Study) -> None:
        """Follow what a study has found."""

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""


class LruPolicy(EvictionPolicy):
    """``lru``: the least recently used blocks go first."""

    def for_tier(self, capacity: int) -> MakeQueue:
        return LruQueue


def make_policy(name: str, tokens_per_block: int) -> EvictionPolicy:
    """Make the eviction policy of a cache.

    Args:
        name: One of `EVICTION_POLICIES`, or the path of a class, ``MODULE:CLASS``.

    Raises:
        ConfigError: It names no policy.
    """
    module, _, attribute = EVICTION_POLICIES.get(name, (name,))[0].partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise reject("eviction_policy", name, f"cannot be imported: {error}") from error
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise reject("eviction_policy", name, "is no subclass of EvictionPolicy")
    return policy(tokens_per_block)
