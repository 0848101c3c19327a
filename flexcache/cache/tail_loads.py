"""TailLoads: finds the tails at which prompts can be resumed, and plans loading them.

Part of `LoadPlanner`, for models with tails. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flexcache.cache.block_keys import BlockKeys
from flexcache.cache.plan import LOAD_OP, Plan, PlannedTail, chunks
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.tail_index import TAIL_FIRST, Tail, last_tail_key
from flexcache.cache.tier import BlockIds, Tier
from flexcache.cache.tiers import Tiers
from flexcache.config.model import UnitShape
from flexcache.ids import BlockKey, OpId, OpKind, TaskKind

_KEYS_AT_ONCE = 256
_MAX_ASKED = 1024  # of one look-up: those behind most of the prompt count


class FoundTail(NamedTuple):
    """The tail behind a prompt's first ``position`` blocks, in the fastest tier that has it."""

    position: int
    tier: Tier
    tail: Tail


class AskedTail(NamedTuple):
    """A tail that a remote store may have.

    Attributes:
        key: Key of the block behind which it is, at ``position``.
        last_unit: Key of its last unit, which is written last.
        has_blocks: Whether all blocks before it are known to be cached.
    """

    position: int
    key: BlockKey
    last_unit: BlockKey
    num_units: int
    has_blocks: bool


class TailLoads:
    """Finds and loads tails over a cache's tiers. Arguments as for `LoadPlanner`."""

    def __init__(
        self, tiers: Tiers, op_ids: Iterator[OpId], chunk_blocks: int, shape: UnitShape
    ) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._op_ids = op_ids
        self._chunk_blocks = chunk_blocks
        self._shape = shape

    def last(self, keys: BlockKeys, start: int, stop: int) -> FoundTail | None:
        """Find the last position in ``(start, stop]`` that has a tail and all blocks before it.

        One probe per tier for each position between the end of the longest cached prefix and the
        tail.
        """
        available = [tier for tier in self._tiers if tier.name not in self._tiers.unavailable]
        if self._shape.dense_blocks:
            cached = max(tier.index.match(keys).num_blocks for tier in available)
            stop = min(stop, cached)
        available = [tier for tier in available if tier.tails.has_any(keys.root)]
        for high in range(stop, start, -_KEYS_AT_ONCE) if available else ():
            low = max(start, high - _KEYS_AT_ONCE)
            for position, key in zip(
                range(high, low, -1), reversed(keys.slice(low, high)), strict=True
            ):
                for tier in available:
                    tail = tier.tails.find(keys.root, key)
                    if tail is not None:
                        return FoundTail(position, tier, tail)
        return None

    def unknown(self, keys: BlockKeys, stop: int, now: float) -> list[AskedTail]:
        """Return the tails to ask the remote store for, the last position first.

        Those behind the last one that is known, except those known to be missing.
        """
        remote = self._tiers.remote
        assert remote is not None
        known = self.last(keys, 0, stop)
        start = 0 if known is None else known.position
        start = max(start, stop - _MAX_ASKED)
        cached = stop
        if self._shape.dense_blocks:
            cached = max(tier.index.match(keys).num_blocks for tier in self._tiers)
        tails = []
        for position, key in zip(
            range(stop, start, -1), reversed(keys.slice(start, stop)), strict=True
        ):
            count = self._shape.tail_units(position)
            last_unit = last_tail_key(key, count)
            if not remote.is_absent(keys.root, last_unit, now):
                tails.append(AskedTail(position, key, last_unit, count, position <= cached))
        return tails

    def begin(self, plan: Plan, found: FoundTail) -> None:
        """Keep the tail in place for a plan whose blocks are planned next."""
        position, tier, tail = found
        tier.pin_tail(tail)
        plan.tail = PlannedTail(position, tail.key, tail.units, pins=[(tier, tail)])

    def add(self, plan: Plan, keys: BlockKeys, found: FoundTail) -> bool:
        """Load the tail, after `begin`. False if the host tier has no room to stage it."""
        planned, tier = plan.tail, found.tier
        assert planned is not None
        count = len(found.tail.units)
        is_use = plan.kind is TaskKind.GET  # a prefetch may be for nothing
        tier.use_tail(found.tail, is_use=is_use)
        if tier is not self._host:
            if not self._host.is_tail_in_flight(keys.root, planned.key, count):
                planned.staging = self._host.reserve_tail(keys.root, planned.key, count)
            else:  # another task is loading it
                planned.staging = self._host.reserve_private(keys.root, count)
            if planned.staging is None or len(planned.staging) < count:
                return False
            if not is_use:
                planned.staging.used_s = np.array([found.tail.used])
            planned.units = planned.staging.blocks.copy()
        if plan.kind is TaskKind.GET:
            planned.num_copied = count
        plan.sources.setdefault(tier.name, 0 if plan.has_dense else plan.num_blocks)
        for chunk in chunks(0, count, self._chunk_blocks):
            self._add_chunk(plan, planned, tier, found.tail.units, chunk)
        return True

    def _add_chunk(
        self, plan: Plan, planned: PlannedTail, tier: Tier, at_tier: BlockIds, chunk: range
    ) -> None:
        """Load some of the tail's units to the host tier, if they are below, and to the GPU."""
        first, landing = TAIL_FIRST + chunk.start, planned.units[chunk.start : chunk.stop]
        depends_on = []
        if tier is not self._host:
            source = at_tier[chunk.start : chunk.stop]
            names = planned.names(tier, plan.root, chunk) if isinstance(tier, RemoteTier) else None
            op = next(self._op_ids)
            plan.graph.add(op, LOAD_OP[tier.name], first, source, landing, names=names)
            depends_on.append(op)
        if plan.kind is TaskKind.GET:
            upload = next(self._op_ids)
            plan.graph.add(upload, OpKind.H2D, first, landing, None, depends_on)
