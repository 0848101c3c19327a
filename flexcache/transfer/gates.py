"""Gates of tasks: what an engine lets touch its GPU, and when; and loads it waits for by layer.

An op behind a gate comes after the work that was queued on the engine's stream when its gate was
opened; one without a gate, after the work queued when it starts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from flexcache.ids import OpKind
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.copier import ComputePoint, Copier
from flexcache.transfer.messages import Execute

# ------------------------------------------------------------------------------------------------
# LayerLoad: a load whose layers the engine uses while later ones are still being copied.
#
# The copying thread loads the layers in order; the engine's thread waits for each layer before it
# computes with it. On CUDA "loaded" means queued: the compute stream then waits for the copy, and
# the engine's thread does not.
#
#     AWAITED --end--> LOST, or COMPLETE if all layers are loaded    (a lost load stays lost)
#        +------give_up--> LOST: no copy runs, and none starts
#
# A load is complete or worthless: the engine has computed with all of it.


class LayerLoad:
    """State of one load, shared by the two threads.

    Args:
        layer_ends: As `BlockLayout.layer_ends`.
        num_blocks: Number of blocks of the load.
        is_promised: Whether nothing but a copy that fails may end it (`StepPromises`).
    """

    def __init__(
        self, layer_ends: Mapping[str, int], num_blocks: int, is_promised: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.is_promised = is_promised
        self._layer_ends = layer_ends
        self._num_segments = max(layer_ends.values(), default=0)
        self._landings: list[tuple[int, ComputePoint | None]] = []
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

    def part_started(self, num_segments: int, landed: ComputePoint | None) -> None:
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


class DeviceGates:
    """The open gates of one rank, and its loads by layer. Thread-safe.

    Args:
        layouts: Of each group of the model; of all layers if it has no groups.
        copier: Knows how far the engine's compute has come.

    Attributes:
        has_layer_loads: Whether the engine has ever waited for a load by layer.
    """

    def __init__(self, layouts: Sequence[BlockLayout], copier: Copier) -> None:
        self.has_layer_loads = False
        self._layouts = layouts
        self._copier = copier
        self._opened: dict[int, ComputePoint | None] = {}
        self._layer_loads: dict[int, LayerLoad] = {}
        self._is_over = False
        self._lock = threading.Lock()

    def open(self, task_ids: Iterable[int]) -> None:
        """Let ops of these tasks start, after the work the engine has queued."""
        fence = self._copier.fence()
        with self._lock:
            for task_id in task_ids:
                self._opened[task_id] = fence

    def is_open(self, task_id: int) -> bool:
        """Return whether a task's gate is open."""
        with self._lock:
            return task_id in self._opened

    def forget(self, task_ids: Iterable[int]) -> None:
        """Forget gates of tasks that have ended."""
        with self._lock:
            for task_id in task_ids:
                self._opened.pop(task_id, None)

    def opened_at(self, task_id: int) -> ComputePoint | None:
        """Return the point of the engine's compute at which a gate was opened, if it was."""
        with self._lock:
            return self._opened.get(task_id)

    def fence_of(self, task_id: int) -> ComputePoint | None:
        """Return the point of the engine's compute that a task's next copy comes after."""
        with self._lock:
            after = self._opened.get(task_id)
        return self._copier.fence() if after is None else after

    def end(self) -> None:
        """End all loads by layer, and begin none any more."""
        with self._lock:
            self._is_over = True
        with self._lock:
            loads, self._layer_loads = self._layer_loads, {}
        for load in loads.values():
            load.end()

    # -- loads by layer --------------------------------------------------------------------------

    def load_by_layer(self, task_id: int, num_blocks: int, is_promised: bool = False) -> LayerLoad:
        """Open the gate of a load; the caller will wait for its layers.

        The task must have a single op, over all ``num_blocks``.

        Raises:
            ValueError: The model has several groups.
        """
        if len(self._layouts) > 1:
            raise ValueError("a model with several groups is not loaded layer by layer")
        [layout] = self._layouts
        fence = self._copier.fence()
        load = LayerLoad(layout.layer_ends, num_blocks, is_promised)
        self.has_layer_loads = True
        with self._lock:
            if not self._is_over:
                self._opened[task_id] = fence
                self._layer_loads[task_id] = load
                return load
        load.end()
        return load

    def layer_load(self, message: Execute) -> LayerLoad | None:
        """Return the load by layer that an op belongs to, if it does to one."""
        if message.kind is not OpKind.H2D:
            return None
        with self._lock:
            return self._layer_loads.get(message.task_id)

    def is_promised(self, message: Execute) -> bool:
        """Whether an op has to be carried out whatever becomes of its task."""
        load = self.layer_load(message)
        return load is not None and load.is_promised

    @property
    def layer_loads(self) -> list[int]:
        """Tasks of loads by layer that have not ended."""
        with self._lock:
            return list(self._layer_loads)

    def lose_layer_loads(self) -> None:
        """Let the engine wait for no more layers of loads that have begun, unless promised."""
        for task_id in self.layer_loads:
            self.lose_layer_load(task_id)

    def lose_layer_load(self, task_id: int) -> None:
        """Likewise of one load, if it is one."""
        with self._lock:
            load = self._layer_loads.get(task_id)
        if load is not None and not load.is_promised:
            load.end()

    def end_layer_load(self, task_id: int) -> bool:
        """End a load by layer: layers not loaded yet are lost, unless it was promised. Returns
        whether it was one."""
        with self._lock:
            load = self._layer_loads.get(task_id)
            if load is None:
                return False
            if load.is_promised and not load.is_over:
                return True
            del self._layer_loads[task_id]
            self._opened.pop(task_id, None)
        load.end()
        return True
