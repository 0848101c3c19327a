"""The host pool, page-locked: the device copies to and from it directly, or not at all quickly.

Pinned once when a rank attaches, a piece at a time, since the driver holds up other calls while it
registers one. A pool that cannot be pinned is used as it is: copies are right but several times
slower, and the planner, which measures them, then loads only what is still worth while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_driver import CudaDriver

logger = logging.getLogger(__name__)


class PinnedSegment:
    """A mapped segment as the device sees it. The context must be bound; see `CudaDriver.bind`.

    Args:
        step: Bytes to be pinned at a time, about.
        after_each_step: Called when so many more are.

    Attributes:
        starts: Where each registered piece starts; empty where the segment is not pinned. A copy
            must not reach over two of them, and no block lies across.
        is_reachable: Whether a kernel may use the segment's own addresses.
    """

    def __init__(
        self, driver: CudaDriver, segment: HostSegment, step: int,
        after_each_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._driver = driver
        step = max(step // segment.stride, 1) * segment.stride
        starts = range(segment.address, segment.address + segment.size, step)
        registered: list[int] = []
        try:
            for start in starts:
                size = min(step, segment.address + segment.size - start)
                driver.register(start, size)
                registered.append(start)
                after_each_step()
        except RuntimeError as error:
            self._unregister(registered)
            registered = []
            log_event(
                logger,
                logging.WARNING,
                "host_pool_not_pinned",
                size_gb=segment.size / 1e9,
                pinned_gb=(start - segment.address) / 1e9,
                error=error,
                effect="copies are slow",
                remedy="lower cpu_cache_gb, or raise the limit of locked memory (ulimit -l)",
            )
        self.starts: npt.NDArray[np.int64] = np.array(registered, np.int64)
        self.is_reachable = bool(registered) and all(
            driver.device_address(start) == start for start in registered
        )

    def close(self) -> None:
        """Unpin. Copies must have ended. Idempotent."""
        self._unregister(self.starts.tolist())
        self.starts = self.starts[:0]
        self.is_reachable = False

    def _unregister(self, starts: list[int]) -> None:
        for start in starts:
            self._driver.unregister(start)
