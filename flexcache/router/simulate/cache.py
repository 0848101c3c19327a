"""The KV cache of a simulated engine: an LRU of blocks on the GPU, and one in DRAM below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from flexcache.errors import InternalError


class EngineCache:
    """Blocks by key. Those of running requests are pinned; the others go in LRU order.

    Args:
        num_gpu: Blocks on the GPU, for cached and running requests together.
        num_dram: Blocks in DRAM, which get what is computed as soon as it is.
    """

    def __init__(self, num_gpu: int, num_dram: int = 0) -> None:
        self._num_gpu = num_gpu
        self._num_dram = num_dram
        self._pins: dict[Hashable, int] = {}
        self._unpinned: OrderedDict[Hashable, None] = OrderedDict()  # on the GPU, oldest first
        self._dram: OrderedDict[Hashable, None] = OrderedDict()
        self._num_private = 0  # blocks reserved and not cached yet

    def match(self, keys: Sequence[Hashable]) -> tuple[int, int]:
        """Return how many blocks of a prompt the GPU holds, and how many more DRAM supplies."""
        pins, unpinned, dram = self._pins, self._unpinned, self._dram
        on_gpu = total = len(keys)
        for i, key in enumerate(keys):
            if key not in pins and key not in unpinned:
                on_gpu = i
                break
        in_dram = 0
        while on_gpu + in_dram < total and keys[on_gpu + in_dram] in dram:
            in_dram += 1
        return on_gpu, in_dram

    def reserve(self, cached: Sequence[Hashable], num_new: int) -> bool:
        """Pin blocks that are on the GPU, and make room for new ones; returns whether it fits."""
        idle = sum(key in self._unpinned for key in cached)
        if len(self._pins) + idle + self._num_private + num_new > self._num_gpu:
            return False
        for key in cached:
            self._pin(key)
        self._num_private += num_new
        excess = len(self._pins) + len(self._unpinned) + self._num_private - self._num_gpu
        for _ in range(excess):
            self._unpinned.popitem(last=False)
        return True

    def load(self, keys: Sequence[Hashable], start: int) -> None:
        """Copy blocks from DRAM into reserved ones; those before ``start`` are on the GPU."""
        for key in reversed(keys):
            if key in self._dram:
                self._dram.move_to_end(key)
        self.computed(keys[start:])

    def computed(self, keys: Sequence[Hashable]) -> None:
        """Cache reserved blocks under their keys, pinned."""
        for key in keys:
            self._pin(key)
        self._num_private -= len(keys)
        self._write_to_dram(keys)

    def release(self, keys: Sequence[Hashable], num_private: int) -> None:
        """Unpin the blocks of a request that ended, and free those that were never cached."""
        self._num_private -= num_private
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                del self._pins[key]
                self._unpinned[key] = None

    def _pin(self, key: Hashable) -> None:
        pins = self._pins.get(key)
        if pins is None:
            self._unpinned.pop(key, None)
            self._pins[key] = 1
        else:
            self._pins[key] = pins + 1

    def _write_to_dram(self, keys: Sequence[Hashable]) -> None:
        if not self._num_dram:
            return
        for key in reversed(keys):
            self._dram[key] = None
            self._dram.move_to_end(key)
        while len(self._dram) > self._num_dram:
            self._dram.popitem(last=False)

    def check(self) -> None:
        """Verify that the blocks fit.

        Raises:
            InternalError: They do not.
        """
        used = len(self._pins) + len(self._unpinned) + self._num_private
        if used > self._num_gpu or self._num_private < 0 or len(self._dram) > self._num_dram:
            raise InternalError(f"{used} of {self._num_gpu} blocks, {self._num_private} private")
        if self._pins.keys() & self._unpinned.keys():
            raise InternalError("a block is pinned and unpinned")
