"""Write times of SSD slots: the generation of a record is also the time at which it was written.

Generations only have to rise. They are counted in microseconds since the epoch, or, where records
are written faster than that or the clock was set back, by one from the last. Pools of before have
small ones: when their records were written is unknown.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PER_SECOND = 1_000_000
_FIRST_TIME = 1_600_000_000 * _PER_SECOND
"""In September 2020: smaller generations are counts."""


def next_generation(last: int, wall_s: float) -> int:
    """Return the generation of the next record.

    Args:
        last: That of the last one.
        wall_s: Seconds since the epoch.
    """
    return max(last + 1, int(wall_s * _PER_SECOND))


def ages_s(generations: npt.NDArray[np.uint64], wall_s: float) -> npt.NDArray[np.float64]:
    """Return how long ago records were written, in seconds; 0 where that is unknown."""
    ages = wall_s - generations.astype(np.float64) / _PER_SECOND
    ages[generations < _FIRST_TIME] = 0.0
    return np.maximum(ages, 0.0)
