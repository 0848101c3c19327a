"""Worker side of the connector: lends the KV tensors and reports ended tasks.

Nothing is copied on vLLM's thread, which waits only for the layers of loads that belong to its step
(`step_loads`); with a cache in the engine's process it has copies begin, and reports their end. A
task may touch the GPU only after the step that carries its metadata has begun (its gate), so never
while an earlier owner of its blocks still computes. A load is reported only when it has ended on
every rank; the end of a put is known to the scheduler's side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexcache.client.rank import ClientState, KVTPClient
from flexcache.integration.vllm.engine import read_cache_config, read_place
from flexcache.integration.vllm.groups import read_groups, read_layers, read_position
from flexcache.integration.vllm.kv_layout import describe_layout
from flexcache.integration.vllm.layerwise import has_full_graphs, recovers_in_steps
from flexcache.integration.vllm.metadata import FlexCacheMetadata, Load, LoadedAdapters
from flexcache.integration.vllm.rank_weights import RankWeights
from flexcache.integration.vllm.step_loads import StepLoads

_IDLE_WAIT_S = 0.002  # an engine with nothing to compute spins; waiting leaves the CPU to the copy


class FlexCacheWorker:
    """One rank's `KVTPClient` and the tasks it has to report.

    Attributes:
        step_loads: The loads within the step that is being computed.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        # The scheduler's side refuses the same groups, but is made later: this side would meet them
        # first, and could not say what they are.
        read_groups(vllm_config, kv_cache_config)
        block_size = read_position(vllm_config, kv_cache_config)
        self._config = read_cache_config(vllm_config, block_size)
        self._place = read_place(vllm_config, self._config)
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self.client: KVTPClient | None = None
        self._loads: dict[int, Load] = {}
        self._stores: set[int] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self.step_loads = StepLoads(())
        self._idle = False
        self._begun: FlexCacheMetadata | None = None
        self._arrived: dict[str, tuple[int, list[int]]] = {}
        """Loads between steps whose requests have not begun: their blocks, and how often the
        weights had changed by then."""
        self._is_renamed = False
        """The weights have changed while there was no client to tell."""
        self._recovers = recovers_in_steps(vllm_config)
        self._weights = RankWeights(self._weights_changed)
        self._weights.attach()
        self._adapters: Mapping[int, str] = {}
        """What was sent last."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches
        self.client = KVTPClient(
            self._place.client_endpoint,
            dp_rank=self._place.dp_rank,
            rank=self._vllm_config.parallel_config.rank,
            engine_id=self._place.engine_id,
            curve_keys=self._config.curve_keys,
            server_timeout_s=self._config.server_timeout_s,
            engine_polls=True,
            holds_adapter=self._weights.holds,
        )
        if self._is_renamed:
            self._weights_changed()
        self.client.register_kv_caches(
            kv_caches,
            layout_description=describe_layout(self._vllm_config, self._kv_cache_config),
            num_blocks=self._kv_cache_config.num_blocks,
            kv_replicas=getattr(self._kv_cache_config, "kv_tp_replicas", None),
            groups=read_layers(self._kv_cache_config),
        )
        self.step_loads = StepLoads(kv_caches, has_full_graphs(self._vllm_config))

    def unregister(self) -> None:
        """End all copies: the tensors lose their memory until `restore`. Idempotent.

        What is cached stays; loads and puts under way have moved nothing.

        Raises:
            RuntimeError: A copy hangs, so the memory must stay.
        """
        if self.client is None:
            return
        self.client.close()
        if self.client.state is not ClientState.CLOSED:
            raise RuntimeError(
                "KV memory cannot be released: a copy between it and the cache, or attaching to the"
                " cache, has not ended; the engine can go on without the cache, or sleep later"
            )
        self._take_ended()  # all of them: without a client nothing moves
        self.client = None

    def restore(self) -> None:
        """Register the tensors again, which have memory at the same addresses. Idempotent."""
        if self.client is None and self._kv_caches:
            self.register(self._kv_caches)

    def _weights_changed(self) -> None:
        """Have the cache use other names. Before the weights change, on the worker's thread."""
        self._is_renamed = self.client is None
        if self.client is None:
            return
        self.client.weights_changed()
        if self._weights.unwatched is not None:
            self.client.weights_unknown(self._weights.unwatched)

    def begin_step(self, metadata: FlexCacheMetadata) -> None:
        """Take the step's new tasks and open their gates to the GPU. Idempotent."""
        if metadata is self._begun:
            return
        self._begun = metadata
        self._idle = metadata.idle
        for request_id, is_computed in metadata.started.items():
            num_updates, block_ids = self._arrived.pop(request_id, (0, []))
            is_old = num_updates != self._weights.num_updates
            if is_computed and is_old and self._recovers:
                # Without a cache vLLM would compute them itself. Where it cannot any more, the
                # request goes on as one does that ran during the update, and is stored no more.
                self._bad_blocks.update(block_ids)
        new: list[int] = []
        for load in metadata.loads:
            if load.promised is not None:
                assert self.client is not None  # a step counts on it
                self.step_loads.add(self.client.load_promised(load.promised, load.block_ids))
                continue
            may_load = self._weights.may_load(load.adapter, load.block_ids)
            if load.task_id is None or self.client is None or not may_load:  # nothing is loaded
                self._lose(load, 0)
                self._received.add(load.request_id)
            else:
                self._loads[load.task_id] = load
                new.append(load.task_id)
        if self.client is not None:
            self._stores.update(metadata.stores)
            if new := new + metadata.stores:
                self.client.open_gates(new)

    def take_received(self) -> set[str]:
        """Return the requests whose get between steps has ended on every rank since the last call.
        Called at the end of each step."""
        self.step_loads.finish()
        broken = self._weights.take_broken()
        if self._recovers:
            self._bad_blocks |= broken
        if self.client is not None and (self._loads or self._stores):
            if self._idle:
                self.client.wait_ended(_IDLE_WAIT_S)
            self._take_ended()
        received, self._received = self._received, set()
        return received

    def _take_ended(self) -> None:
        assert self.client is not None
        for task_id, num_ok in self.client.take_ended([*self._loads, *self._stores]).items():
            self._stores.discard(task_id)
            load = self._loads.pop(task_id, None)
            if load is not None:
                self._received.add(load.request_id)
                self._arrived[load.request_id] = self._weights.num_updates, load.block_ids
                self._lose(load, num_ok)

    def _lose(self, load: Load, num_ok: int) -> None:
        """Note what of a load did not arrive after its first ``num_ok`` blocks."""
        if num_ok < load.num_needed:
            self._failed.add(load.request_id)
        self._bad_blocks.update(load.block_ids[num_ok:])

    def take_failed(self) -> set[str]:
        """Return the requests that have to start over, of those received. They are in a model with
        groups, where vLLM cannot tell whose a bad block is."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad_blocks(self) -> set[int]:
        """Return the GPU blocks that a get should have filled but did not."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_adapters(self) -> LoadedAdapters | None:
        """Return which adapters are loaded, if they are others than last time."""
        adapters = self._weights.adapters
        if adapters == self._adapters:
            return None
        self._adapters = adapters
        return LoadedAdapters(dict(adapters))

    def shutdown(self) -> None:
        if self.client is not None:
            self.client.close()
