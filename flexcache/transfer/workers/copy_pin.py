"""Page-locking of the host pool: without it, the device cannot copy directly and copies are slow.

The pool is pinned when a rank attaches, a piece at a time, since the driver blocks other calls
while it registers one. A pool that cannot be pinned is used as it is: copies are correct but
several times slower, and the planner, which measures them, then loads only what still pays.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_driver import CudaDriver

logger = logging.getLogger(__name__)


class PinnedSegment:
    """A mapped segment as the device sees it. The context must be bound; see `CudaDriver.bind`.

    If the constructor raises, as it does only if ``after_each_step`` does, nothing stays pinned.

    Args:
        step: Approximate number of bytes to pin at a time.
        after_each_step: Called after each such piece.

    Attributes:
        starts: Start of each registered piece; empty if the segment is not pinned. A copy must
            not span two pieces, and no block does.
        is_reachable: Whether a kernel may use the segment's own addresses.
    """

    def __init__(
        self, driver: CudaDriver, segment: HostSegment, step: int,
        after_each_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._driver = driver
        self._registered: list[int] = []
        self.is_reachable = False
        try:
            self._pin(segment, step, after_each_step)
        except BaseException as error:
            done_gb = len(self._registered) * _whole_blocks(segment, step) / 1e9
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            log_event(
                logger,
                logging.WARNING,
                "host_pool_not_pinned",
                size_gb=segment.size / 1e9,
                pinned_gb=done_gb,
                error=error,
                effect="copies are slow",
                remedy="lower cpu_cache_gb; or check the container's memory limit (cgroup), the "
                "IOMMU settings, and on WSL how much memory Windows allows to be pinned",
            )
        self.starts: npt.NDArray[np.int64] = np.array(self._registered, np.int64)
        self.is_reachable = bool(self._registered) and all(map(self._is_seen, self._registered))

    def close(self) -> None:
        """Unpin. Copies must have ended. Never raises: failures are logged. Idempotent."""
        errors = []
        for start in self._registered:
            try:
                self._driver.unregister(start)
            except RuntimeError as error:  # go on with the other pieces
                errors.append(error)
        if errors:
            log_event(
                logger, logging.WARNING, "host_pool_still_pinned",
                pieces=f"{len(errors)} of {len(self._registered)}", error=errors[0],
                effect="its memory is not freed until this process ends",
            )  # fmt: skip
        self._registered = []
        self.starts = np.empty(0, np.int64)
        self.is_reachable = False

    def _pin(self, segment: HostSegment, step: int, after_each_step: Callable[[], None]) -> None:
        step = _whole_blocks(segment, step)
        end = segment.address + segment.size
        for start in range(segment.address, end, step):
            self._driver.register(start, min(step, end - start))
            self._registered.append(start)
            after_each_step()

    def _is_seen(self, start: int) -> bool:
        """Whether the device sees registered memory under the same address."""
        try:
            return self._driver.device_address(start) == start
        except RuntimeError:  # the device cannot map it; the copy engine can still copy it
            return False


def _whole_blocks(segment: HostSegment, step: int) -> int:
    """Round the step to whole blocks and whole pages: no page can be registered twice."""
    unit = math.lcm(segment.stride, mmap.PAGESIZE)
    return max(step // unit, 1) * unit
