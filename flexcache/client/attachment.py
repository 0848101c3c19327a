"""What a rank holds while a server may have it copy KV."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from flexcache.client.lent_tensors import LentTensors, join_signatures
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import WelcomeRank
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copier import open_copier
from flexcache.transfer.workers.device import DeviceWorker
from flexcache.transfer.workers.life import show_life_during
from flexcache.transfer.workers.permit import CopyPermit

logger = logging.getLogger(__name__)


class Attachment:
    """Memory and worker of one registration; slots may be touched until `close`.

    Args:
        show_life: Called now and then, since attaching may take long.

    Attributes:
        layout: Signature of the tensors' layout.
        num_blocks: Blocks of the engine; the most, if its groups have pools of their own.

    Raises:
        UnsupportedLayoutError: The tensors do not hold the server's blocks.
    """

    def __init__(
        self, welcome: WelcomeRank, tensors: LentTensors, show_life: Callable[[], None]
    ) -> None:
        block_bytes = welcome.block_bytes // welcome.blocks_per_unit
        layouts = tensors.layouts(block_bytes, welcome.num_groups)
        self.layout = join_signatures(layouts)
        self.num_blocks = max(layout.num_blocks for layout in layouts)
        with contextlib.ExitStack() as held:
            fence = Fence.open(welcome.fence)
            held.callback(fence.close)
            segment = HostSegment.open(welcome.segment)
            held.callback(segment.close)
            permit = CopyPermit(fence.words)
            copier = show_life_during(
                lambda: open_copier(tensors.device, permit, tensors.stream), show_life
            )
            segment.map(show_life, node=copier.numa_node)
            self.worker = DeviceWorker(
                layouts, segment, copier, permit, welcome.blocks_per_unit, welcome.may_skip
            )
            held.callback(self.worker.close)
            copier.attach(segment, show_life)
            fence.hold()
            self._held = held.pop_all()

    def close(self, rank: int) -> None:
        """Wait for copies under way, and give all of it back. Failures are logged."""
        try:
            self._held.close()
        except Exception:
            log_event(logger, logging.ERROR, "rank_let_go_failed", exc_info=True, rank=rank)
