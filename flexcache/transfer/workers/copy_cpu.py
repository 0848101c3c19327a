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
from flexcache.storage.host_pool import HostSegment

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]
CopyRuns = Callable[[Addresses, Addresses, Addresses], None]


class CpuCopier:
    """KV tensors in host memory: the copy is done when `start` returns."""

    def __init__(self) -> None:
        self._copy = load_copy_runs()

    def attach(self, segment: HostSegment) -> None:
        pass

    def fence(self) -> None:
        pass

    def start(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, kind: OpKind,
        after: object,
    ) -> None:  # fmt: skip
        self._copy(destinations, sources, sizes)

    def close(self) -> None:
        pass


@cache
def load_copy_runs() -> CopyRuns:
    """The fastest available ``copy(destinations, sources, sizes)`` over flat address arrays."""
    try:
        return _compile_with_numba()
    except ImportError:
        logger.info("numba is not installed: copies on the CPU hold the interpreter lock")
        return _copy_with_ctypes


def _copy_with_ctypes(destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
    for destination, source, size in zip(
        destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        _memmove(destination, source, size)


_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)  # fmt: skip


def _compile_with_numba() -> CopyRuns:
    import llvmlite.ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def memcpy(typing_context, destination, source, size):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = llvmlite.ir.IntType(8).as_pointer()
            cgutils.raw_memcpy(
                builder,
                builder.inttoptr(args[0], pointer),
                builder.inttoptr(args[1], pointer),
                args[2],
                1,
            )
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    array = types.Array(types.int64, 1, "C", readonly=True)

    @njit(types.void(array, array, array), nogil=True)
    def copy_runs(destinations, sources, sizes):  # type: ignore[no-untyped-def]
        for i in range(destinations.size):
            memcpy(destinations[i], sources[i], sizes[i])

    compiled: CopyRuns = copy_runs
    return compiled
