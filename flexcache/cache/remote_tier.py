"""The REMOTE tier: this server's knowledge of a store that other nodes also fill and empty.

A `Tier` whose blocks are not places but pieces of knowledge: *indexed* means "was there when last
queried, read or written", and evicting means forgetting. It may be wrong either way. A block that
turns out to be missing costs one failed read and is then forgotten (`discard`). A block that other
nodes have stored since is found by asking: `first_unknown` returns the first to ask about, `learn`
takes the answer, and a missing block is not asked about again for a while.

Not thread-safe, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import xxhash

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.eviction_queue import Ranking
from flexcache.cache.prompt_content import PromptContent
from flexcache.cache.tier import BlockIds, Tier
from flexcache.ids import BlockKey, RootId, TierName

_MAX_ABSENT = 65_536
_MAX_PLAIN = 65_536


class RemoteTier(Tier):
    """Knowledge of a remote store.

    Args:
        absent_ttl_s: How long a missing block is assumed to stay missing.
        capacity: Blocks to remember at most; the least recently used are forgotten first.
        ranking, refuses: As ``ranking`` and ``bypasses`` of a `Tier`, as if the store had this
            capacity.
        retention_s: As of a `Tier`.
    """

    def __init__(
        self, absent_ttl_s: float, capacity: int, ranking: Ranking | None = None,
        refuses: bool = False, retention_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(TierName.REMOTE, capacity, ranking, refuses, retention_s=retention_s)
        self._absent_ttl_s = absent_ttl_s
        self._absent: OrderedDict[tuple[RootId, BlockKey], float] = OrderedDict()
        self._salt = b""
        self._plain: dict[RootId, None] = {}
        self.num_clears = 0

    def root_at_store(self, root: RootId) -> bytes:
        """Return the name of a root at the store."""
        if not self._salt or root in self._plain:
            return root
        return xxhash.xxh3_128_digest(root + self._salt)

    def keep_plain(self, root: RootId) -> None:
        """Call a root at the store what others call it: it belongs to weights that were named since
        the last `clear`, so nothing from before it is found."""
        if self._salt and root not in self._plain:
            if len(self._plain) >= _MAX_PLAIN:
                del self._plain[next(iter(self._plain))]
            self._plain[root] = None

    def first_unknown(self, keys: BlockKeys, stop: int, now: float) -> int | None:
        """Return the first unknown block of a prompt; None if there is nothing to ask."""
        position = self.index.match(keys).num_blocks
        position += self.num_in_flight(keys, position, stop)
        if position >= stop:
            return None
        return None if self.is_absent(keys.root, keys.key(position), now) else position

    def is_absent(self, root: RootId, key: BlockKey, now: float) -> bool:
        """Whether a block is known to be missing."""
        until = self._absent.get((root, key))
        if until is not None and until <= now:
            del self._absent[root, key]
            return False
        return until is not None

    def learn(
        self,
        root: RootId,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        first: int = 0,
        content: PromptContent | None = None,
    ) -> int:
        """Remember that consecutive blocks are there, behind ``parent`` (None: from the start).

        Args:
            first: Position of the first of them in its prompt.

        Returns:
            The number of blocks there was room for.
        """
        lease = self.reserve_keys(root, parent, keys, first, content)
        count = len(lease)
        self.publish(lease, count)
        self.release(lease)
        return count

    def learn_tail(self, root: RootId, key: BlockKey, count: int) -> None:
        """Remember that the tail of ``count`` units behind the block ``key`` is there."""
        if self.tails.find(root, key) is None:
            lease = self.reserve_tail(root, key, count)
            if lease is not None:
                self.publish(lease, count)
                self.release(lease)

    def learn_absent(self, root: RootId, key: BlockKey, now: float) -> None:
        """Remember that a block is missing, or that nothing could be learned about it."""
        self._absent[root, key] = now + self._absent_ttl_s
        self._absent.move_to_end((root, key))
        while len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)

    def clear(self) -> BlockIds:
        """Forget everything stored, and use other names at the store from now on.

        The store belongs to other nodes too, so nothing is deleted; it evicts the old names.
        """
        self._salt = np.random.default_rng().bytes(16)
        self._absent.clear()
        self._plain.clear()
        self.num_clears += 1
        return super().clear()

    def stats(self) -> dict[str, int]:
        return super().stats() | {"known_absent": len(self._absent)}
