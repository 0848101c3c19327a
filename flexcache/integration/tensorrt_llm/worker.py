"""Worker side of TensorRT-LLM's connector: lends a rank's KV tensors, and waits for loads.

TensorRT-LLM counts matched tokens as computed and has no way to recompute them. So a load that a
rank holds ends even if the server is lost (`HeldLoads`). One that was lost nevertheless makes the
step that computes with it fail: its requests end with an error, and no token is made from what was
not loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm._utils import mpi_rank

from flexcache.client.rank import KVTPClient
from flexcache.errors import LoadLostError, UnsupportedLayoutError
from flexcache.integration.tensorrt_llm.engine import (
    StepLoad,
    StepMetadata,
    When,
    check_supported,
    describe_settings,
    find_cache,
    read_cache_config,
    saves_of,
)
from flexcache.transfer.gates import LayerLoad

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorWorker
except ModuleNotFoundError:  # before its connectors had a package
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorWorker


@dataclass(frozen=True)
class LayerTensors:
    """KV tensors by name, blocks first, and which of them belong to each layer of the model."""

    tensors: Mapping[str, torch.Tensor]
    of_layer: Mapping[int, list[str]]
    description: str


def split_pool(pool: torch.Tensor) -> LayerTensors:
    """Split V1's tensor into layers.

    Raises:
        UnsupportedLayoutError: It has another number of dimensions.
    """
    if pool.dim() != 4:
        raise UnsupportedLayoutError(
            f"the KV pool has shape {tuple(pool.shape)}, not [blocks, layers, K and V, elements]"
        )
    tensors = {f"layer.{index}": pool[:, index] for index in range(pool.shape[1])}
    of_layer = {index: [name] for index, name in enumerate(tensors)}
    return LayerTensors(tensors, of_layer, f"one pool, K and V: {pool.shape[2]}")


def split_regions(layout: Any) -> LayerTensors:
    """Split V2's regions into the buffers of layers.

    Raises:
        UnsupportedLayoutError: There are several groups of layers, or a window: their blocks
            cannot be told apart by position, or are gone when they would be stored.
    """
    if len(layout.groups) != 1 or layout.groups[0].window_size is not None:
        windows = [group.window_size for group in layout.groups]
        raise UnsupportedLayoutError(
            f"the KV cache has layer groups with windows {windows}: only one group of full "
            "attention is supported"
        )
    (group,) = layout.groups
    tensors: dict[str, torch.Tensor] = {}
    of_layer: dict[int, list[str]] = {}
    roles: dict[str, None] = {}
    for region in (*group.regions, *getattr(group, "replicated_regions", ())):
        memory = region.as_tensor()
        size, rest = divmod(memory.shape[1], len(region.buffers))
        if rest or any(getattr(buffer, "expansion", 1) != 1 for buffer in region.buffers):
            raise UnsupportedLayoutError(
                f"a region of {memory.shape[1]} bytes has {len(region.buffers)} buffers of "
                "different size"
            )
        for number, buffer in enumerate(region.buffers):
            name = f"layer.{buffer.layer_id}.{buffer.role}"
            tensors[name] = memory[:, number * size : (number + 1) * size]
            of_layer.setdefault(buffer.layer_id, []).append(name)
            roles[str(buffer.role)] = None
    return LayerTensors(tensors, of_layer, f"regions: {'+'.join(roles)}")


class FlexCacheConnectorWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """One rank's `KVTPClient`, and the loads that it has to report. Called on one thread."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        check_supported(llm_args)
        self._llm_args = llm_args
        self._settings = describe_settings(llm_args)
        self._config = read_cache_config(llm_args)
        self._rank = mpi_rank()
        self._kv: LayerTensors | None = None
        self._endpoint = ""
        self.client: KVTPClient | None = None
        self._news: StepMetadata | None = None
        self._loads: dict[int, StepLoad] = {}
        """Loads between steps, by request."""
        self._awaited: set[int] = set()
        self._saving: set[int] = set()
        self._lost: set[int] = set()
        self._in_step: list[LayerLoad] = []
        self._deadline_s = 0.0
        self._step_is_lost = False

    # -- registration ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._lend(split_pool(kv_cache_tensor))

    def register_kv_cache_layout(self, layout: Any) -> None:
        self._lend(split_regions(layout))

    def _lend(self, kv: LayerTensors) -> None:
        """Lend the tensors to the cache: now, or when the first step says where it is."""
        self._kv = kv
        endpoint = find_cache(self._llm_args)
        if endpoint is not None:
            self._connect(kv, endpoint)

    def _connect(self, kv: LayerTensors, endpoint: str) -> None:
        self._endpoint = endpoint
        self.client = KVTPClient(
            endpoint,
            rank=self._rank,
            curve_keys=self._config.curve_keys,
            server_timeout_s=self._config.server_timeout_s,
            keeps_loads=True,
        )
        self.client.register_kv_caches(
            kv.tensors, layout_description=f"{self._settings}, {kv.description}"
        )

    # -- steps -----------------------------------------------------------------------------------

    def bind_connector_meta(self, metadata: Any) -> None:
        super().bind_connector_meta(metadata)
        assert isinstance(metadata, StepMetadata)
        self._news = metadata
        if self.client is None and self._kv is not None:
            self._connect(self._kv, metadata.endpoint)

    def start_load_kv(self, stream: Any) -> None:
        """Begin the step's loads, behind what is queued on ``stream``."""
        news, self._news = self._news, None
        self._end_step()
        if news is None:
            return
        self._deadline_s = time.monotonic() + self._config.server_timeout_s
        with _current(stream):
            for load in news.loads:
                self._begin(load)
        self._await_first([load for load in news.loads if load.when is When.FIRST])
        self._step_is_lost = not self._lost.isdisjoint(news.first_computed)
        self._lost.difference_update(news.first_computed)

    def _begin(self, load: StepLoad) -> None:
        if load.when is When.BETWEEN:
            self._loads[load.request_id] = load
        if load.task_id is None or self.client is None:
            if load.num_blocks:
                self._lost.add(load.request_id)
        elif load.when is When.BY_LAYER:
            self._in_step.append(self.client.load_by_layer(load.task_id, load.num_blocks))
        else:
            self.client.open_gates([load.task_id])

    def _await_first(self, loads: Sequence[StepLoad]) -> None:
        """Wait for loads on every rank, so that all ranks agree whether they were lost."""
        waiting = {load.task_id: load for load in loads if load.task_id is not None}
        while waiting and self.client is not None:
            for task_id, num_ok in self.client.take_ended(waiting).items():
                load = waiting.pop(task_id)
                if num_ok < load.num_blocks:
                    self._lost.add(load.request_id)
            if waiting:
                self.client.wait_ended(0.01)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Wait until the layer was loaded.

        Raises:
            LoadLostError: It never will be.
        """
        if self._step_is_lost:
            raise LoadLostError("KV that a request of this step relies on could not be loaded")
        if not self._in_step:
            return
        assert self._kv is not None
        names = self._kv.of_layer.get(layer_idx, [""])  # of an unknown layer: wait for all
        with _current(stream):
            for load in self._in_step:
                if not all(load.wait_layer(name, self._left_s()) for name in names):
                    self._step_is_lost = True
                    raise LoadLostError(f"layer {layer_idx} was not loaded")

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: a request is stored when it has ended."""

    def wait_for_save(self, stream: Any) -> None:
        """End the step. Blocks that are stored stay allocated, so none is awaited."""
        self._end_step()

    def _end_step(self) -> None:
        """Let go of the loads by layer; none is copying afterwards."""
        loads, self._in_step = self._in_step, []
        self._step_is_lost = False
        for load in loads:
            if not load.wait_all(self._left_s()):
                load.give_up()

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    # -- ends ------------------------------------------------------------------------------------

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests whose blocks are no longer in use, and those that are loaded."""
        self._saving.update(finished_gen_req_ids)
        self._awaited.update(started_loading_req_ids)
        loaded = self._take_loaded() if self._awaited else []
        saves = saves_of(self._endpoint)
        saved = list(self._saving) if saves is None else saves.take_ended(self._saving)
        self._saving.difference_update(saved)
        self._lost.difference_update(saved)
        return saved, loaded

    def _take_loaded(self) -> list[int]:
        """Return the parked requests whose load has ended on every rank, lost or not."""
        loads = [self._loads[request_id] for request_id in self._awaited & self._loads.keys()]
        tasks = {load.task_id: load for load in loads if load.task_id is not None}
        ended = {} if self.client is None else self.client.take_ended(tasks)
        for task_id, num_ok in ended.items():
            if num_ok < tasks[task_id].num_blocks:
                self._lost.add(tasks[task_id].request_id)
        loaded = [
            load.request_id for load in loads if load.task_id is None or load.task_id in ended
        ]
        for request_id in loaded:
            del self._loads[request_id]
        self._awaited.difference_update(loaded)
        return loaded

    def shutdown(self) -> None:
        if self.client is not None:
            self.client.close()


def _current(stream: Any) -> AbstractContextManager[Any]:
    """Make a CUDA stream the current one; None on a CPU."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
