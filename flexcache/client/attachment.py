"""What a rank holds while a server may have it copy KV."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial

import torch

from flexcache.client.lent_tensors import LentTensors, join_signatures
from flexcache.errors import NoDirectPathError
from flexcache.logs import log_event
from flexcache.protocol.fence import Fence
from flexcache.protocol.messages import Register, WelcomeRank
from flexcache.storage.direct_files import DirectFiles, DirectFilesRef
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.copier import Copier, CopyPermit, open_copier
from flexcache.transfer.cuda_copier import show_life_during
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.direct.ops import DirectOps, open_direct_io

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
        layouts = tensors.layouts(block_bytes, welcome.num_groups)
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
