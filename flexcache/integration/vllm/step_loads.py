"""Worker side of loads that run within the engine step that computes with them.

vLLM announces each layer before it computes it, and waits here until that layer has arrived. Loads
that are incomplete at the end of the step are reported: vLLM then discards the request's output. A
layer that vLLM did not announce (a graph replays it, or it belongs to a draft model or an indexer)
may have been computed too early; its load counts as lost too, and from then on steps wait for their
loads before they start.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from flexcache.transfer.workers.layer_load import LayerLoad


class StepLoads:
    """The loads of the current step. Used on the engine's thread only.

    Args:
        layers: Names of all layers that are loaded.
        timeout_s: Limit on all waiting in one step.
    """

    def __init__(self, layers: Collection[str], timeout_s: float) -> None:
        self._layers = frozenset(layers)
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        self._loads: list[tuple[LayerLoad, list[int]]] = []
        self._announced: set[str] = set()
        self._all_are_announced = True

    def add(self, load: LayerLoad, block_ids: list[int]) -> None:
        """Add a load into these blocks; the step has begun."""
        if not self._loads:
            self._deadline_s = time.monotonic() + self._timeout_s
            self._announced = set()
        self._loads.append((load, block_ids))

    def before_step(self) -> None:
        """Wait, if necessary, before the first layer."""
        if self._loads and not self._all_are_announced:
            for load, _ in self._loads:
                if not load.wait_all(self._left_s()):
                    load.give_up()  # the model computes now, so it must not count if it comes yet

    def before_layer(self, name: str) -> None:
        """Wait for this layer, which the model is about to run."""
        if self._loads:
            self._announced.add(name)
            for load, _ in self._loads:
                if not load.wait_layer(name, self._left_s()):
                    load.give_up()

    def finish(self) -> set[int]:
        """End the step; return the blocks that were not loaded. No copy is running afterwards."""
        loads, self._loads = self._loads, []
        if not loads:
            return set()
        was_early = self._all_are_announced and not self._layers <= self._announced
        self._all_are_announced &= not was_early
        bad: set[int] = set()
        for load, block_ids in loads:
            if not load.wait_all(self._left_s()):
                load.give_up()
            elif not was_early:
                continue
            bad.update(block_ids)
        return bad

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())
