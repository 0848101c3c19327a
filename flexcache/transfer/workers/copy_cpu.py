"""Scattered copies in host memory, for engines whose KV tensors live on a CPU.

Many small copies must not each take the interpreter lock: next to a busy thread every release and
re-acquisition costs up to a switch interval (5 ms), which was measured at 0.03 instead of 8 GB/s.
So all copies of an op are one compiled call without the lock (numba), or, without numba, calls
that never let go of it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind
from flexcache.logs import log_event
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_runs import merge_runs

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
CopyRuns = Callable[[Addresses, Addresses, Addresses], None]


class CpuCopier:
    """KV tensors in host memory: the copy is done when `start` returns."""

    def __init__(self) -> None:
        self._copy = load_copy_runs()

    def attach(
        self, segment: HostSegment, after_each_step: Callable[[], None] = lambda: None
    ) -> None:
        pass

    def fence(self) -> None:
        pass

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: object,
    ) -> None:  # fmt: skip
        self._copy(*merge_runs(destinations, sources, sizes))

    def close(self) -> None:
        pass


@cache
def load_copy_runs() -> CopyRuns:
    """The fastest available ``copy(destinations, sources, sizes)`` over flat address arrays."""
    try:
        from flexcache.transfer.workers.copy_streams import copy_runs
    except ImportError:
        log_event(
            logger, logging.INFO, "numba_missing", effect="copies hold the interpreter lock",
            remedy="pip install 'flexcache[cpu]'",
        )  # fmt: skip
        return _copy_with_ctypes
    return copy_runs


def _copy_with_ctypes(destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
    for destination, source, size in zip(
        destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        _memmove(destination, source, size)


_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)  # fmt: skip
