"""Scattered copies in host memory, for engines whose KV tensors live on a CPU.

Many small copies must not each take the interpreter lock: next to a busy thread every release and
re-acquisition costs up to a switch interval (5 ms); measured throughput was 0.03 instead of 8 GB/s.
So all copies of an op are one compiled call without the lock (numba) or, without numba, calls that
never release it; and of several ops all are queued for a thread that needs no lock between them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flexcache.errors import TaskRevokedError
from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_queue import CopyQueue
from flexcache.transfer.workers.copy_runs import merge_runs
from flexcache.transfer.workers.permit import PIECE_BYTES, CopyPermit

if TYPE_CHECKING:
    from flexcache.transfer.workers.copier import Fence

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
CopyRuns = Callable[[Addresses, Addresses, Addresses, CopyPermit], None]


class CpuCopier:
    """KV tensors in host memory. A copy is done when `start` returns, if it is urgent or the only
    one; others are queued (`copy_queue`), once the queue is ready.

    Args:
        permit: Checked before each piece of a copy.
        landed: An eventfd that is written when queued copies have ended; None to queue none.
    """

    def __init__(self, permit: CopyPermit | None = None, landed: int | None = None) -> None:
        self._permit = permit or CopyPermit()
        self._copy = load_copy_runs()
        self._queue: CopyQueue | None = None
        if landed is not None and self._copy is not _copy_with_ctypes:
            self._queue = CopyQueue(self._permit, landed)
        self.numa_node = None
        self.wakes = self._queue is not None

    def attach(
        self, segment: HostSegment, after_each_step: Callable[[], None] = lambda: None
    ) -> None:
        pass

    def fence(self) -> None:
        pass

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: object, urgent: bool = False, alone: bool = False,
    ) -> Fence | None:  # fmt: skip
        """Copy or queue everything.

        Raises:
            TaskRevokedError: The permit was revoked during the copy.
        """
        runs = merge_runs(destinations, sources, sizes)
        if not urgent and not alone and (queue := self.queue(kind)):
            return queue.add(_lane_of(kind), *runs, self._permit.task_id)
        self._copy(*runs, self._permit)
        return None

    def may_start(self, kind: OpKind, after: object) -> bool:
        return self._queue is None or self._queue.has_room(_lane_of(kind))

    def queue(self, kind: OpKind) -> CopyQueue | None:
        queue = self._queue
        if queue is None or not queue.is_ready() or not queue.has_room(_lane_of(kind)):
            return None
        return queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


def _lane_of(kind: OpKind) -> int:
    """Return the lane of the queue: loads go first."""
    return 0 if kind is OpKind.H2D else 1


@cache
def load_copy_runs() -> CopyRuns:
    """Load the fastest available ``copy(destinations, sources, sizes, permit)`` of addresses."""
    try:
        from flexcache.transfer.workers.copy_streams import copy_runs
    except Exception as error:  # of a compiler, which may raise any class
        event = "numba_missing" if isinstance(error, ModuleNotFoundError) else "numba_failed"
        log_event(
            logger, logging.INFO if event == "numba_missing" else logging.WARNING, event,
            reason=error, effect="copies hold the interpreter lock", remedy="pip install '.[cpu]'",
        )  # fmt: skip
        return _copy_with_ctypes

    def copy_compiled(
        destinations: Addresses, sources: Addresses, sizes: Addresses, permit: CopyPermit
    ) -> None:
        if not copy_runs(destinations, sources, sizes, permit.address, permit.task_id):
            raise TaskRevokedError

    return copy_compiled


def _copy_with_ctypes(
    destinations: Addresses, sources: Addresses, sizes: Addresses, permit: CopyPermit
) -> None:
    until_look = 0
    for destination, source, size in zip(
        destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        done = 0
        while done < size:
            if until_look == 0:
                permit.check()
                until_look = PIECE_BYTES
            length = min(size - done, until_look)
            _memmove(destination + done, source + done, length)
            done += length
            until_look -= length


_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)  # fmt: skip
