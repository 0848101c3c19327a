"""Many small copies at once, by a kernel that reads and writes pinned host memory itself.

The copy engine works through its copies one by one, each queued by the CPU; below some tens of KiB
that costs more than moving the bytes. A kernel takes a table of copies and has many in flight, but
occupies multiprocessors while it runs. Each keeps 32 KiB in flight, but waits for a tile's loads
before it begins the next; the link's latency is about 80 KB (1.5 us at 55 GB/s). How many are
needed is measured.

    tile     8 copies x 4 KiB, as 512 threads x 4 accesses of 16 bytes
    program  takes every n-th tile of 8 copies (n programs), and processes them 4 KiB at a time

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
_RUNS_PER_LAUNCH = 65_536  # so that a table stays at 1.5 MiB of device memory


def takes(destinations: Addresses, sources: Addresses, sizes: Addresses) -> bool:
    """Whether the kernel supports these copies: they must be of whole, aligned words."""
    bits = np.bitwise_or.reduce(destinations | sources | sizes) if len(sizes) else 0
    return int(bits) % WORD_BYTES == 0


def copy_runs(
    destinations: Addresses, sources: Addresses, sizes: Addresses, device: torch.device,
    programs: int = PROGRAMS[0],
) -> None:  # fmt: skip
    """Queue the copies on the calling thread's current stream.

    Host addresses must be in pinned memory that the device sees under the same addresses, and
    all copies must satisfy `takes`. The tables' memory belongs to torch, which keeps it until the
    stream has used it.
    """
    for first in range(0, len(sizes), _RUNS_PER_LAUNCH):
        part = slice(first, first + _RUNS_PER_LAUNCH)
        count = len(sizes[part])
        staged = torch.empty((3, count), dtype=torch.int64, pin_memory=True)
        np.stack((destinations[part], sources[part], sizes[part]), out=staged.numpy())
        launch(staged.to(device, non_blocking=True), programs)


def launch(table: torch.Tensor, programs: int = PROGRAMS[0]) -> None:
    """Start the kernel on a table ``(3, n)`` of destinations, sources and sizes, n > 0."""
    count = table.shape[1]
    programs = min(programs, triton.cdiv(count, _RUNS_PER_TILE))
    copy_tiles[(programs,)](table, count, _RUNS_PER_TILE, _LANES_PER_TILE, num_warps=_WARPS)


# Not specialized, or each new class of numbers would compile the kernel again.
@triton.jit(do_not_specialize=["num_runs"])  # type: ignore[untyped-decorator]
def copy_tiles(table, num_runs, RUNS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    runs = tl.arange(0, RUNS)
    lanes = tl.arange(0, LANES)
    step = tl.num_programs(0) * RUNS
    for first in range(tl.program_id(0) * RUNS, num_runs, step):
        run = first + runs
        is_run = run < num_runs
        destination = tl.load(table + run, mask=is_run, other=0)
        source = tl.load(table + num_runs + run, mask=is_run, other=0)
        size = tl.load(table + 2 * num_runs + run, mask=is_run, other=0)
        to = tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), 16)[:, None]
        start_of = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)[:, None]
        num_lanes = (size // 8)[:, None]
        for start in range(0, tl.max(size // 8, axis=0), LANES):
            lane = start + lanes
            wanted = tl.max_constancy(lane[None, :] < num_lanes, [1, 2])
            words = tl.load(start_of + lane[None, :], mask=wanted)
            tl.store(to + lane[None, :], words, mask=wanted)
