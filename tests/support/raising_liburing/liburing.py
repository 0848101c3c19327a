"""The installed `liburing` behind the interface of its 2026 generation, which raises errors.

That generation's wheels need a CPU with AVX-512; this runs everywhere. Its directory goes in front
of the import path. It offers what FlexCache uses and nothing else, so that a call which only the
older generation knows fails.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def _installed() -> Any:
    if __name__ != "liburing":
        return importlib.import_module("liburing")
    here, this = str(Path(__file__).parent), sys.modules.pop("liburing")
    sys.path.remove(here)
    try:
        return importlib.import_module("liburing")
    finally:
        sys.path.insert(0, here)
        sys.modules["liburing"] = this


_liburing = _installed()
if not hasattr(_liburing, "io_uring"):
    raise ImportError("the installed liburing is of the 2026 generation already")

Ring, Iovec = _liburing.io_uring, _liburing.iovec
io_uring_queue_init = _liburing.io_uring_queue_init
io_uring_queue_exit = _liburing.io_uring_queue_exit
io_uring_register_eventfd = _liburing.io_uring_register_eventfd
io_uring_submit = _liburing.io_uring_submit
io_uring_sq_ready = _liburing.io_uring_sq_ready
io_uring_sqe_set_data64 = _liburing.io_uring_sqe_set_data64
io_uring_cq_advance = _liburing.io_uring_cq_advance


def trap_error(number: int) -> int:
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number


class CQE:
    def __init__(self, entry: Any) -> None:
        self._entry = entry

    @property
    def user_data(self) -> int:
        return int(self._entry.user_data)

    @property
    def res(self) -> int:
        return trap_error(self._entry.res)


class Cqe:
    def __init__(self) -> None:
        self.entries = _liburing.io_uring_cqe()

    def __getitem__(self, index: int) -> CQE:
        return CQE(self.entries[index])


def io_uring_get_sqe(ring: Any) -> Any:
    return _liburing.io_uring_get_sqe(ring) or None


def io_uring_prep_readv(sqe: Any, fd: int, iovec: Any, offset: int = 0) -> None:
    _liburing.io_uring_prep_readv(sqe, fd, iovec, offset)


def io_uring_prep_writev(sqe: Any, fd: int, iovec: Any, offset: int = 0) -> None:
    _liburing.io_uring_prep_writev(sqe, fd, iovec, len(iovec), offset)


def io_uring_peek_cqe(ring: Any, cqe: Cqe) -> int:
    return trap_error(_liburing.io_uring_peek_cqe(ring, cqe.entries))
