"""Gates of tasks: what an engine lets touch its GPU, and when; and loads it waits for by layer.

An op behind a gate comes after the work that was queued on the engine's stream when its gate was
opened; one without a gate, after the work queued when it starts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from flexcache.ids import OpKind
from flexcache.storage.layout import BlockLayout
from flexcache.transfer.messages import Execute
from flexcache.transfer.workers.copier import Copier, Fence
from flexcache.transfer.workers.layer_load import LayerLoad


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
        self._opened: dict[int, Fence | None] = {}
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

    def opened_at(self, task_id: int) -> Fence | None:
        """Return the point of the engine's compute at which a gate was opened, if it was."""
        with self._lock:
            return self._opened.get(task_id)

    def fence_of(self, task_id: int) -> Fence | None:
        """Return the point of the engine's compute that a task's next copy comes after."""
        after = self.opened_at(task_id)
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
