"""What caches call the blocks that they have below DRAM, so that they can be asked to load them.

Kept only for sources that can be asked. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexcache.errors import InternalError
from flexcache.router.holders import Holder
from flexcache.router.workers import Tier


class DiskNames:
    """Names by key, the reverse of `BlockNames`.

    Attributes:
        sources: Those whose names are kept, from the next events on.
    """

    def __init__(self) -> None:
        self.sources: frozenset[str] = frozenset()
        self._names: dict[Holder, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def keep(self, sources: Iterable[str]) -> None:
        """Keep the names of these sources, and of no others."""
        self.sources = frozenset(sources)
        for holder in [each for each in self._names if each.source not in self.sources]:
            del self._names[holder]

    def stored(self, holder: Holder, names: Sequence[int], keys: Sequence[int]) -> None:
        """Note that a holder has blocks whose names and keys are known."""
        if holder.tier is Tier.DISK and holder.source in self.sources:
            self._names.setdefault(holder, {}).update(zip(keys, names, strict=False))

    def removed(self, holder: Holder, keys: Iterable[int]) -> None:
        """Note that a holder no longer has these blocks."""
        names = self._names.get(holder)
        if names is not None:
            for key in keys:
                names.pop(key, None)

    def forget(self, holder: Holder) -> None:
        """Drop what a holder had."""
        self._names.pop(holder, None)

    def find(self, holder: Holder, key: int) -> int | None:
        """Return the name by which a holder knows a block; None if it is not known."""
        return self._names.get(holder, {}).get(key)

    def check(self) -> None:
        """Raise `InternalError` if names are kept that nothing asks for."""
        for holder in self._names:
            if holder.tier is not Tier.DISK or holder.source not in self.sources:
                raise InternalError(f"names of {holder} are kept")
