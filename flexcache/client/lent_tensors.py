"""KV tensors that a rank lends to the cache, and what it holds while a server may have it copy.

Tensors of different groups overlay each other, since a block of the engine's pool belongs to one
group at a time. So each group has a layout of its own, made from its layers' tensors alone, and a
block has the size of the largest group's:

    the engine's block 7    | layer 0, attention: 128 KiB     |    if a group of attention has it
                            | layer 1, state: 67 KiB |             if a group of states has it; the
                                                                   rest is padding, and not moved

In an engine with a pool for each group, every group counts its own blocks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral

import torch

from flexcache.errors import NoDirectPathError, UnsupportedLayoutError
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import Register, WelcomeRank
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import (
    BlockLayout,
    HeadShards,
    bytes_per_block,
    bytes_per_index,
    describe_kv_caches,
)
from flexcache.storage.pool_directory import DirectFiles, DirectFilesRef
from flexcache.transfer.copier import Copier, CopyPermit, open_copier
from flexcache.transfer.cuda_copier import show_life_during
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.direct.ops import DirectOps, open_direct_io

Tensors = Mapping[str, torch.Tensor]


class LentTensors:
    """The engine's paged KV tensors. See `KVTPClient.register_kv_caches`.

    Attributes:
        block_bytes: Bytes of a block on this rank.
        stream: The stream that was current when they were lent; None on a CPU.

    Raises:
        UnsupportedLayoutError: A tensor cannot be moved as whole blocks; names it.
        ValueError: ``groups`` do not fit the other arguments.
    """

    def __init__(
        self,
        kv_caches: Tensors,
        block_dim: int = 0,
        description: str = "",
        num_blocks: int | Sequence[int] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
        head_dim: int | None = None,
    ) -> None:
        if not kv_caches:
            raise UnsupportedLayoutError("kv_caches = {}: a rank must hold some of the model's KV")
        self._kv_caches = dict(kv_caches)
        self._block_dim = block_dim
        self._description = description
        self._head_dim = head_dim
        self._groups = None if groups is None else [self._select(names) for names in groups]
        held = [self._kv_caches] if self._groups is None else self._groups
        self._num_blocks = _counts(num_blocks, held)
        if self._num_blocks is not None:
            pairs = zip(held, self._num_blocks, strict=True)
            sizes = [bytes_per_block(each, count, block_dim) for each, count in pairs if each]
            self.block_bytes = max(sizes, default=0)
        elif groups is None:
            self.block_bytes = bytes_per_index(kv_caches, block_dim)
        else:
            raise ValueError("groups of layers need num_blocks")
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.current_stream(self.device) if on_gpu else None
        # A bad layout is refused by the call that lends it; the size is the server's to judge.
        self.layouts(self.block_bytes, 1 if groups is None else len(groups))

    @property
    def device(self) -> torch.device:
        return next(iter(self._kv_caches.values())).device

    def layouts(
        self, block_bytes: int, num_groups: int, num_shards: int = 1, apart: int = 0
    ) -> list[BlockLayout]:
        """Return how they hold blocks of this size, for each of the model's groups.

        Args:
            num_shards: Parts in which their heads are stored.
            apart: Bytes between these in a block of the cache.

        Raises:
            UnsupportedLayoutError: Their blocks have another size, or the layers other groups.
        """
        counts, shards = self._num_blocks, HeadShards(num_shards, self._head_dim, apart)
        if self._groups is None:  # a block of any group has bytes in all tensors
            of_all = counts[0] if counts else None
            return [self._describe(self._kv_caches, of_all, shards, block_bytes)] * num_groups
        if num_groups != len(self._groups):
            raise UnsupportedLayoutError(
                f"the layers are in {len(self._groups)} groups, but the model has {num_groups}"
            )
        if block_bytes != self.block_bytes:
            raise UnsupportedLayoutError(
                f"a block of the largest group has {self.block_bytes} bytes in the KV tensors, but "
                f"{block_bytes} in the cache: layers, heads, states or tokens per block do not "
                "agree"
            )
        assert counts is not None
        return [
            self._describe(tensors, count, shards)
            for tensors, count in zip(self._groups, counts, strict=True)
        ]

    def _describe(
        self, tensors: Tensors, num_blocks: int | None, shards: HeadShards,
        block_bytes: int | None = None,
    ) -> BlockLayout:  # fmt: skip
        if block_bytes is None:
            assert num_blocks is not None
            if not tensors:
                return BlockLayout.of_no_layer(num_blocks)
            block_bytes = bytes_per_block(tensors, num_blocks, self._block_dim)
        return describe_kv_caches(
            tensors, block_bytes, self._block_dim, self._description, num_blocks, shards
        )

    def _select(self, names: Sequence[str]) -> Tensors:
        missing = [name for name in names if name not in self._kv_caches]
        if missing:
            raise ValueError(f"layer {missing[0]} of a group has no KV tensor")
        return {name: self._kv_caches[name] for name in names}


def _counts(
    num_blocks: int | Sequence[int] | None, held: Sequence[Tensors]
) -> Sequence[int] | None:
    """Return the number of blocks for each group that the engine has. Raises `ValueError`."""
    if num_blocks is None:
        return None
    if isinstance(num_blocks, Integral):
        return [int(num_blocks)] * len(held)
    assert not isinstance(num_blocks, int)
    if len(num_blocks) != len(held):
        raise ValueError(f"num_blocks of {len(num_blocks)} groups, but there are {len(held)}")
    return num_blocks


def join_signatures(layouts: Sequence[BlockLayout]) -> str:
    """Return the signature of a rank's blocks: that of all groups if it is the same, or else the
    list of them."""
    signatures = [layout.signature for layout in layouts]
    return signatures[0] if len(set(signatures)) == 1 else " | ".join(signatures)


logger = logging.getLogger(__name__)


class Attachment:
    """Memory and worker of one registration; slots may be touched until `close`.

    Args:
        show_life: Called now and then, since attaching may take long.
        landed: An eventfd that wakes the rank's thread.
        keeps_loads: The rank ends loads without the server, which takes blocks in DRAM.

    Attributes:
        layout: Signature of the tensors' layout.
        registration: What the server has to know of it.
        wakes: Whether the rank's thread is woken when copies have landed; else it asks.
        fence: The engine's.

    Raises:
        UnsupportedLayoutError: The tensors do not hold the server's blocks.
    """

    def __init__(
        self, welcome: WelcomeRank, tensors: LentTensors, show_life: Callable[[], None],
        landed: int, keeps_loads: bool = False,
    ) -> None:  # fmt: skip
        block_bytes = welcome.block_bytes // welcome.blocks_per_unit
        num_shards = welcome.num_shards
        apart = welcome.segment.stride // num_shards
        layouts = tensors.layouts(block_bytes, welcome.num_groups, num_shards, apart)
        self.layout = join_signatures(layouts)
        num_blocks = max(layout.num_blocks for layout in layouts)
        with contextlib.ExitStack() as held:
            fence = Fence.open(welcome.fence)
            held.callback(fence.close)
            segment = HostSegment.open(welcome.segment)
            held.callback(segment.close)
            permit = CopyPermit(fence.words)
            copier = show_life_during(
                lambda: open_copier(tensors.device, permit, tensors.stream, landed), show_life
            )
            held.callback(copier.close)
            segment.map(show_life, node=copier.numa_node)
            copier.attach(segment, show_life)
            direct = None
            if welcome.direct is not None and not keeps_loads:
                direct = show_life_during(
                    partial(
                        _open_direct, welcome.direct, layouts[0], segment, tensors.device, copier,
                        permit, held,
                    ),
                    show_life,
                )  # fmt: skip
            self.registration = Register(self.layout, num_blocks, is_direct=direct is not None)
            self.worker = DeviceWorker(
                layouts, segment, copier, permit, welcome.blocks_per_unit, welcome.may_skip, direct
            )
            self.wakes = copier.wakes and direct is None
            held.callback(self.worker.close)
            fence.hold()
            self.fence = fence
            self._held = held.pop_all()

    def close(self, rank: int) -> None:
        """Wait for copies under way, and give all of it back. Failures are logged."""
        try:
            self._held.close()
        except Exception:
            log_event(logger, logging.ERROR, "rank_let_go_failed", exc_info=True, rank=rank)


def _open_direct(
    ref: DirectFilesRef, layout: BlockLayout, segment: HostSegment, device: torch.device,
    copier: Copier, permit: CopyPermit, held: contextlib.ExitStack,
) -> DirectOps | None:  # fmt: skip
    """Open the way past the host pool; None, with a line in the log, if there is none.

    Tensors in DRAM take it only if they must: it spares them nothing.
    """
    if ref.is_choice and device.type == "cpu":
        return None
    try:
        with contextlib.ExitStack() as opened:
            files = DirectFiles(ref)
            opened.callback(files.close)
            io = open_direct_io(device, copier, files.fds, segment.stride, permit)
            opened.callback(io.close)
            if io.through_host and ref.is_choice:  # the DRAM tier would keep the blocks as well
                raise NoDirectPathError(io.through_host)
            if io.through_host:
                log_event(
                    logger, logging.WARNING, "direct_path_through_host", reason=io.through_host,
                    effect="loads and stores are no faster than with a DRAM tier",
                    remedy="load nvidia-fs, or use ssd_past_dram = never and a DRAM tier",
                )  # fmt: skip
            held.push(opened.pop_all())
            return DirectOps(layout, files.locate, segment.stride, io, permit)
    except NoDirectPathError as error:
        level, effect = logging.INFO, "SSD through DRAM"
        if ref.is_writable:  # there is no DRAM tier, only a staging pool
            level, effect = logging.WARNING, "no more than eight chunks of a prompt are cached"
        log_event(logger, level, "no_direct_path", reason=error, effect=effect)
        return None
