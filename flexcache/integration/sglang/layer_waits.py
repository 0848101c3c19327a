"""LayerWaits: what SGLang's KV pool waits with before it hands out a layer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flexcache.integration.sglang.whole_load import WholeLoad
from flexcache.transfer.gates import LayerLoad

Load = LayerLoad | WholeLoad


class LayerWaits:
    """The loads of one forward pass at a time. Used on the model's thread only.

    Args:
        names: Names of the tensors that each layer reads, in the order in which they are loaded.
        timeout_s: Limit on all waiting in one forward pass.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], timeout_s: float) -> None:
        self._last_names = {layer: of_layer[-1] for layer, of_layer in names.items()}
        self._timeout_s = timeout_s
        self._loads: dict[int, Sequence[Load]] = {}
        self._deadlines_s: dict[int, float] = {}
        self._late: set[int] = set()
        """Forward passes that have computed with a layer before it was loaded."""
        self._num_batches = 0
        self.consumer_index = -1

    @property
    def is_busy(self) -> bool:
        """Whether a forward pass that was added has not been finished."""
        return bool(self._loads)

    def add(self, loads: Sequence[Load]) -> int:
        """Take the loads of the next forward pass; return its index."""
        index = self._num_batches
        self._num_batches += 1
        self._loads[index] = loads
        self._deadlines_s[index] = time.monotonic() + self._timeout_s
        return index

    def set_consumer(self, index: int) -> None:
        """Say which forward pass runs; -1 if it loads nothing."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer. If it does not come in time, `finish` says so, even if it comes yet."""
        index = self.consumer_index
        name = self._last_names.get(layer, "")
        for load in self._loads.get(index, ()):
            if not load.wait_layer(name, self._left_s(index)):
                self._late.add(index)

    def finish(self, index: int) -> bool:
        """End a forward pass; return whether every layer was loaded before the model read it. No
        copy is running afterwards."""
        landed = index not in self._late
        for load in self._loads.get(index, ()):
            if not load.wait_all(self._left_s(index)):
                load.give_up()
                landed = False
        self._loads.pop(index, None)
        self._deadlines_s.pop(index, None)
        self._late.discard(index)
        return landed

    def reset(self) -> None:
        """End every forward pass."""
        for index in list(self._loads):
            self.finish(index)
        self.consumer_index = -1

    def _left_s(self, index: int) -> float:
        return max(0.0, self._deadlines_s[index] - time.monotonic())
