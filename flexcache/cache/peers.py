"""Peers: what other hosts' DRAM is known to hold, and what of ours they may read.

`PeerTier` is the reader's side, knowledge like that of a remote store. `PeerLoans` is the owner's:

    find --> how many blocks of a prompt are here
    lend --> pinned, until it is given back, or its time is over, or the cache is forgotten

A reader has two guards, of which each alone keeps wrong bytes out. Its own clock: the owner
counts the time of a loan from after it was asked for, so bytes that have arrived before that time
is over were pinned while they were read. And checksums, made while the blocks are pinned.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import BlockKeys, PackedBlockKeys, PromptContent
from flexcache.cache.eviction_policy import Outlook
from flexcache.cache.pins import PinnedBlocks
from flexcache.cache.prefix_index import EMPTY_MATCH, PrefixMatch
from flexcache.cache.tail_index import Tail, tail_keys
from flexcache.cache.tier import BlockIds, Lease, Tier
from flexcache.cache.tiers import UNKNOWN_TTL_S, RemoteTier, Tiers
from flexcache.errors import InternalError
from flexcache.ids import BlockKey, RootId, TierName
from flexcache.stats import LoanStats

COMING_AGAIN_S = 0.01
"""How soon a peer is asked again for what is on its way there."""
COMING_S = 0.25
"""For how long it is believed to be on its way, unless it is asked again."""
STAGE_AGAIN_S = 1.0
"""How soon a peer is asked again to bring from its SSD what it had no room for."""
KNOWN_S = 1.0
"""How long it is believed that a peer has a block: its DRAM evicts all the time."""
LOAN_S = 3.0
"""How long a reader may read what it was lent."""
GRACE_S = 1.0
"""How much longer the owner keeps it."""
LENT_SHARE = 1 / 4
"""Share of DRAM that loans may hold at once: a prompt's blocks, from its start to the last lent."""
DRAINED_SHARE = 3 / 4
"""Likewise while the host hands over what it has."""
_MAX_LOANS = 64  # of one peer
_MAX_COMING = 4096
_TOKEN_BYTES = 16


class PeerTier(RemoteTier):
    """Knowledge of what peers have, and which of them has it.

    Args:
        capacity: Blocks to remember at most.
    """

    def __init__(self, capacity: int, retention_s: float | None = None) -> None:
        super().__init__(capacity, retention_s, TierName.PEER)
        self.can_be_asked = False  # until one has answered
        self.lost: frozenset[str] = frozenset()
        """Peers that were there, and are not now."""
        self._coming: OrderedDict[tuple[RootId, BlockKey], tuple[float, float]] = OrderedDict()
        """Since when a block is on its way at a peer, and until when that is believed."""
        self._staged: OrderedDict[tuple[RootId, BlockKey], float] = OrderedDict()
        """When a peer was asked to bring blocks up to this one from its SSD to its DRAM."""
        self._peer_of: npt.NDArray[np.object_] = np.full(capacity, "", object)
        self._known_until_s = np.zeros(capacity)

    def match(
        self, keys: BlockKeys, outlook: Outlook | None = None, retain_s: float = 0.0,
        is_use: bool = True,
    ) -> PrefixMatch:  # fmt: skip
        # A plan may come without a question: what was said too long ago is not read.
        match = super().match(keys, outlook, retain_s, is_use)
        known = self._num_believed(self.index.blocks(match), self._now)
        if known == match.num_blocks:
            return match
        return self.index.locate(keys.root, keys.key(known - 1)) if known else EMPTY_MATCH

    def _num_believed(self, blocks: BlockIds, now: float) -> int:
        outdated = self._known_until_s[blocks] < now
        return int(outdated.argmax()) if outdated.any() else len(blocks)

    def first_unknown(self, keys: BlockKeys, stop: int, now: float) -> int | None:
        # A store's blocks are believed until a read fails. To fail costs a get, to ask a peer 0.2
        # ms: so what was said a while ago is asked again.
        blocks = self.index.blocks(self.index.match(keys))[:stop]
        position = self._num_believed(blocks, now)
        if position >= stop or self.is_absent(keys.root, keys.key(position), now):
            return None
        return position

    def learn(
        self, root: RootId, parent: BlockKey | None, keys: Sequence[BlockKey], first: int = 0,
        content: PromptContent | None = None, peer: str = "",
    ) -> int:  # fmt: skip
        """As of a store.

        Args:
            peer: Which of them has the blocks.
        """
        count = super().learn(root, parent, keys, first, content)
        # Also what was known before: it may be another peer that has it now.
        match = self.index.locate(root, keys[count - 1]) if count else EMPTY_MATCH
        if match.run is not None:
            self._note(self.index.blocks(match, max(0, match.num_blocks - count)), peer)
        return count

    def learn_tail(self, root: RootId, key: BlockKey, count: int, peer: str = "") -> None:
        super().learn_tail(root, key, count)
        if (tail := self.tails.find(root, key)) is not None:
            self._note(tail.units, peer)

    def learn_absent(
        self, root: RootId, key: BlockKey, now: float, ttl_s: float | None = None
    ) -> None:
        # Never for long: it is a peer that lacks it, and another may have it.
        is_coming = self.coming_since(root, key, now) is not None
        again_s = COMING_AGAIN_S if is_coming else UNKNOWN_TTL_S
        super().learn_absent(root, key, now, min(again_s, ttl_s or again_s))
        if self.index.contains(root, key):
            self.discard(root, key)

    def note_coming(self, root: RootId, key: BlockKey, now: float, is_coming: bool) -> None:
        """Remember that a peer has said that a block is on its way, or that none says so."""
        since, _ = self._coming.pop((root, key), (now, 0.0))
        if is_coming:
            self._coming[root, key] = since, now + COMING_S
            while len(self._coming) > _MAX_COMING:
                self._coming.popitem(last=False)

    def may_stage(self, root: RootId, key: BlockKey, now: float) -> bool:
        asked_s = self._staged.pop((root, key), -math.inf)
        may = now >= asked_s + STAGE_AGAIN_S
        self._staged[root, key] = now if may else asked_s
        while len(self._staged) > _MAX_COMING:
            self._staged.popitem(last=False)
        return may

    def coming_since(self, root: RootId, key: BlockKey, now: float) -> float | None:
        """Return since when a block is on its way to a peer's DRAM; None if it is not."""
        since, until_s = self._coming.get((root, key), (now, 0.0))
        return since if now < until_s else None

    def forget(self) -> None:
        """Believe nothing any more, and ask again: a peer is gone."""
        self._known_until_s[:] = -1.0
        for tail in self.tails.all_tails():
            self.discard_tail(tail.root, tail.key)

    def peer_of(self, block: np.int64) -> str:
        """Return which peer has a block."""
        return str(self._peer_of[block])

    def pieces(self, blocks: BlockIds, chunks: Iterable[range], first: int) -> Iterator[range]:
        """Divide chunks of consecutive blocks, the ``first`` of which is ``blocks[0]``, so that one
        peer has all of a piece."""
        peers = self._peer_of[blocks]
        changes = set((first + 1 + np.flatnonzero(peers[1:] != peers[:-1])).tolist())
        for chunk in chunks:
            start = chunk.start
            for stop in [*sorted(changes & set(chunk[1:])), chunk.stop]:
                yield range(start, stop)
                start = stop

    def _note(self, blocks: BlockIds, peer: str) -> None:
        self._peer_of[blocks] = peer
        self._known_until_s[blocks] = self._now + KNOWN_S


def peer_of(tier: Tier, block: np.int64) -> str:
    """Return which peer has a block of a tier; empty for a tier that is not of peers."""
    return tier.peer_of(block) if isinstance(tier, PeerTier) else ""


def pieces_of(tier: Tier, blocks: BlockIds, chunks: Iterable[range], first: int) -> Iterable[range]:
    """Divide chunks of blocks so that one peer has all of a piece (`PeerTier.pieces`)."""
    return tier.pieces(blocks, chunks, first) if isinstance(tier, PeerTier) else chunks


class FoundHere(NamedTuple):
    """How much of consecutive blocks a cache has.

    Attributes:
        num_blocks: So many from the first on are in DRAM.
        tail: Number of the first of the tails that is there and of use; -1 for none.
        num_coming: So many more are on their way to DRAM.
        num_on_ssd: So many behind these are on SSD alone.
        ssd_tail: As ``tail``, once what is on SSD is in DRAM; -1 if that is no other one.
    """

    num_blocks: int = 0
    tail: int = -1
    num_coming: int = 0
    num_on_ssd: int = 0
    ssd_tail: int = -1


def _num_in(tier: Tier, root: RootId, keys: PackedBlockKeys, low: int) -> int:
    """Return how many of consecutive blocks a tier has, if it has the first ``low``."""
    contains, high = tier.index.contains, keys.num_blocks
    # Closed under prefixes. Mostly all of them are here, or none.
    if high > low and contains(root, keys.key(high - 1)):
        return high
    if high > low and not contains(root, keys.key(low)):
        return low
    while low < high:
        middle = (low + high) // 2
        if contains(root, keys.key(middle)):
            low = middle + 1
        else:
            high = middle
    return low


def _first_tail(
    tiers: Iterable[Tier], root: RootId, tails: Sequence[tuple[int, bytes, int]], num_blocks: int
) -> int:
    """Return the number of the first tail that is of use with so many blocks, and in a tier."""
    for number, (num_needed, key, num_units) in enumerate(tails):
        if num_needed <= num_blocks:
            found = [tier.tails.find(root, BlockKey(key)) for tier in tiers]
            if any(tail is not None and len(tail.units) == num_units for tail in found):
                return number
    return -1


@dataclass(frozen=True, slots=True, eq=False)
class PeerLoan:
    """Blocks of DRAM that stay where they are for a peer.

    Attributes:
        token: Known to the peer and to the worker that sends them.
        ends_s: When the owner lets go of them.
    """

    token: bytes
    peer: bytes
    blocks: BlockIds
    ends_s: float
    match: PrefixMatch = EMPTY_MATCH
    tail: Tail | None = None


class PeerLoans:
    """What peers may find in DRAM, and what they are lent.

    Bounded: each peer has a number of loans, all together a share of DRAM. What is beyond is as if
    it were not here.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._host = tiers.host
        # What roots are called elsewhere is the same for those who ask us as for us.
        self._names = tiers.peer
        self._loans: dict[bytes, PeerLoan] = {}
        self._of_peers: Counter[bytes] = Counter()
        self._ends: list[tuple[float, bytes]] = []
        """A heap; those of loans that have ended stay until they are due."""
        self._held = PinnedBlocks(lambda root: 0)
        self._tiers = tiers
        self.is_draining = False
        """Whether this host hands over what it has: then its own engines come after peers."""
        self._left: tuple[Lease, float] | None = None
        """Blocks of former loans, and until when they are not used again."""
        self.max_blocks = int(LENT_SHARE * tiers.host.capacity)
        self.counters = LoanStats()
        self._begun: list[PeerLoan] = []
        self._ended: list[bytes] = []

    def find(
        self, root: RootId, keys: PackedBlockKeys, tails: Sequence[tuple[int, bytes, int]] = ()
    ) -> FoundHere:
        """Return how much of consecutive blocks is here, from the first on.

        Args:
            tails: Of each: how many of the blocks must be here for it to be of use, the key of the
                block behind which it is, and its number of units.
        """
        if not self.is_shared(root):
            return FoundHere()
        host, ssd = self._host, self._tiers.by_name.get(TierName.SSD)
        num_blocks = _num_in(host, root, keys, 0)
        num_coming = host.num_in_flight(keys, num_blocks, keys.num_blocks)
        tail = _first_tail((host,), root, tails, num_blocks)
        if ssd is None or ssd.name in self._tiers.unavailable:
            return FoundHere(num_blocks, tail, num_coming)
        here = num_blocks + num_coming
        in_all = max(here, _num_in(ssd, root, keys, here))
        ssd_tail = _first_tail((host, ssd), root, tails, in_all)
        return FoundHere(
            num_blocks, tail, num_coming, in_all - here, -1 if ssd_tail == tail else ssd_tail
        )

    def lend(
        self, peer: bytes, root: RootId, keys: Sequence[BlockKey], now: float,
        tail: tuple[BlockKey, int] | None = None,
    ) -> PeerLoan | None:  # fmt: skip
        """Keep consecutive blocks in place for a peer, all of them or none.

        Args:
            tail: For units of the tail behind this block, from this number on; ``keys`` name them.

        Returns:
            None if there is nothing to read.
        """
        if not keys or not self.is_shared(root):
            return None
        token, ends_s = secrets.token_bytes(_TOKEN_BYTES), now + LOAN_S + GRACE_S
        if tail is not None:
            found = self._units(root, keys, tail)
            if found is None:
                return None
            units = found.units[tail[1] : tail[1] + len(keys)].copy()
            loan = PeerLoan(token, peer, units, ends_s, tail=found)
        else:
            match = self._match(root, keys)
            if match is None:
                return None
            blocks = self._host.index.blocks(match, match.num_blocks - len(keys)).copy()
            loan = PeerLoan(token, peer, blocks, ends_s, match)
        # Counted first, and taken back if that is too many: what loans share counts once.
        self._hold(loan)
        # A refusal is a miss for one peer. Else peers could pin all that our engines need.
        limit = int(DRAINED_SHARE * self._host.capacity) if self.is_draining else self.max_blocks
        if self._held.num_blocks > limit or self._of_peers[peer] >= _MAX_LOANS:
            self._let_go(loan)
            self.counters.refused += 1
            return None
        self._loans[token] = loan
        self._of_peers[peer] += 1
        heapq.heappush(self._ends, (ends_s, token))
        self.counters.lent += 1
        self._begun.append(loan)
        return loan

    def give_back(self, token: bytes, peer: bytes) -> bool:
        """End a loan of a peer; whether it was one."""
        loan = self._loans.get(token)
        if loan is None or loan.peer != peer:
            return False
        self._end(loan)
        return True

    def expire(self, now: float) -> None:
        """End what was not given back in time."""
        if self._left is not None and self._left[1] <= now:
            self._host.release(self._left[0])
            self._tiers.num_holders -= 1
            self._left = None
        while self._ends and self._ends[0][0] <= now:
            loan = self._loans.get(heapq.heappop(self._ends)[1])
            if loan is not None:
                self._end(loan)
                self.counters.expired += 1

    def end_all(self) -> None:
        """End all loans: nothing can be sent now."""
        for loan in list(self._loans.values()):
            self._end(loan)

    def take_news(self) -> tuple[list[PeerLoan], list[bytes]]:
        """Return the loans that have begun since the last call, and the tokens of those that have
        ended: what sends the blocks needs them."""
        news = self._begun, self._ended
        self._begun, self._ended = [], []
        return news

    def succeed(self, former: PeerLoans) -> None:
        """Count on, after the index was lost and with it all pins."""
        self.counters = former.counters
        self._ended = [*former._ended, *former._loans]
        # The worker may be making checksums of them: they are not used again before a loan's end.
        lent = [loan.blocks for loan in former._loans.values()]
        ends_s = max((loan.ends_s for loan in former._loans.values()), default=0.0)
        if former._left is not None:
            lent.append(former._left[0].blocks)
            ends_s = max(ends_s, former._left[1])
        if lent:
            # Those that executors use are kept by others.
            free = np.intersect1d(np.concatenate(lent), self._host.pool.free_ids())
            self._left = self._host.reserve_exactly(free), ends_s
            self._tiers.num_holders += 1

    @property
    def next_end(self) -> float | None:
        """When `expire` has something to do."""
        while self._ends and self._ends[0][1] not in self._loans:
            heapq.heappop(self._ends)
        times = [self._ends[0][0]] if self._ends else []
        if self._left is not None:
            times.append(self._left[1])
        return min(times, default=None)

    def stats(self) -> LoanStats:
        return self.counters.snapshot(open=len(self._loans), blocks=self._held.num_blocks)

    def is_shared(self, root: RootId) -> bool:
        """Whether peers mean the same by a root: after a clear its blocks here may be of other
        weights under the same name."""
        return self._names is not None and self._names.root_at_store(root) == root

    def _match(self, root: RootId, keys: Sequence[BlockKey]) -> PrefixMatch | None:
        """Return the path that ends with these keys; None if it is not here."""
        match = self._host.index.locate(root, keys[-1])
        if match.run is None or match.num_blocks < len(keys):
            return None
        # A peer can send any keys: those before the last must be what it means by them.
        path = self._host.index.path_keys(match, match.num_blocks - len(keys))
        return match if path == list(keys) else None

    def _units(
        self, root: RootId, keys: Sequence[BlockKey], tail: tuple[BlockKey, int]
    ) -> Tail | None:
        key, first = tail
        found = self._host.tails.find(root, key)
        if found is None or first < 0:
            return None
        names = tail_keys(key, len(found.units))[first : first + len(keys)]
        return found if names == list(keys) else None

    def _end(self, loan: PeerLoan) -> None:
        del self._loans[loan.token]
        self._ended.append(loan.token)
        self._of_peers[loan.peer] -= 1
        if not self._of_peers[loan.peer]:
            del self._of_peers[loan.peer]
        self._let_go(loan)

    def _hold(self, loan: PeerLoan) -> None:
        # The path to its start, too: the index keeps no block without those before it. And a tail
        # as a whole, however few of its units are read: there is never a part of one.
        if loan.tail is not None:
            self._host.tails.pin(loan.tail)
            self._held.add_tail(loan.tail)
        else:
            self._host.index.pin(loan.match)
            self._held.add(loan.match)

    def _let_go(self, loan: PeerLoan) -> None:
        if loan.tail is not None:
            self._held.remove_tail(loan.tail)
            self._host.unpin_tail(loan.tail)
        else:
            self._held.remove(loan.match)
            self._host.unpin(loan.match)

    def check(self) -> None:
        """Raise `InternalError` if loans are miscounted."""
        self._held.check(self._host.index.run)
        loans = self._loans.values()
        if not loans and self._held.num_blocks:
            raise InternalError(f"{self._held.num_blocks} blocks are counted as lent to peers")
        if self._of_peers != Counter(loan.peer for loan in loans):
            raise InternalError("loans of peers are miscounted")
