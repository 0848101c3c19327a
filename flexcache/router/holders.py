"""Holders of blocks, and sets of holders as bit masks.

A holder is one tier of one source of events. Forgetting a holder takes its bit out of ``alive``, at
once, however many blocks carry it; the bit can be given to another holder after a sweep has cleared
it from all blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.errors import InternalError
from flexcache.router.workers import Tier

Mask = int
"""A set of holders: one bit each."""

_MAX_CACHED = 1 << 16


class Holder(NamedTuple):
    """Where blocks are.

    Attributes:
        source: Endpoint of the publisher, or another unique name.
        rank: Data-parallel rank that the publisher gives; None: it has none.
    """

    source: str
    tier: Tier
    rank: int | None = None


class Holders:
    """Gives bits to holders and computes masks."""

    def __init__(self) -> None:
        self.alive: Mask = 0
        """Bits of all holders that are not forgotten."""
        self.version = 0
        """Changes when a holder gets a bit or loses it."""
        self._bits: dict[Holder, int] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        """Retired bits that the sweep in progress clears."""
        self._num_bits = 0
        self._masks: dict[Mask, Mask] = {}
        """One object for equal masks, to save memory."""
        self._positions: dict[Mask, npt.NDArray[np.intp]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._bits

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._bits)

    @property
    def num_bits(self) -> int:
        """Positions of bits are below this."""
        return self._num_bits

    @property
    def free_bits(self) -> Mask:
        """Bits that no holder has and no block may carry."""
        return sum(1 << bit for bit in self._free)

    @property
    def has_retired(self) -> bool:
        """Whether blocks may carry bits that are no longer alive."""
        return bool(self._retired or self._sweeping)

    def bit(self, holder: Holder) -> int | None:
        """Return the position of a holder's bit; None if it has none."""
        return self._bits.get(holder)

    def make_bit(self, holder: Holder) -> int:
        """Return the position of a holder's bit, which it gets if it has none."""
        bit = self._bits.get(holder)
        if bit is None:
            if not self._free:
                self._free.append(self._num_bits)
                self._num_bits += 1
            bit = self._bits[holder] = self._free.pop()
            self.alive |= 1 << bit
            self.version += 1
        return bit

    def retire(self, holder: Holder) -> int | None:
        """Take a holder's bit away; returns its position."""
        bit = self._bits.pop(holder, None)
        if bit is not None:
            self.alive &= ~(1 << bit)
            self._retired.append(bit)
            self.version += 1
        return bit

    def begin_sweep(self) -> bool:
        """Return whether there are retired bits to clear; `end_sweep` follows if so."""
        self._sweeping, self._retired = self._retired, []
        return bool(self._sweeping)

    def end_sweep(self) -> None:
        """Make the bits that were retired before the sweep available: no block carries them."""
        self._free += self._sweeping
        self._sweeping = []
        self._masks.clear()
        self._positions.clear()

    def one(self, mask: Mask) -> Mask:
        """Return the one object that stands for equal masks."""
        if len(self._masks) >= _MAX_CACHED:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def positions(self, mask: Mask) -> npt.NDArray[np.intp]:
        """Return the positions of a mask's bits, ascending."""
        found = self._positions.get(mask)
        if found is None:
            if len(self._positions) >= _MAX_CACHED:
                self._positions.clear()
            data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            found = np.flatnonzero(np.unpackbits(data, bitorder="little"))
            self._positions[mask] = found
        return found

    def of(self, mask: Mask) -> list[Holder]:
        """Return the holders whose bits are in a mask."""
        return [holder for holder, bit in self._bits.items() if mask >> bit & 1] if mask else []

    def check(self) -> None:
        """Raise `InternalError` if a bit has no or several uses."""
        used = [*self._bits.values(), *self._free, *self._retired, *self._sweeping]
        if sorted(used) != list(range(self._num_bits)):
            raise InternalError(f"of {self._num_bits} bits, these are in use: {sorted(used)}")
        if self.alive != sum(1 << bit for bit in self._bits.values()):
            raise InternalError("the mask of living holders is wrong")
