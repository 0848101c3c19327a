"""Page-locking of the host pool: without it, the device cannot copy directly and copies are slow.

The pool is pinned when a rank attaches, a piece at a time, since the driver blocks other calls
while it registers one. Where it cannot be pinned, or not all of it, it is used as it is: copies are
correct but several times slower, and the planner, which measures them, then loads only what still
pays.

    | piece | piece | given back | never pinned ... |
                    end
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_driver import CudaDriver

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
Runs = tuple[Addresses, Addresses, Addresses]
"""Destinations, sources and sizes of copies."""


class PinnedSegment:
    """A mapped segment as the device sees it. The context must be bound; see `CudaDriver.bind`.

    If the constructor raises, as it does only if ``after_each_step`` does, nothing stays pinned.

    Args:
        step: Approximate number of bytes to pin at a time.
        after_each_step: Called after each such piece.

    Attributes:
        starts: Start of each registered piece, and of the rest if there is one; empty if nothing is
            pinned. A copy must not span two of them, and no block does.
        end: Address up to which the segment is pinned.
        is_whole: Whether all of it is pinned.
        is_partial: Whether some of it is pinned and some is not.
        is_reachable: Whether a kernel may use the pinned part's own addresses.
    """

    def __init__(
        self, driver: CudaDriver, segment: HostSegment, step: int,
        after_each_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._driver = driver
        self._registered: list[int] = []
        self.end = segment.address
        self.is_reachable = False
        refusal: RuntimeError | None = None
        try:
            refusal = self._pin(segment, step, after_each_step)
        except BaseException:
            self.close()
            raise
        if self._registered:
            step = _whole_blocks(segment, step)
            self.end += min(len(self._registered) * step, segment.size)
        self.is_whole = self.end == segment.address + segment.size
        self.is_partial = bool(self._registered) and not self.is_whole
        starts = [*self._registered, self.end] if self.is_partial else self._registered
        self.starts: Addresses = np.array(starts, np.int64)
        self.is_reachable = bool(self._registered) and all(map(self._is_seen, self._registered))
        if refusal is not None:
            log_event(
                logger,
                logging.WARNING,
                "host_pool_partly_pinned" if self._registered else "host_pool_not_pinned",
                size_gb=segment.size / 1e9,
                pinned_gb=(self.end - segment.address) / 1e9,
                error=refusal,
                effect="copies of the other blocks are slow"
                if self._registered
                else "copies are slow",
                remedy="lower cpu_cache_gb; or check the container's memory limit (cgroup), the "
                "IOMMU settings, and on WSL how much memory Windows allows to be pinned",
            )

    def close(self) -> None:
        """Unpin. Copies must have ended. Never raises: failures are logged. Idempotent."""
        registered, self._registered = self._registered, []
        self.starts = np.empty(0, np.int64)
        self.is_reachable = False
        self._unpin(registered)

    def split(self, runs: Runs, on_host: int) -> tuple[Runs, Runs]:
        """Split off the copies of what is not pinned, if only a part is.

        Args:
            on_host: Which of the runs' addresses are the segment's.
        """
        if not self.is_partial:
            none: Addresses = np.empty(0, np.int64)
            return runs, (none, none, none)
        pinned = runs[on_host] < self.end
        (to, start, sizes), rest = runs, ~pinned
        return (to[pinned], start[pinned], sizes[pinned]), (to[rest], start[rest], sizes[rest])

    def _unpin(self, starts: Sequence[int]) -> None:
        errors = []
        for start in starts:
            try:
                self._driver.unregister(start)
            except RuntimeError as error:  # go on with the other pieces
                errors.append(error)
        if errors:
            log_event(
                logger, logging.WARNING, "host_pool_still_pinned",
                pieces=f"{len(errors)} of {len(starts)}", error=errors[0],
                effect="its memory is not freed until this process ends",
            )  # fmt: skip

    def _pin(
        self, segment: HostSegment, step: int, after_each_step: Callable[[], None]
    ) -> RuntimeError | None:
        """Pin piece by piece; return why a piece was refused, if one was.

        The piece before it is then given back, since the engine needs memory that it can pin, too.
        """
        step = _whole_blocks(segment, step)
        end = segment.address + segment.size
        for start in range(segment.address, end, step):
            try:
                self._driver.register(start, min(step, end - start))
            except RuntimeError as error:
                self._unpin(self._registered[-1:])
                del self._registered[-1:]
                return error
            self._registered.append(start)
            after_each_step()
        return None

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
