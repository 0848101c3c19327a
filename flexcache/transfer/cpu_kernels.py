"""Copies of long runs in host memory at the speed of one large memcpy, compiled with numba.

A memcpy of many megabytes bypasses the caches. One of 64 KiB does not, so it first reads what it
is about to overwrite: 6.8 instead of 11.3 GB/s on the machine where this was measured. Here every
long run bypasses the caches, as four streams, a quarter of the run each, which keeps more memory
requests in flight: one stream reached 8.9 GB/s, two 10.6, four 11.8. The beginning of the next run
is prefetched while one is copied: 11.5 instead of 9.6 GB/s with scattered runs of 16 KiB.

A processor takes a load for one that needs a store just before it if their addresses agree in the
lowest 12 bits, and waits. So a run whose destination lies a little behind its source, by these
bits, is copied from its end: 16 instead of 3.6 GB/s on an AMD EPYC, where each tensor of torch lies
64 bytes behind the beginning of a page. The C library's memcpy does the same.

The next reader of a copied block finds it in memory rather than in a cache. That costs less than
the copy gains, for ops of 64 KiB to 64 MiB (at 256 KiB it is the same).

Importing this module requires numba, and compiles the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from flexcache.errors import TaskRevokedError
from flexcache.ids import NUM_WORDS, WORD_BYTES
from flexcache.transfer.copier import PIECE_BYTES, Addresses, CopyPermit

_NUM_STREAMS = 4
_LINE = 64  # bytes of a cache line, and of a vector here; LLVM splits it on CPUs with shorter ones
_LINES_PER_STEP = 2  # of each stream
_STEP = _NUM_STREAMS * _LINES_PER_STEP * _LINE
_SHORTEST = 4 * _STEP  # shorter runs are left to memcpy
_ALIAS = 4096  # addresses that differ by multiples of it are mistaken for each other

_BYTES = ir.IntType(8).as_pointer()
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(_INT, _LINE // 8)
_COPY = types.void(types.int64, types.int64, types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(typing: Any, destination: Any, source: Any, size: Any) -> Any:
    """Copy with the C library's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination, source, size = arguments
        cgutils.raw_memcpy(
            builder,
            builder.inttoptr(destination, _BYTES),
            builder.inttoptr(source, _BYTES),
            size,
            1,
        )
        return context.get_dummy_value()

    return _COPY, generate


@intrinsic  # type: ignore[untyped-decorator]
def _stream(typing: Any, destination: Any, source: Any, size: Any) -> Any:
    """Copy past the caches. ``destination`` is line-aligned, ``size`` a multiple of `_STEP`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination, source, size = arguments
        quarter = builder.udiv(size, _INT(_NUM_STREAMS))
        step = _INT(_LINES_PER_STEP * _LINE)
        last = builder.sub(quarter, step)
        behind = builder.and_(builder.sub(destination, source), _INT(_ALIAS - 1))
        from_end = builder.and_(
            builder.icmp_unsigned(">", behind, _INT(0)),
            builder.icmp_unsigned("<", behind, _INT(_ALIAS // 2)),
        )
        past_caches = builder.module.add_metadata([ir.IntType(32)(1)])
        with cgutils.for_range_slice(builder, _INT(0), quarter, step, intp=_INT) as (done, _):
            at = builder.select(from_end, builder.sub(last, done), done)
            offsets = _offsets(builder, at, quarter)
            loaded = [
                builder.load(_vector_at(builder, source, offset), align=1) for offset in offsets
            ]
            for offset, value in zip(offsets, loaded, strict=True):
                store = builder.store(value, _vector_at(builder, destination, offset), align=_LINE)
                store.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return _COPY, generate


def _vector_at(builder: Any, base: Any, offset: Any) -> Any:
    return builder.inttoptr(builder.add(base, offset), _VECTOR.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def _begin_to_load(typing: Any, source: Any, size: Any) -> Any:
    """Prefetch the first lines of each stream of a run, and look up its pages."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, size = arguments
        quarter = builder.udiv(size, _INT(_NUM_STREAMS))
        flag = ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [_BYTES, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], form)
        for offset in _offsets(builder, _INT(0), quarter):
            address = builder.inttoptr(builder.add(source, offset), _BYTES)
            builder.call(prefetch, [address, flag(0), flag(3), flag(1)])  # to read, data
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _offsets(builder: Any, at: Any, quarter: Any) -> list[Any]:
    """Return the offsets of the lines that one step copies, ``at`` bytes into each quarter."""
    return [
        builder.add(at, builder.add(builder.mul(quarter, _INT(s)), _INT(line * _LINE)))
        for s in range(_NUM_STREAMS)
        for line in range(_LINES_PER_STEP)
    ]


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing: Any) -> Any:
    """Make stores that bypassed the caches visible before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def shared_word(typing: Any, address: Any) -> Any:
    """Load a word that another thread or process may write at any time, before what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT.as_pointer())
        return builder.load_atomic(pointer, "acquire", WORD_BYTES)

    return types.uint64(types.int64), generate


# Compiled again by each process: numba takes code on disk for current by the date of one source
# file, and after a change to another one a rank would copy for tasks that are revoked.
@njit  # type: ignore[untyped-decorator]
def _copy_run(destination: int, source: int, size: int) -> None:
    if size >= _SHORTEST:
        head = -destination % _LINE
        _memcpy(destination, source, head)
        body = (size - head) // _STEP * _STEP
        _stream(destination + head, source + head, body)
        done = head + body
        destination, source, size = destination + done, source + done, size - done
    _memcpy(destination, source, size)


@intrinsic  # type: ignore[untyped-decorator]
def _word(typing: Any, address: Any) -> Any:
    """Load a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _INT.as_pointer()))

    return types.int64(types.int64), generate


@cfunc(  # type: ignore[untyped-decorator]
    types.boolean(types.int64, types.int64, types.int64, types.int64, types.int64, types.uint64)
)
def _copy_table(
    destinations: int, sources: int, sizes: int, count: int, words: int, task_id: int
) -> bool:
    until_look = 0
    for at in range(0, count * WORD_BYTES, WORD_BYTES):
        if at + WORD_BYTES < count * WORD_BYTES:
            _begin_to_load(_word(sources + at + WORD_BYTES), _word(sizes + at + WORD_BYTES))
        destination, source, size = _word(destinations + at), _word(sources + at), _word(sizes + at)
        while size > 0:
            if until_look == 0:
                for word in range(NUM_WORDS):
                    if shared_word(words + word * WORD_BYTES) >= task_id:
                        _fence()
                        return False
                until_look = PIECE_BYTES
            length = min(size, until_look)
            _copy_run(destination, source, length)
            destination, source, size = destination + length, source + length, size - length
            until_look -= length
    _fence()
    return True


copy_table: Callable[[int, int, int, int, int, int], bool] = _copy_table.ctypes
"""`copy_runs` for compiled code: of tables at addresses and their length, for a task, until a word
of its permit revokes it. Returns whether all was copied."""


def copy_runs(
    destinations: Addresses, sources: Addresses, sizes: Addresses, permit: CopyPermit
) -> None:
    """Copy each run of ``sizes[i]`` bytes. Runs do not overlap. Needs no interpreter lock.

    Raises:
        TaskRevokedError: The permit was revoked, before the copy or during it.
    """
    destinations = np.ascontiguousarray(destinations, np.int64)
    sources = np.ascontiguousarray(sources, np.int64)
    sizes = np.ascontiguousarray(sizes, np.int64)
    if not copy_table(
        destinations.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
        permit.address, permit.task_id,
    ):  # fmt: skip
        raise TaskRevokedError
