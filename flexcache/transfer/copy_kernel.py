"""Copy kernel: many small copies at once, read from and written to pinned host memory.

The copy engine works through its copies one by one, each queued by the CPU; below some tens of KiB
that costs more than moving the bytes. A kernel takes a table of copies and has many in flight, but
occupies multiprocessors while it runs. Each keeps 32 KiB in flight, but waits for a tile's loads
before it begins the next; the link's latency is about 80 KB (1.5 us at 55 GB/s). How many are
needed is measured.

    tile     8 copies x 4 KiB, as 512 threads x 4 accesses of 16 bytes
    program  takes every n-th tile of 8 copies (n programs), and processes them 4 KiB at a time

The kernel reads its table where the CPU wrote it, first of all: each program takes its own lines to
device memory, all at once, since each wait for the link is as long as it takes to copy a tile. If a
copy engine sent the table, that would come behind the other copies to the device: a store would
begin when the loads before it have landed.

Needs Triton, which torch installs for CUDA. On an H200 four programs reach 50 GB/s with runs of
8 KiB and more; one contiguous copy reaches 55.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Addresses = npt.NDArray[np.int64]

WORD_BYTES = 16
PROGRAMS = (4, 8, 12)
"""Numbers of programs worth measuring."""
_RUNS_PER_TILE = 8
_LANES_PER_TILE = 512  # of 8 bytes each; two make an access
_WARPS = 16
MIN_RUNS = PROGRAMS[0] * _RUNS_PER_TILE  # fewer leave programs without work


def takes(destinations: Addresses, sources: Addresses, sizes: Addresses) -> bool:
    """Whether the kernel supports these copies: they must be of whole, aligned words."""
    # Other data goes to the copy engine, so there is no code for remainders here.
    bits = np.bitwise_or.reduce(destinations | sources | sizes) if len(sizes) else 0
    return int(bits) % WORD_BYTES == 0


def launch(table: torch.Tensor, scratch: torch.Tensor, programs: int = PROGRAMS[0]) -> None:
    """Start the kernel on a table ``(3, n)`` of destinations, sources and sizes, n > 0, on the
    calling thread's current stream.

    Host addresses must be in pinned memory that the device sees under the same addresses, as is the
    table itself, and all copies must satisfy `takes`. The table is left alone until the kernel ran.

    Args:
        scratch: As large, in device memory. Not used by other streams.
    """
    count = table.shape[1]
    grid = (min(programs, triton.cdiv(count, _RUNS_PER_TILE)),)
    copy_tiles[grid](table, scratch, count, _RUNS_PER_TILE, _LANES_PER_TILE, num_warps=_WARPS)


# Not specialized, or each new class of numbers would compile the kernel again.
@triton.jit(do_not_specialize=["num_runs"])  # type: ignore[untyped-decorator]
def copy_tiles(table, scratch, num_runs, RUNS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    runs = tl.arange(0, RUNS)
    lanes = tl.arange(0, LANES)
    step = tl.num_programs(0) * RUNS
    begin = tl.program_id(0) * RUNS
    for first in range(begin, num_runs, step * (LANES // RUNS)):
        own = first + lanes // RUNS * step + lanes % RUNS
        for row in tl.static_range(3):
            line = tl.load(table + row * num_runs + own, mask=own < num_runs)
            tl.store(scratch + row * num_runs + own, line, mask=own < num_runs)
    tl.debug_barrier()  # the program's threads read what others of them wrote
    for first in range(begin, num_runs, step):
        run = first + runs
        is_run = run < num_runs
        destination = tl.load(scratch + run, mask=is_run, other=0)
        source = tl.load(scratch + num_runs + run, mask=is_run, other=0)
        size = tl.load(scratch + 2 * num_runs + run, mask=is_run, other=0)
        to = tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), 16)[:, None]
        start_of = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)[:, None]
        num_lanes = (size // 8)[:, None]
        for start in range(0, tl.max(size // 8, axis=0), LANES):
            lane = start + lanes
            wanted = tl.max_constancy(lane[None, :] < num_lanes, [1, 2])
            words = tl.load(start_of + lane[None, :], mask=wanted)
            tl.store(to + lane[None, :], words, mask=wanted)
