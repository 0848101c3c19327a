"""Plan: what one get, put, prefetch or store moves, and what it holds until it is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.prefix_index import PrefixMatch
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.tier import Lease, Tier
from flexcache.ids import BlockKey, OpKind, RootId, TaskKind, TierName
from flexcache.transfer.graph import TransferOpGraph
from flexcache.transfer.messages import BlockNames

LOAD_OP = {TierName.SSD: OpKind.DISK2H, TierName.REMOTE: OpKind.REMOTE2H}
STORE_OP = {TierName.SSD: OpKind.H2DISK, TierName.REMOTE: OpKind.H2REMOTE}


@dataclass(slots=True, eq=False)
class Plan:
    """What one task will move: blocks ``[start, stop)`` of its prompt.

    Attributes:
        staging: The lease on the host tier for blocks from a lower tier or from the GPU.
        stores: Leases on the tiers below the host that a put writes through to.
        sources: For a get, how many of the blocks each tier supplies, in order.
        dropped: Blocks that a put could not store, by reason.
        skipped: Blocks that are cached and deliberately not loaded, by reason.
        load_keys: Keys of the blocks that are read from below the host, from position
            ``load_start`` on.
        is_write_back: Whether it writes dirty blocks.
        is_put_off: Whether blocks that it fails to write become dirty again, whatever failed.
        has_failed: Whether a write has failed.
    """

    kind: TaskKind
    root: RootId
    start: int
    stop: int
    graph: TransferOpGraph = field(default_factory=TransferOpGraph)
    staging: Lease | None = None
    stores: dict[TierName, Lease] = field(default_factory=dict)
    store_starts: dict[TierName, int] = field(default_factory=dict)
    num_reserved: dict[TierName, int] = field(default_factory=dict)
    remote_root: bytes = b""
    pins: list[tuple[Tier, PrefixMatch]] = field(default_factory=list)
    sources: dict[TierName, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    load_keys: Sequence[BlockKey] = ()
    load_start: int = 0
    is_write_back: bool = False
    is_put_off: bool = False
    has_failed: bool = False

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def num_backlogged(self) -> int:
        """Host blocks that wait to be written below until the plan ends."""
        return sum(self.num_reserved.values())

    def pin(self, tier: Tier, match: PrefixMatch) -> None:
        """Keep matched blocks in place until the plan is finished."""
        tier.pin(match)
        self.pins.append((tier, match))


def chunks(start: int, stop: int, size: int) -> Iterator[range]:
    """Divide blocks ``[start, stop)`` into ranges of ``size``, the last possibly shorter."""
    for low in range(start, stop, size):
        yield range(low, min(low + size, stop))


def block_names(tier: Tier, keys: BlockKeys, start: int, stop: int) -> BlockNames:
    """Name blocks ``[start, stop)`` of a prompt, for storage that outlives this process."""
    root = tier.root_at_store(keys.root) if isinstance(tier, RemoteTier) else keys.root
    parent = keys.key(start - 1) if start else b""
    return BlockNames(root, start, parent, list(keys.slice(start, stop)))
