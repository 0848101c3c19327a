"""Work on the rows of large arrays, in chunks that stay in the processor's cache, on several cores.

Numpy gives the interpreter lock back in calls that take long enough for that to pay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

CHUNK_ROWS = 1 << 12
_MAX_THREADS = 4


def for_chunks(count: int, work: Callable[[slice], Result]) -> list[Result]:
    """Call ``work`` for every chunk of ``count`` rows; return what it returned, in order.

    Calls may overlap, so each must write to its own rows only.
    """
    chunks = [slice(at, min(at + CHUNK_ROWS, count)) for at in range(0, count, CHUNK_ROWS)]
    num_threads = min(_MAX_THREADS, len(chunks), os.cpu_count() or 1)
    if num_threads < 2:
        return [work(chunk) for chunk in chunks]
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(work, chunks))
