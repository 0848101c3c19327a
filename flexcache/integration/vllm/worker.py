"""Worker side of the connector: lends the KV tensors and reports ended tasks.

Nothing is copied on vLLM's thread, which waits only for the layers of loads that belong to its step
(`step_loads`); with a cache in the engine's process it has copies begin, and reports their end. A
task may touch the GPU only after the step that carries its metadata has begun (its gate), so never
while an earlier owner of its blocks still computes. A load is reported only when it has ended on
every rank; the end of a put is known to the scheduler's side.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexcache.client.rank import ClientState, KVTPClient
from flexcache.integration.checkpoint import LoadedAdapter
from flexcache.integration.file_digests import ANY_TIME, FileDigests
from flexcache.integration.vllm.engine import (
    describe_layout,
    find_caller,
    read_cache_config,
    read_place,
)
from flexcache.integration.vllm.groups import (
    read_groups,
    read_head_dim,
    read_layers,
    read_position,
)
from flexcache.integration.vllm.step_loads import StepLoads, has_full_graphs, recovers_in_steps
from flexcache.logs import log_event
from flexcache.tasks.instructions import PromisedLoad

logger = logging.getLogger(__name__)


class AdapterUse(NamedTuple):
    """The adapter that a load is for.

    Attributes:
        number: vLLM's number of it.
        digest: Of its files, or of what the ranks have loaded.
        reloads: vLLM loads it again when it runs the request.
        can_be_lost: vLLM can be told later that what was loaded is of no use.
    """

    number: int
    digest: str
    reloads: bool
    can_be_lost: bool


@dataclass(frozen=True)
class Load:
    """A request's blocks that a task fills. ``task_id`` is None if it could not be started.

    One that was ``promised`` runs within the step of this metadata, others between steps. In a
    model with groups, ``num_needed`` blocks of the cache must arrive, or the request starts over;
    ``block_ids`` are for other models.
    """

    request_id: str
    task_id: int | None
    block_ids: list[int]
    promised: PromisedLoad | None = None
    num_needed: int = 0
    adapter: AdapterUse | None = None


@dataclass
class FlexCacheMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Tasks launched since the last step.

    Attributes:
        stores: Puts, whose blocks the steps before this one have computed.
        idle: The engine computes nothing in this step.
        begins_late: No copy may begin before vLLM has prepared the inputs of the step.
        started: Requests whose load between steps has arrived, and that this step computes first;
            False for those that have ended instead.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    idle: bool = False
    begins_late: bool = False
    started: dict[str, bool] = field(default_factory=dict)


@dataclass
class LoadedAdapters(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the last step was computed with: the digest of each adapter that is loaded, by vLLM's
    number of it. A rank sends it when it is another."""

    digests: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine with another rank's: what they hold differently is of unknown content."""
        assert isinstance(other, LoadedAdapters)
        digests = {**other.digests, **self.digests}
        for number, digest in other.digests.items():
            if digests[number] != digest:
                digests[number] = ""
        return LoadedAdapters(digests)


_NEEDED = (
    "reload_weights", "update_weights", "start_weight_update", "finish_weight_update", "sleep",
    "load_model",
)  # fmt: skip
_ALSO = ("start_draft_weight_update", "discard", "reset_weights")
_OF_MODELS = ("load_weights", "load_state_dict")
_KEEPS_WEIGHTS = 1
"""The level of sleep that does."""


class RankWeights:
    """Watches the worker in whose call stack it is made.

    vLLM tells no connector. So the worker's own methods are watched, those of vLLM 0.28 to 0.33 and
    the model's, which RL frameworks call directly:

        worker   reload_weights, update_weights, start_weight_update, start_draft_weight_update,
                 finish_weight_update, sleep from level 2 on, discard, reset_weights, load_model
        model    load_weights, load_state_dict, also of the draft model; within the wrappers of CUDA
                 graphs, since worker extensions reach through them
        LoRA     the manager's _load_adapter: the one function that reads an adapter's files

    They run on the worker's thread, so no step runs meanwhile.

    Args:
        changed: Called right before weights change.

    Attributes:
        unwatched: Why weights that have changed once may change unnoticed from then on: this vLLM
            lacks a method to watch.
        num_updates: How often weights have changed.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._depth = 0
        self.unwatched: str | None = None
        self.num_updates = 0
        self._lora: Any = None
        self._digests = FileDigests(since_ns=ANY_TIME, waits=False)
        self._loaded: dict[int, str] = {}
        self._promised: dict[int, tuple[str, set[int]]] = {}
        """What KV was loaded for before its adapter is: the digest, and the blocks."""
        self._broken: set[int] = set()
        """Blocks of such KV whose adapter turned out to be another."""

    def attach(self) -> None:
        """Watch the worker that is being set up. Its model has been loaded."""
        worker = find_caller("model_runner", "load_model")
        if worker is None:
            log_event(
                logger, logging.WARNING, "weights_unwatched",
                reason="this vLLM sets its workers up otherwise",
                remedy="call POST /cache/weights before and after each update of the weights",
            )  # fmt: skip
            return
        missing = [name for name in _NEEDED if not self._watch(worker, name)]
        for name in _ALSO:
            self._watch(worker, name)
        runner = worker.model_runner
        missing += self._watch_models(runner)
        self._watch(runner, "reload_weights")
        self._lora = getattr(runner, "lora_manager", None)
        if self._lora is not None:
            self._watch_adapters(self._lora)
        if missing:
            self.unwatched = f"this vLLM has no {', '.join(missing)}"

    # -- weights ---------------------------------------------------------------------------------

    def _watch_models(self, runner: Any) -> list[str]:
        """Watch all that can be given weights by itself; return what the models lack for that."""
        missing: list[str] = []
        # The model and the draft model, without the wrappers of CUDA graphs first: these hand calls
        # on to what they wrap. A call through both is one update.
        found = [_call(runner, "get_model"), getattr(runner, "model", None)]
        found.append(_call(runner, "get_draft_model"))
        models = {id(model): model for model in found if model is not None}
        parts: dict[int, Any] = {}
        for model in models.values():
            missing += [name for name in _OF_MODELS if not self._watch(model, name)]
            parts.update((id(part), part) for part in _call(model, "modules") or ())
        for part in [part for number, part in parts.items() if number not in models]:
            for name in _OF_MODELS:
                self._watch(part, name)
        return missing

    def _watch(self, owner: Any, name: str) -> bool:
        method = getattr(owner, name, None)
        if method is None:
            return False
        sleeps = name == "sleep"

        @functools.wraps(method)
        def watched(*arguments: Any, **options: Any) -> Any:
            level = int(options.get("level", arguments[0] if arguments else 1)) if sleeps else 0
            if sleeps and level <= _KEEPS_WEIGHTS:
                return method(*arguments, **options)
            if not self._depth:
                self.num_updates += 1
                if self.num_updates == 1:
                    log_event(logger, logging.INFO, "weights_changed", by=name)
                self._changed()
            self._depth += 1
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1

        setattr(owner, name, watched)
        return True

    # -- adapters --------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[int, str]:
        """Digest of each adapter that is loaded, by vLLM's number of it."""
        if self._lora is None:
            return {}
        present = self._lora.list_adapters()
        return {number: each for number, each in self._loaded.items() if number in present}

    def holds(self, digest: str) -> bool:
        """Return whether KV of the adapter of this digest can be of use here. Any thread."""
        held = [*self._loaded.values()]
        return digest in held or any(digest == each for each, _ in [*self._promised.values()])

    def may_load(self, use: AdapterUse | None, blocks: Iterable[int]) -> bool:
        """Return whether KV of an adapter may be loaded for a request.

        vLLM loads adapters when it runs their requests, which is after their KV. Until then the
        digest of the files is trusted, and checked against what is loaded.
        """
        if use is None:
            return True
        number, digest = use.number, use.digest
        loaded = None if use.reloads else self.adapters.get(number)
        if loaded is None and self._lora is not None and use.can_be_lost:
            promised, of_blocks = self._promised.setdefault(number, (digest, set()))
            of_blocks.update(blocks)
            return promised == digest
        return loaded == digest

    def _watch_adapters(self, manager: Any) -> None:
        kind = type(manager)
        if not hasattr(kind, "_load_adapter"):
            log_event(
                logger, logging.WARNING, "adapters_unwatched",
                reason="this vLLM loads adapters otherwise", effect="their KV is not cached",
            )  # fmt: skip
            self._lora = None
            return

        def load_adapter(request: Any) -> Any:
            loading = LoadedAdapter(request.lora_path)
            # Looked up now: RL frameworks replace it in the class, to load from memory.
            adapter = kind._load_adapter(manager, request)
            loading.identify(self._digests)
            number, digest = request.lora_int_id, loading.name
            self._loaded[number] = digest
            promised, blocks = self._promised.pop(number, (digest, set[int]()))
            if promised != digest:
                self._broken |= blocks
            return adapter

        manager._load_adapter = load_adapter

    def take_broken(self) -> set[int]:
        """Return blocks that were loaded for an adapter that turned out to be another."""
        broken, self._broken = self._broken, set()
        return broken


def _call(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method() if callable(method) else None


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
            head_dim=read_head_dim(kv_caches, self._kv_cache_config),
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
        # Nothing that a rank holds (pinned host memory, fence, gates) is worth keeping over a
        # sleep, and registering again is what it does after a lost server, too.
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
