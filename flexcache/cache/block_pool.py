"""Block pool of one tier: which block ids are free, and how many each tenant has of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import tag_of, tenant_of
from flexcache.errors import InternalError
from flexcache.ids import RootId
from flexcache.stats import QuotaStats

BlockIds = npt.NDArray[np.int64]


class BlockIdPool:
    """A stack of free block ids. Not thread-safe.

    Invariant: an id is either on the stack once, or was taken and not given back.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack: BlockIds = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self.num_free = capacity
        # Beside the stack: a block that is freed twice would be given to two prompts.
        self._is_free = np.ones(capacity, dtype=np.bool_)

    def take(self, count: int) -> BlockIds:
        """Take ``count`` free ids. O(count), vectorised. The caller has checked `num_free`."""
        if count > self.num_free:
            raise InternalError(f"{count} blocks wanted, {self.num_free} free")
        if count == 0:
            return np.empty(0, dtype=np.int64)
        start = self.num_free - count
        ids: BlockIds = self._stack[start : self.num_free][::-1].copy()
        self.num_free = start
        self._is_free[ids] = False
        return ids

    def take_exactly(self, ids: BlockIds) -> None:
        """Take these ids, which must be free. O(capacity), vectorised."""
        self._is_free[ids] = False
        still_free = self._stack[: self.num_free]
        still_free = still_free[self._is_free[still_free]]
        if len(still_free) + len(ids) != self.num_free:
            raise InternalError("block ids to be taken are not free, or occur twice")
        self.num_free = len(still_free)
        self._stack[: self.num_free] = still_free

    def give_back(self, ids: BlockIds) -> None:
        """Give back ids that were taken. O(len(ids)), vectorised."""
        if len(ids) == 0:
            return
        if self._is_free[ids].any():
            raise InternalError(f"blocks freed twice: {ids[self._is_free[ids]].tolist()}")
        self._is_free[ids] = True
        end = self.num_free + len(ids)
        self._stack[self.num_free : end] = ids[::-1]
        self.num_free = end

    def free_ids(self) -> BlockIds:
        """Return all free ids, in order. O(capacity), vectorised."""
        return np.flatnonzero(self._is_free).astype(np.int64, copy=False)

    def is_free(self, block: int) -> bool:
        return bool(self._is_free[block])

    def check(self) -> None:
        """Raise `InternalError` if the invariant does not hold. O(capacity)."""
        free = self._stack[: self.num_free]
        if len(np.unique(free)) != len(free):
            raise InternalError("an id is on the free stack twice")
        if int(self._is_free.sum()) != self.num_free or not self._is_free[free].all():
            raise InternalError("free stack and free flags disagree")


class DoomedBlocks:
    """Blocks whose records a restart must not find, as what they are of was deleted.

        in place --doom--> held by a task --given back--> aside --take--> records erased, free
                                     \\-----------------> (those that no task held: at once)
        free, recorded --doom--> free, doomed --> records erased, free
                                       \\-------> another prompt's, spared once that is recorded

    A doomed block that is given back is set aside: no other prompt may get it while its record is
    erased.

    Args:
        capacity: Blocks of a tier that has records; 0 for another, of which nothing is doomed.

    Attributes:
        has_news: Whether something was set aside since the last `take`, or since this was unset.
    """

    def __init__(self, capacity: int) -> None:
        self._is_doomed = np.zeros(capacity, np.bool_)
        self._is_left = np.zeros(capacity, np.bool_)
        # Joined once, by `take`: a large delete sets aside block by block.
        self._aside = [np.empty(0, np.int64)]
        self.num_aside = 0
        self.has_news = False

    def __bool__(self) -> bool:
        """Whether the tier has records."""
        return len(self._is_doomed) > 0

    def doom(self, blocks: BlockIds) -> None:
        if self:
            self._is_doomed[blocks] = True

    def doom_evicted(self) -> None:
        """Doom all records of what is gone already: any may be of what is deleted now."""
        # A put that is cancelled leaves the record of what it had evicted, by which a restart would
        # find that again.
        self._is_doomed |= self._is_left

    def leave(self, blocks: BlockIds) -> None:
        """Blocks may have records of what cannot be found any more."""
        if self:
            self._is_left[blocks] = True

    def spare(self, blocks: BlockIds) -> None:
        """Blocks have no records, or of what can be found."""
        if self:
            self._is_doomed[blocks] = self._is_left[blocks] = False

    def among(self, blocks: BlockIds) -> BlockIds:
        """Return those of the blocks that are doomed."""
        return blocks[self._is_doomed[blocks]] if self else blocks[:0]

    def in_use(self) -> BlockIds:
        """Return blocks of what was deleted that tasks still read."""
        # What is being written is left: its record may be of another prompt, and not deleted.
        return np.flatnonzero(self._is_doomed & ~self._is_left)

    def set_aside(self, blocks: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Divide blocks that are given back: those that are set aside, and the others."""
        is_doomed = self._is_doomed[blocks]
        self._is_left[blocks] = True
        if not is_doomed.any():
            return blocks[:0], blocks
        aside = blocks[is_doomed]
        self._is_doomed[aside] = False
        self._aside.append(aside)
        self.num_aside += len(aside)
        self.has_news = True
        return aside, blocks[~is_doomed]

    def take(self) -> BlockIds:
        """Return what was set aside, and forget it."""
        taken = np.concatenate(self._aside)
        self._aside, self.num_aside, self.has_news = self._aside[:1], 0, False
        return taken


OTHERS = 0
"""Number of the tenants that are not named."""
NO_ROOT = RootId(b"")
"""The root of blocks that are withheld from every plan, or expected after a restart."""
_FREE = -1


class Quotas:
    """Tenants of one tier by number, and their blocks.

        team-a   |########|#####      over: borrowed what others do not use, and gives it back first
        team-b   |####----|           within its quota: its blocks stay
        others   |###|##              tenants that are not named, together

    Free room is for all. Once there is none, the tenant that is over its quota by most gives up
    blocks, by the tier's policy among its own. Blocks on their way count as theirs who asked for
    them.

    A root names its tenant (`block_keys.tenant_of`), so nothing is remembered per namespace.

    Args:
        capacity: Blocks of the tier.
        quotas: Blocks that each tenant is sure of, by name; the first stands for all others.
    """

    def __init__(self, capacity: int, quotas: Mapping[str, int]) -> None:
        self._names = list(quotas)
        # Blocks withheld from every plan are under no root: their tenant is never over.
        self._parts = [QuotaStats(quota=quota) for quota in (*quotas.values(), capacity)]
        self._tenants = {tag_of(name): number for number, name in enumerate(self._names) if number}
        self._tenant_of = np.full(capacity, _FREE, np.int16)

    @property
    def num_tenants(self) -> int:
        """Numbers of tenants, with one for blocks under no root."""
        return len(self._parts)

    def tenant(self, root: RootId) -> int:
        """Return the number of a root's tenant. O(1)."""
        # No quota pays for what is withheld, or not known yet.
        if root == NO_ROOT:
            return len(self._names)
        return self._tenants.get(tenant_of(root), OTHERS)

    def take(self, tenant: int, blocks: BlockIds) -> None:
        """Count free blocks as a tenant's."""
        self._tenant_of[blocks] = tenant
        self._parts[tenant].used += len(blocks)

    def give_back(self, blocks: BlockIds) -> None:
        """Count blocks as free."""
        counts = np.bincount(self._tenant_of[blocks], minlength=self.num_tenants)
        for tenant in np.flatnonzero(counts).tolist():
            self._parts[tenant].used -= int(counts[tenant])
        self._tenant_of[blocks] = _FREE

    def pass_on(self, victim: int, tenant: int, blocks: BlockIds) -> None:
        """Count blocks evicted from one tenant as another's, or its own again."""
        self._parts[victim].used -= len(blocks)
        self.take(tenant, blocks)

    def count_evicted(self, tenant: int, num_blocks: int) -> None:
        self._parts[tenant].evicted += num_blocks

    def quota(self, root: RootId) -> int:
        """Return how many blocks a root's tenant is sure of."""
        return self._parts[self.tenant(root)].quota

    def room(self, tenant: int) -> int:
        """Return how many more blocks a tenant is sure of."""
        part = self._parts[tenant]
        return max(0, part.quota - part.used)

    def count_get(self, root: RootId, num_hit: int, num_missed: int) -> None:
        part = self._parts[self.tenant(root)]
        part.hit += num_hit
        part.missed += num_missed

    def victim(self, tenant: int, missing: int, spared: Collection[int]) -> tuple[int, int] | None:
        """Return who gives up blocks for ``missing`` ones of a tenant, and how many at most.

        It is the one that is over its quota by most, the missing blocks included; if none is left,
        the tenant itself, whose older blocks go for its new ones. None if that is spared too.

        Args:
            spared: Those that have nothing left to evict.
        """
        worst, most = tenant, 0
        # The missing count as its own already: who is at its quota takes from itself.
        for other, part in enumerate(self._parts):
            excess = part.used - part.quota + (missing if other == tenant else 0)
            if excess > most and other not in spared:
                worst, most = other, excess
        if most:
            return worst, min(most, missing)
        return None if tenant in spared else (tenant, missing)

    def stats(self) -> dict[str, QuotaStats]:
        """Return each tenant's part, by name."""
        return {n: part.snapshot() for n, part in zip(self._names, self._parts, strict=False)}

    def check(self, roots: Iterable[tuple[RootId, BlockIds]], free: BlockIds) -> None:
        """Raise `InternalError` if blocks are counted for the wrong tenant. O(capacity).

        Args:
            roots: Blocks that can be found, and their roots.
            free: Blocks that are free.
        """
        for root, blocks in roots:
            if (self._tenant_of[blocks] != self.tenant(root)).any():
                raise InternalError("a block is counted for another tenant")
        if not (self._tenant_of[free] == _FREE).all():
            raise InternalError("a free block is counted for a tenant")
        counts = np.bincount(self._tenant_of + 1, minlength=self.num_tenants + 1)
        used = [part.used for part in self._parts]
        if counts[0] != len(free) or counts[1:].tolist() != used:
            raise InternalError(f"tenants have {counts[1:].tolist()} blocks, counted {used}")
