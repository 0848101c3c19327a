"""Copies of a device op: addresses on the GPU and in the host segment, and sizes.

    op          unit 0                      unit 1
    host        [ block | block ]           [ block | block ]        blocks_per_unit = 2
    GPU           group 0, 7   group 1, 3     group 0, 8   -1        -1: not to be copied

A block consists of the segments that its group's layers have of it (`BlockLayout`). In the host
segment every block has as much room as the largest group needs; a smaller one fills its beginning.
A rank with several shards has the first shard of all blocks of a unit there, then the second, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.copier import PIECE_RUNS, Addresses, Runs
from flexcache.transfer.messages import Execute, groups_of, ids_of, unpack_ids


@dataclass(frozen=True, slots=True)
class _GroupCopies:
    """Addresses of the blocks of one group: a row for each block, a column for each segment."""

    layout: BlockLayout
    destinations: Addresses
    sources: Addresses

    def columns(self, columns: slice) -> Runs:
        destinations, sources = self.destinations[:, columns], self.sources[:, columns]
        sizes = np.empty(sources.shape, np.int64)
        sizes[:] = self.layout.sizes[columns]
        return Runs(destinations.ravel(), sources.ravel(), sizes.ravel())


@dataclass(slots=True)
class OpCopies:
    """An op's copies, which may be started in parts of some segments of all blocks."""

    message: Execute
    num_units: int
    """Blocks of the host segment."""
    num_blocks: int
    """GPU blocks to be copied."""
    groups: list[_GroupCopies]
    num_bytes: int = 0
    num_started: int = 0
    """Segments whose copies were taken; or copies, if all segments are taken together."""
    num_in_flight: int = 0
    """Pieces that were queued and have not landed."""
    is_over: bool = False
    """Whether no more of it will be queued."""
    failure: str | None = None
    began_s: float | None = None
    """When the copies of a gated load could begin, once they could."""
    _all: Runs | None = None
    _ends: Addresses | None = None

    def require_whole(self, num_blocks: int) -> None:
        """Raise `ValueError` unless these are all blocks of a load by layer."""
        if self.num_blocks != num_blocks:
            raise ValueError(
                f"{self.num_blocks} of {num_blocks} blocks cannot be loaded layer by layer"
            )

    def take(self, num_bytes: int) -> Runs:
        """Return the next copies of all segments: this many bytes and `PIECE_RUNS` copies at most,
        but at least one copy. Without more to take, `is_over`."""
        if self._all is None:
            if len(self.groups) == 1:
                self._all = self.groups[0].columns(slice(None))
            else:
                groups = [group.columns(slice(None)) for group in self.groups]
                self._all = Runs(*map(np.concatenate, zip(*groups, strict=True)))
            # Most ops are one piece: they need no sums of sizes.
            if self.num_bytes <= num_bytes and len(self._all.sizes) <= PIECE_RUNS:
                self.num_started, self.is_over = len(self._all.sizes), True
                return self._all
        if self._ends is None:
            self._ends = self._all.sizes.cumsum()
        first, ends = self.num_started, self._ends
        taken = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(ends.searchsorted(taken + num_bytes, side="right")))
        stop = min(stop, first + PIECE_RUNS)
        self.num_started, self.is_over = stop, stop >= len(ends)
        return self._all.part(slice(first, stop))

    def next_part(self, layout: BlockLayout, min_bytes: int) -> int:
        """Return the first end of a layer that makes the next part large enough, or the last. There
        must be one group, with this layout."""
        before = layout.by_layer.sizes.cumsum() - layout.by_layer.sizes
        ends = sorted(set(layout.layer_ends.values()))
        enough = before[self.num_started] + min_bytes / max(1, self.num_blocks)
        inner = (end for end in ends[:-1] if end > self.num_started and before[end] >= enough)
        return next(inner, ends[-1])

    def take_until(self, stop: int) -> Runs:
        """Return the copies of the next segments, up to ``stop``. There must be one group."""
        columns, self.num_started = slice(self.num_started, stop), stop
        [group] = self.groups
        return group.columns(columns)


class OpAddresses:
    """Turns the block lists of ops into addresses.

    Args:
        layouts: Of each group of the model; of all layers if it has no groups.
        blocks_per_unit: GPU blocks for each block of the host segment, where they are in sequence.
        may_skip: Whether -1 stands for a GPU block that is not to be copied.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        segment: HostSegment,
        blocks_per_unit: int = 1,
        may_skip: bool = False,
    ) -> None:
        self._layouts = layouts
        self._segment = segment
        self._blocks_per_unit = blocks_per_unit
        self._may_skip = may_skip
        self._room = max(layout.block_bytes // layout.num_shards for layout in layouts)
        """Bytes from one GPU block to the next in a shard of a unit."""

    def most_bytes(self, message: Execute) -> int:
        """Return how many bytes an op copies at most."""
        host = message.src if message.kind is OpKind.H2D else message.dst
        return len(unpack_ids(host)) * self._segment.stride

    def copies_of(self, message: Execute, *, by_layer: bool = False) -> OpCopies:
        """Return the copies of an op.

        Args:
            by_layer: In segments that end where layers end (`BlockLayout.by_layer`).

        Raises:
            ValueError: The op names blocks that do not exist, or lists that do not pair, or is none
                between the GPU and the host.
        """
        if message.kind not in (OpKind.H2D, OpKind.D2H):
            raise ValueError(f"this rank cannot execute {message.kind.value}")
        is_load = message.kind is OpKind.H2D
        src, dst = unpack_ids(message.src), unpack_ids(message.dst)
        gpu, host = (dst, src) if is_load else (src, dst)
        per_unit, num_units = self._blocks_per_unit, len(host)
        if len(gpu) != num_units * per_unit:
            raise ValueError(f"{len(gpu)} GPU blocks do not pair with {num_units} host blocks")
        _require_range("host", host, self._segment.num_blocks)
        starts = self._segment.address + host * self._segment.stride
        # Else each GPU block is one host block, in the same order.
        if self._may_skip or per_unit > 1:
            wanted = np.flatnonzero(gpu != -1) if self._may_skip else np.arange(len(gpu))
            gpu = gpu[wanted]
            starts = starts[wanted // per_unit] + wanted % per_unit * self._room
        op = OpCopies(message, num_units, len(gpu), [])
        for layout, blocks, rows in self._by_group(gpu):
            of_form = layout.by_layer if by_layer else layout
            on_gpu = of_form.gpu_addresses(blocks)
            on_host = of_form.host_addresses(starts[rows])
            pair = (on_gpu, on_host) if is_load else (on_host, on_gpu)
            op.groups.append(_GroupCopies(of_form, *pair))
            op.num_bytes += len(blocks) * layout.block_bytes
        return op

    def _by_group(
        self, gpu: Addresses
    ) -> Iterable[tuple[BlockLayout, Addresses, Addresses | slice]]:
        """Return each group's layout, the ids of its blocks, and where in the list they are."""
        # Names of blocks without groups are their ids.
        if len(self._layouts) == 1:
            _require_range("GPU", gpu, self._layouts[0].num_blocks)
            return [(self._layouts[0], gpu, slice(None))]
        found: list[tuple[BlockLayout, Addresses, Addresses | slice]] = []
        groups, ids = groups_of(gpu), ids_of(gpu)
        _require_range("group's", groups, len(self._layouts))
        for group in np.unique(groups).tolist():
            rows = np.flatnonzero(groups == group)
            _require_range("GPU", ids[rows], self._layouts[group].num_blocks)
            found.append((self._layouts[group], ids[rows], rows))
        return found


def _require_range(place: str, blocks: Addresses, count: int) -> None:
    """Raise `ValueError` unless all blocks are there."""
    # Ids come with a message: a wrong one would have others' memory read or overwritten.
    if len(blocks) and blocks.view(np.uint64).max() >= count:  # what is below 0 is above all
        raise ValueError(f"a {place} block lies outside of [0, {count})")
