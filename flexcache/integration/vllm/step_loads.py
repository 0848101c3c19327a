"""Worker side of loads that run within the engine step that computes with them.

vLLM announces each layer before it computes it, and waits here until that layer has arrived. One
that it does not announce would be computed with what is in its place: an indexer's, or any that a
graph of the whole model replays. So a step waits for its loads before the first layer until every
layer has been announced once; with such graphs, always. All of a load has arrived before the step's
results are collected: the draft model of vLLM 0.33 runs after that, others announce their layers.

No load is lost here: each was promised (`client.promises`). If a copy fails all the same, no token
may come of the step, since vLLM cannot go back behind it.
"""

from __future__ import annotations

from collections.abc import Collection

from flexcache.errors import LoadLostError
from flexcache.transfer.workers.layer_load import LayerLoad


class StepLoads:
    """The loads of the current step. Used on the engine's thread only.

    Args:
        layers: Names of all layers that are loaded.
        has_graphs: Whether graphs may replay layers without announcing them.
    """

    def __init__(self, layers: Collection[str], has_graphs: bool = False) -> None:
        self._unannounced = set(layers)
        self._has_graphs = has_graphs
        self._loads: list[LayerLoad] = []

    def add(self, load: LayerLoad) -> None:
        """Add a load; the step has begun."""
        self._loads.append(load)

    def before_step(self) -> None:
        """Wait, if necessary, before the first layer."""
        if self._unannounced or self._has_graphs:
            self._await_all()

    def before_layer(self, name: str) -> None:
        """Wait for this layer, which the model is about to run."""
        if self._unannounced:
            self._unannounced.discard(name)
        for load in self._loads:
            if not load.wait_layer(name, None):
                raise _lost()

    def finish(self) -> None:
        """End the step. No copy is running afterwards."""
        self._await_all()
        self._loads.clear()

    def _await_all(self) -> None:
        for load in self._loads:
            if not load.wait_all(None):
                raise _lost()


def _lost() -> LoadLostError:
    return LoadLostError(
        "a copy from DRAM has failed whose KV vLLM counts as computed: the engine must restart;"
        " layerwise_load = off loads between steps, where vLLM computes what is lost"
    )
