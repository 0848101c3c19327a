"""An engine's KV tensors, and what a rank holds while a server may have it copy them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import WelcomeRank
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import (
    BlockLayout,
    bytes_per_block,
    bytes_per_index,
    describe_kv_caches,
)
from flexcache.transfer.workers.copier import open_copier
from flexcache.transfer.workers.device import DeviceWorker
from flexcache.transfer.workers.life import show_life_during
from flexcache.transfer.workers.permit import CopyPermit


class LentTensors:
    """The engine's paged KV tensors. See `KVTPClient.register_kv_caches`.

    Raises:
        UnsupportedLayoutError: A tensor cannot be moved as whole blocks; names it.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        block_dim: int,
        layout_description: str,
        num_blocks: int | None,
    ) -> None:
        if num_blocks is None:
            self.block_bytes = bytes_per_index(kv_caches, block_dim)
        else:
            self.block_bytes = bytes_per_block(kv_caches, num_blocks, block_dim)
        # A bad layout is refused by the call that lends it; the size is the server's to judge.
        describe_kv_caches(kv_caches, self.block_bytes, block_dim, num_blocks=num_blocks)
        self._num_blocks = num_blocks
        self._kv_caches = dict(kv_caches)
        self._block_dim = block_dim
        self._layout_description = layout_description

    @property
    def device(self) -> torch.device:
        return next(iter(self._kv_caches.values())).device

    def layout(self, block_bytes: int) -> BlockLayout:
        """How they hold blocks of this size."""
        return describe_kv_caches(
            self._kv_caches, block_bytes, self._block_dim, self._layout_description,
            self._num_blocks,
        )  # fmt: skip


class Attachment:
    """Memory and worker of one registration; slots may be touched until `close`.

    Args:
        show_life: Called now and then, since attaching may take long.
    """

    def __init__(
        self,
        welcome: WelcomeRank,
        layout: BlockLayout,
        device: torch.device,
        show_life: Callable[[], None],
    ) -> None:
        with contextlib.ExitStack() as held:
            fence = Fence.open(welcome.fence)
            held.callback(fence.close)
            segment = HostSegment.open(welcome.segment)
            held.callback(segment.close)
            segment.map(show_life)
            permit = CopyPermit(fence.words)
            copier = show_life_during(lambda: open_copier(device, permit), show_life)
            self.worker = DeviceWorker(
                layout, segment, copier, permit, welcome.blocks_per_unit, welcome.may_skip
            )
            held.callback(self.worker.close)
            copier.attach(segment, show_life)
            fence.hold()
            self._held = held.pop_all()

    def close(self) -> None:
        """Wait for copies under way, and give all of it back, whatever fails."""
        self._held.close()
