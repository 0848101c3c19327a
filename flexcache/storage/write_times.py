"""Write times of SSD slots: the generation of a record is also the time at which it was written.

Of two records of one block the later one counts. Generations are microseconds since the epoch, or,
where records are written faster than that or the clock was set back, rise by one from the last. A
block that is written long after its last use has the time of that use. Pools of before have small
generations: their records count as decades old.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PER_SECOND = 1_000_000


def next_generation(last: int, wall_s: float) -> int:
    """Return the generation of the next record.

    Args:
        last: That of the last one.
        wall_s: Seconds since the epoch.
    """
    return max(last + 1, int(wall_s * _PER_SECOND))


def ages_s(generations: npt.NDArray[np.uint64], wall_s: float) -> npt.NDArray[np.float64]:
    """Return how long ago records were written, in seconds; 0 for times to come."""
    return np.maximum(wall_s - generations.astype(np.float64) / _PER_SECOND, 0.0)


def older(
    generations: npt.NDArray[np.int64], ages_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the generations of records whose blocks were last used that long before."""
    return np.maximum(generations - (ages_s * _PER_SECOND).astype(np.int64), 1)
