"""The sizes that ranks tell of their blocks before there is a cache.

No clock: time is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

TOLD_TTL_S = 3.0
"""What a rank has told counts for this long. Waiting ranks repeat Hello every 0.2 s."""
_MAX_RANKS = 4096


class RankSizes:
    """Bytes of a block by engine and rank."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], tuple[int, float]] = {}

    def tell(self, engine: str, rank: int, block_bytes: int, now: float) -> None:
        """A rank says Hello. The oldest of too many are forgotten."""
        self._told.pop((engine, rank), None)
        self._told[engine, rank] = block_bytes, now
        while len(self._told) > _MAX_RANKS:
            del self._told[next(iter(self._told))]

    def of(self, engine: str, ranks: Sequence[int], now: float) -> dict[int, int]:
        """Return the sizes that those of these ranks have told that still wait."""
        told = {rank: self._told.get((engine, rank), (0, 0.0)) for rank in ranks}
        return {
            r: size for r, (size, heard_s) in told.items() if size and now < heard_s + TOLD_TTL_S
        }
