"""LayerLoad: a load whose layers the engine uses while later ones are still being copied.

The copying thread loads the layers in order; the engine's thread waits for each layer before it
computes with it. On CUDA "loaded" means queued: the compute stream then waits for the copy, and the
engine's thread does not.

    AWAITED --end--> LOST, or COMPLETE if all layers are loaded    (a lost load stays lost)
       +------give_up--> LOST: no copy runs, and none starts

A load is complete or worthless: the engine has computed with all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from flexcache.transfer.workers.copier import Fence


class LayerLoad:
    """State of one load, shared by the two threads.

    Args:
        layer_ends: As `BlockLayout.layer_ends`.
        num_blocks: Number of blocks of the load.
        is_promised: Whether nothing but a copy that fails may end it (`client.promises`).
    """

    def __init__(
        self, layer_ends: Mapping[str, int], num_blocks: int, is_promised: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.is_promised = is_promised
        self._layer_ends = layer_ends
        self._num_segments = max(layer_ends.values(), default=0)
        self._landings: list[tuple[int, Fence | None]] = []
        """For each part, the number of segments loaded with it, and the fence of their arrival."""
        self._is_copying = False
        self._is_lost = False
        self._changed = threading.Condition()

    # -- the copying thread ----------------------------------------------------------------------

    def begin_part(self) -> bool:
        """Announce a copy. Returns False if it must not start, because the load was given up."""
        with self._changed:
            self._is_copying = not self._is_lost
            return self._is_copying

    def part_started(self, num_segments: int, landed: Fence | None) -> None:
        """Record that the first ``num_segments`` of all blocks land with ``landed`` (None: now)."""
        with self._changed:
            self._is_copying = False
            self._landings.append((num_segments, landed))
            self._changed.notify_all()

    def end(self) -> None:
        """End copying: no more copies start; the load is lost if a layer is missing. Idempotent."""
        with self._changed:
            self._is_copying = False
            self._is_lost |= not self._has_come(self._num_segments)
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether it is lost or complete."""
        with self._changed:
            return self._is_lost or self._has_come(self._num_segments)

    # -- the engine's thread ---------------------------------------------------------------------

    def wait_layer(self, name: str, timeout: float | None) -> bool:
        """Wait for a layer, or for all if the name is unknown; return whether it is loaded."""
        return self._wait(self._layer_ends.get(name, self._num_segments), timeout)

    def wait_all(self, timeout: float | None) -> bool:
        """Wait for all layers; return whether they are loaded."""
        return self._wait(self._num_segments, timeout)

    def give_up(self) -> None:
        """Give the load up: no copy starts any more, and none is running when this returns.

        On CUDA one may still be queued; the compute stream then continues after it.
        """
        with self._changed:
            self._is_lost = True
            self._changed.wait_for(lambda: not self._is_copying)
            last = self._landings[-1][1] if self._landings else None
        if last is not None:
            last.wait()

    def _wait(self, num_segments: int, timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost or self._has_come(num_segments), timeout)
            if self._is_lost or not self._has_come(num_segments):
                return False
            landed = next(fence for end, fence in self._landings if end >= num_segments)
        if landed is not None:
            landed.wait()
        return True

    def _has_come(self, num_segments: int) -> bool:
        return bool(self._landings) and self._landings[-1][0] >= num_segments
