"""Tiers: the tiers of one cache, fastest first, and their common state.

The first is the host tier (pinned DRAM): everything to or from the GPU passes through it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from flexcache.cache.block_keys import (
    BlockKeys,
    EngineBlockKeys,
    PromptContent,
    PromptKeys,
    TokenBlockKeys,
)
from flexcache.cache.block_pool import NO_ROOT
from flexcache.cache.eviction_policy import EvictionPolicy, LruPolicy, Outlook
from flexcache.cache.journal import MEDIUM_OF, WITH_LOCALITY, Journal, Removed, TierJournal
from flexcache.cache.tier import BlockIds, Lease, Tier
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.stats import TierStats

if TYPE_CHECKING:
    from flexcache.cache.peers import PeerTier

_MAX_ABSENT = 65_536
_MAX_PLAIN = 65_536


ABSENT_TTL_S = 5.0
"""How long a block that is missing again and again is not asked for, at most."""
UNKNOWN_TTL_S = 0.1
"""How long a block is not asked for that was missing once, since another host may be storing it, or
about which the store has not answered."""


class RemoteTier(Tier):
    """Knowledge of a remote store.

    A `Tier` whose blocks are not places but pieces of knowledge: *indexed* means "was there when
    last queried, read or written", and evicting means forgetting. It may be wrong either way. A
    block that turns out to be missing costs one failed read and is then forgotten (`discard`). A
    block that other nodes have stored since is found by asking: `first_unknown` returns the first
    to ask about, `learn` takes the answer. A missing block is not asked about again for 0.1 s, and
    each time that it is still missing then for twice as long, up to `ABSENT_TTL_S`.

    Args:
        capacity: Blocks to remember at most; the least recently used are forgotten first.
        retention_s: As of a `Tier`.
    """

    def __init__(
        self, capacity: int, retention_s: float | None = None, name: TierName = TierName.REMOTE
    ) -> None:
        super().__init__(name, capacity, retention_s=retention_s)
        self._absent: OrderedDict[tuple[RootId, BlockKey], tuple[float, float]] = OrderedDict()
        """Until when a block is not asked about, and how long that is; kept for a while after."""
        self.can_be_asked = True
        """Whether anything would answer."""
        self._salt = b""
        self._plain: dict[RootId, None] = {}
        self.num_clears = 0
        self._num_deletes: dict[RootId, int] = {}

    def root_at_store(self, root: RootId) -> bytes:
        """Return the name of a root at the store."""
        if not self._salt or root in self._plain:
            return root
        return xxhash.xxh3_128_digest(root + self._salt)

    def keep_plain(self, root: RootId) -> None:
        """Call a root at the store what others call it: it belongs to weights that were named since
        the last `clear`, so nothing from before it is found."""
        if self._salt and root not in self._plain:
            # Each update of the weights adds roots, so the table needs a bound.
            if len(self._plain) >= _MAX_PLAIN:
                del self._plain[next(iter(self._plain))]
            self._plain[root] = None

    def first_unknown(self, keys: BlockKeys, stop: int, now: float) -> int | None:
        """Return the first unknown block of a prompt; None if there is nothing to ask."""
        position = self.index.match(keys).num_blocks
        # What is being written to the store needs no question.
        position += self.num_in_flight(keys, position, stop)
        if position >= stop:
            return None
        return None if self.is_absent(keys.root, keys.key(position), now) else position

    def is_absent(self, root: RootId, key: BlockKey, now: float) -> bool:
        """Whether a block is assumed to be missing still."""
        return self._absent.get((root, key), (now, 0.0))[0] > now

    def learn(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        first: int = 0,
        content: PromptContent | None = None,
        peer: str = "",
    ) -> int:
        """Remember that consecutive blocks are there, behind ``parent`` (None: from the start).

        Args:
            first: Position of the first of them in its prompt.
            peer: Which peer has them, of a tier of peers.

        Returns:
            The number of blocks there was room for.
        """
        lease = self.reserve_keys(root, parent, keys, first, content)
        count = len(lease)
        self.publish(lease, count)
        self.release(lease)
        return count

    def learn_tail(self, root: RootId, key: BlockKey, count: int, peer: str = "") -> None:
        """Remember that the tail of ``count`` units behind the block ``key`` is there."""
        if self.tails.find(root, key) is None:
            lease = self.reserve_tail(root, key, count)
            if lease is not None:
                self.publish(lease, count)
                self.release(lease)

    def learn_absent(
        self, root: RootId, key: BlockKey, now: float, ttl_s: float | None = None
    ) -> None:
        """Remember that a block is missing.

        Args:
            ttl_s: How long it is not asked about; None: as often as it was missing lately says.
        """
        # Only absence expires. What was there costs one failed read once it is gone, whereas to ask
        # again each time would cost every hit a round trip.
        if ttl_s is None:
            until, former_s = self._absent.get((root, key), (-math.inf, 0.0))
            is_asked_often = now <= until + ABSENT_TTL_S
            ttl_s = min(ABSENT_TTL_S, 2 * former_s) if is_asked_often else UNKNOWN_TTL_S
        self._absent[root, key] = now + ttl_s, ttl_s
        self._absent.move_to_end((root, key))
        while len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)

    def learn_voided(self, lease: Lease) -> None:
        """Remember that what a put brings of a deleted prompt is missing: until its objects are
        removed the store has them."""
        key = lease.keys[-1 if lease.tail is not None else lease.limit]  # which is asked for
        self.learn_absent(lease.root, key, self._now, ABSENT_TTL_S)

    def void(self, root: RootId, keys: set[BlockKey] | None) -> list[Lease]:
        self._num_deletes[root] = self.num_deletes(root) + 1
        if len(self._num_deletes) > _MAX_PLAIN:
            del self._num_deletes[next(iter(self._num_deletes))]
        voided = super().void(root, keys)
        for lease in voided:
            self.learn_voided(lease)
        return voided

    def num_deletes(self, root: RootId) -> int:
        """Return how often something of a root was deleted: answers from before do not count."""
        return self._num_deletes.get(root, 0)

    def clear(self) -> BlockIds:
        """Forget everything stored, and use other names at the store from now on.

        The store belongs to other nodes too, so nothing is deleted; it evicts the old names.
        """
        # To list and delete all objects may take minutes. Versions named later are shared as ever.
        self._salt = np.random.default_rng().bytes(16)
        self._absent.clear()
        self._plain.clear()
        self.num_clears += 1
        return super().clear()

    def note_coming(self, root: RootId, key: BlockKey, now: float, is_coming: bool) -> None:
        """Remember that a block is on its way there, where that is known."""

    def may_stage(self, root: RootId, key: BlockKey, now: float) -> bool:
        """Whether to have blocks up to this one brought from below there, where that is possible;
        not again so soon."""
        return False

    def stats(self, **others: Any) -> TierStats:
        return super().stats(known_absent=len(self._absent), **others)


_MAX_DEFERRED = 64
_MAX_RETIRED = 1024


class Tiers:
    """An ordered list of tiers, the host tier first.

    Attributes:
        written: Those below the host that puts go to.
        beyond: Those of which only is known what they have: peers, the remote store.
        unavailable: Tiers that are currently neither read nor written.
        num_holders: Unfinished plans and withheld leases: while there are none, nothing is leased.
        lost: Blocks lost outside of any plan, by reason.
        policy: The eviction policy.
    """

    def __init__(self, tiers: Sequence[Tier], policy: EvictionPolicy | None = None) -> None:
        if not tiers or tiers[0].name is not TierName.CPU:
            raise InternalError("the first tier must be the host tier")
        self._tiers = tuple(tiers)
        self.host = tiers[0]
        self.lower = self._tiers[1:]
        self.last = self._tiers[-1]
        self.by_name = {tier.name: tier for tier in tiers}
        self.beyond = [tier for tier in tiers if isinstance(tier, RemoteTier)]
        elsewhere = {tier.name: tier for tier in self.beyond}
        self.remote = elsewhere.get(TierName.REMOTE)
        self.peer = cast("PeerTier | None", elsewhere.get(TierName.PEER))
        self.written = [tier for tier in self.lower if tier is not self.peer]
        self.unavailable: set[TierName] = set()
        self.num_holders = 0
        self.lost: Counter[str] = Counter()
        self.policy = LruPolicy(1) if policy is None else policy
        self._deferred: list[Callable[[], None]] = []
        self.journal: Journal | None = None
        self.now = 0.0
        self._withheld: dict[Lease, TierName] = {}
        self._retired: dict[RootId, None] = {}
        """The last roots that no engine uses any more."""

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    def advance(self, now: float) -> None:
        """Set the time: recency is counted in seconds."""
        self.now = now
        for tier in self._tiers:
            tier.advance(now)

    def look_up(self, keys: BlockKeys, num_cached: int | None = None) -> None:
        """Record the look-up of a prompt, later.

        Args:
            num_cached: How many of its blocks some tier has, if that is known.
        """
        if self.policy.follows_prompts:
            near = self.most_cached(keys) if num_cached is None else num_cached
            self._defer(keys, partial(self.policy.look_up, keys, self.now, near))

    def name(self, keys: BlockKeys, session_id: str) -> None:
        """Record whose look-up of a prompt that was, later."""
        if self.policy.follows_prompts:
            self._defer(keys, partial(self._name, keys, session_id))

    def end(self, session_id: str) -> None:
        """Record that a session is over."""
        if self.policy.follows_prompts:
            self.settle()
            self.policy.end(session_id)

    def store(self, keys: BlockKeys, stop: int) -> Outlook | None:
        """Record that a prompt's first ``stop`` blocks were computed; return their kinds, if these
        matter."""
        if not self.policy.follows_prompts:
            return None
        self.settle()
        return self.policy.store(keys, stop)

    def store_nothing(self, keys: BlockKeys, stop: int) -> None:
        """Record likewise of a prompt whose blocks are all cached, later."""
        if self.policy.follows_prompts:
            self._defer(keys, partial(self._store_nothing, keys, stop))

    def recall(self, keys: BlockKeys) -> Outlook | None:
        """Return the kinds of a prompt's blocks as of its last look-up, and record nothing."""
        if not self.policy.follows_prompts:
            return None
        self.settle()
        return self.policy.recall(keys, self.most_cached(keys))

    def settle(self) -> None:
        """Record what was put off, once those who looked up have their answers."""
        for record in self._deferred:
            record()
        self._deferred.clear()

    def _name(self, keys: BlockKeys, session_id: str) -> None:
        self.policy.name(keys, session_id, self.most_cached(keys))

    def most_cached(self, keys: BlockKeys) -> int:
        """Return how many of a prompt's blocks some tier has: about as many were asked for before.

        Its plan probes the tiers that are available too, so hardly a key is hashed for this alone.
        """
        available = [tier for tier in self._tiers if tier.name not in self.unavailable]
        return max([tier.index.match(keys).num_blocks for tier in available], default=0)

    def _store_nothing(self, keys: BlockKeys, stop: int) -> None:
        if (outlook := self.policy.store(keys, stop)) is not None:
            for tier in self._tiers:
                tier.sort(keys, outlook)

    def _defer(self, keys: BlockKeys, record: Callable[[], None]) -> None:
        # A get only notes that a prompt was looked up: the history is searched by the next put, or
        # by the server's thread. So a look-up costs no more than under LRU.
        self._deferred.append(record)
        is_borrowed = isinstance(keys, TokenBlockKeys) and keys.is_borrowed
        if is_borrowed or len(self._deferred) > _MAX_DEFERRED:
            self.settle()  # to copy a long prompt would take longer

    @property
    def num_clears(self) -> int:
        """How often a clear has given roots other names elsewhere."""
        return sum(tier.num_clears for tier in self.beyond)

    def have_locally(self, keys: BlockKeys, stop: int) -> bool:
        """Whether a tier on this machine can supply the first ``stop`` blocks of a prompt."""
        return any(
            tier.index.match(keys).num_blocks >= stop
            for tier in self._tiers
            if tier not in self.beyond and tier.name not in self.unavailable
        )

    def keep_journal(self, tokens_per_block: int, *, tells_locality: bool = False) -> None:
        """Record, from now on, what every tier stores and loses."""
        medium_of = WITH_LOCALITY if tells_locality else MEDIUM_OF
        self.journal = Journal(tokens_per_block, medium_of)
        # What peers have, they tell themselves.
        told = [tier for tier in self._tiers if tier.name in medium_of]
        for tier in told:
            others = [
                other.index.contains
                for other in told
                if other is not tier and medium_of[other.name] is medium_of[tier.name]
            ]
            journal = TierJournal(self.journal, tier.name, others)
            tier.on_stored.append(journal.stored)
            tier.index.on_removed.append(journal.removed)

    def lose(self, tier: Tier, num_blocks: int) -> None:
        """Count blocks that the host tier evicted before a tier with write-back received them."""
        self.lost[f"{tier.name.value.lower()}_never_written"] += num_blocks

    def require(self, name: str | None) -> None:
        """Raise `ValueError` unless there is a tier of this name, or None is meant: all."""
        names = [known.value for known in self.by_name]
        if name is not None and name not in names:
            raise ValueError(f"no tier {name!r} here; tiers: {', '.join(names)}")

    def succeed(self, former: Tiers) -> None:
        """Take the place of tiers that are in doubt: count on, and report their blocks removed.

        Of theirs only what one call alone has set is used.
        """
        self.advance(former.now)
        for tier, before in zip(self._tiers, former, strict=True):
            tier.counters = before.counters
        for tier, was in zip(self.beyond, former.beyond, strict=True):
            tier.num_clears, tier.can_be_asked = was.num_clears, was.can_be_asked
            tier.clear()  # other names there
        if self.journal is None or former.journal is None:
            return
        for change in former.journal.take():
            self.journal.add(change)
        mark, medium_of = len(self.journal), self.journal.medium_of
        for before in former:
            for root, keys in before.index.keys_by_root() if before.name in medium_of else ():
                self.journal.add(Removed(medium_of[before.name], root, keys))
        self.journal.cleared_since(mark)

    def clear(self, name: str | None) -> dict[TierName, BlockIds]:
        """Drop the unheld blocks of one tier, or all of all tiers; return ids of unheld by tier.

        With all tiers, what is held can no longer be found, and what is on its way never can.

        Raises:
            ValueError: There is no such tier; the message names the existing ones.
        """
        self.require(name)
        mark = 0 if self.journal is None else len(self.journal)
        kept, self.lost = self.lost, Counter()  # blocks dropped on request are not lost
        dropped = {t.name: t.clear() for t in self._tiers if name in (None, t.name.value)}
        if name is None:
            for tier in self._tiers:
                tier.forget_held()
        self.lost = kept
        # Only a reset that left nothing is one change; readers of any other see block by block.
        is_empty = not any(tier.index.num_blocks for tier in self._tiers)
        if self.journal is not None and name is None and is_empty:
            self.journal.cleared_since(mark)
        return dropped

    def retire(self, roots: Sequence[RootId]) -> None:
        """Evict what is kept under roots before all else: the weights they were named by are gone.

        Readers of the journal know blocks by the engine's keys, which are the same under its next
        root: for them the blocks have to go at once.
        """
        if self.journal is None:
            roots = roots[-_MAX_RETIRED:]  # older ones become due by themselves
        for root in roots[-_MAX_RETIRED:]:
            self._retired[root] = None
        while len(self._retired) > _MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
        kept, self.lost = self.lost, Counter()  # dirty blocks among them are not lost
        for tier in self._tiers:
            for root in roots:
                tier.retire_root(root, drop=self.journal is not None)
        self.lost = kept

    def unretire(self, root: RootId) -> None:
        """A root is used (again)."""
        if self._retired:
            self._retired.pop(root, None)

    def is_retired(self, root: RootId) -> bool:
        return root in self._retired

    def expire(self, now: float) -> None:
        """Drop some of what was not used for too long, where it is time to look for that."""
        kept, self.lost = self.lost, Counter()  # dirty blocks among them are not lost
        for tier in self._tiers:
            tier.expire(now)
        self.lost = kept

    def withhold_free(self, name: TierName) -> Lease:
        """Keep a tier's free blocks from every plan until `give_back`; dirty blocks wait."""
        self.num_holders += 1
        tier = self.by_name[name]
        lease = tier.reserve_private(NO_ROOT, tier.pool.num_free)
        self._withheld[lease] = name
        return lease

    def withhold_deleted(self, name: TierName) -> Lease:
        """Keep blocks that were deleted, and others that may have records of before, likewise."""
        self.num_holders += 1
        lease = self.by_name[name].withhold_deleted()
        self._withheld[lease] = name
        return lease

    def give_back(self, lease: Lease, is_clean: bool = False) -> None:
        """End `withhold_free` or `withhold_deleted`; ignored of tiers that these have succeeded.

        Args:
            is_clean: Whether the records of the blocks were erased.
        """
        name = self._withheld.pop(lease, None)
        if name is not None:
            self.num_holders -= 1
            tier, blocks = self.by_name[name], lease.blocks
            tier.doomed.spare(blocks)
            tier.release(lease)
            if is_clean:
                tier.doomed.spare(blocks)

    def is_withheld(self, name: TierName) -> bool:
        return name in self._withheld.values()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(capacity)."""
        for tier in self._tiers:
            tier.check()
            if not self.num_holders and tier.num_leased != tier.doomed.num_aside:
                raise InternalError(f"{tier.name.value}: blocks are leased without an open plan")
        self.policy.check()


class ChainKeys:
    """Keys of a whole chain: those up to a continuation's parent, and the continuation's own."""

    __slots__ = (
        "_before", "_keys", "content", "num_before", "num_blocks", "parent_key", "prompt_root",
        "root",
    )  # fmt: skip

    def __init__(self, before: Sequence[BlockKey], keys: PromptKeys) -> None:
        self._before = before
        self._keys = keys
        self.prompt_root, self.root = keys.prompt_root, keys.root
        self.parent_key = None
        self.num_before = len(before)
        self.num_blocks = self.num_before + keys.num_blocks
        self.content = keys.content
        if keys.content is not None:
            first = keys.content.first + self.num_before
            self.content = dataclasses.replace(keys.content, first=first)

    def key(self, index: int) -> BlockKey:
        own = index - self.num_before
        return self._before[index] if own < 0 else self._keys.key(own)

    def slice(self, start: int, stop: int) -> list[BlockKey]:
        own = [max(0, index - self.num_before) for index in (start, stop)]
        return [*self._before[start:stop], *self._keys.slice(*own)]

    def packed(self, stop: int) -> tuple[int, bytes | memoryview]:
        return EngineBlockKeys(self.root, self.slice(0, stop), stop).packed(stop)


class IndexedKeys(EngineBlockKeys):
    """Keys that come from a tier's index, so their root has its place under a layout already."""

    __slots__ = ()

    @property
    def root(self) -> RootId:
        return self.prompt_root

    @root.setter
    def root(self, _: RootId) -> None:
        """Leave the root where it is."""


def find_chain(keys: PromptKeys, tiers: Iterable[Tier]) -> ChainKeys | None:
    """Complete a continuation, whose root must be placed, from the first tier with its parent.

        parent_key:          a3
        block_keys:              b4 b5 b6
        chain:    a0 a1 a2 a3 b4 b5 b6          the first four from the index of a tier

    Some engines keep prompts in a tree and hand over one node at a time. Everything behind the
    match works on whole chains, so the keys before a continuation are taken from a tier that has
    its parent.

    None if no tier has it, indexed or in flight. O(blocks before it), at C speed.
    """
    assert keys.parent_key is not None
    for tier in tiers:
        before = tier.chain_to(keys.root, keys.parent_key)
        if before:
            return ChainKeys(before, keys)
    return None


def find_prefix(root: RootId, key: BlockKey, tiers: Iterable[Tier]) -> IndexedKeys | None:
    """Return the prefix that ends with a block, from the first tier that has it, indexed or in
    flight; None if there is none. O(blocks), at C speed."""
    for tier in tiers:
        keys = tier.chain_to(root, key)
        if keys:
            return IndexedKeys(root, keys, len(keys))
    return None
