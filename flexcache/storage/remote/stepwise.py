"""Look-ups in stores that are asked for one name at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import takewhile

from flexcache.storage.remote.base import Outcome, Presence, RemoteStore, Status

_FIRST_LOOK = 8
"""Number of names in the first step; each further one doubles it, until a name is missing."""


class StepwiseStore(RemoteStore):
    """Looks names up in growing steps: most prompts are missing, or present over a long prefix."""

    def count_present(self, names: Sequence[str], deadline: float) -> Presence:
        for start, found in self._steps(names, deadline):
            gapless = sum(1 for _ in takewhile(lambda o: o.status is Status.OK, found))
            if gapless < len(found):
                end = found[gapless]
                error = end.reason if end.status is Status.FAILED else None
                return Presence(start + gapless, error)
        return Presence(len(names))

    def first_present(self, names: Sequence[str], deadline: float) -> int:
        for start, found in self._steps(names, deadline):
            for number, outcome in enumerate(found, start):
                if outcome.status is Status.OK:
                    return number
        return len(names)

    @abstractmethod
    def _look(self, names: Sequence[str], deadline: float) -> list[Outcome]:
        """Return for each name whether it exists."""

    def _steps(self, names: Sequence[str], deadline: float) -> Iterator[tuple[int, list[Outcome]]]:
        start, step = 0, _FIRST_LOOK
        while start < len(names):
            found = self._look(names[start : start + step], deadline)
            yield start, found
            start += step
            step *= 2
