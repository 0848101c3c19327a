"""Configuration of a vLLM engine: what FlexCache needs of it, and refuses.

Holds no state. The scheduler's side and the workers' side both use it and get the same answer.

FlexCache may be a child of vLLM's MultiConnector, beside other connectors. MultiConnector gives
each child a config of its own, while vLLM obeys MultiConnector's. It asks all children about a
request, takes the first that has something, and lets the request wait while any of them does not
know yet.
"""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from flexcache.client.transport import local_endpoint
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import EngineKeys
from flexcache.config.sources import Layer, read_environment, require_block_size
from flexcache.errors import ConfigError
from flexcache.integration.vllm.groups import (
    layer_specs,
    read_groups,
    read_keys_per_position,
    read_position,
)
from flexcache.protocol.endpoints import private_endpoint


def locals_of_callers() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of each function in the call stack, the innermost first."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        yield frame.f_locals


def find_caller(*attributes: str) -> Any:
    """Return the innermost object in whose methods this is called and that has these attributes;
    None if there is none."""
    for names in locals_of_callers():
        caller = names.get("self")
        if all(hasattr(caller, name) for name in attributes):
            return caller
    return None


def find_looked_up() -> tuple[Any, Any] | None:
    """Return vLLM's `KVCacheManager` and the request that it is looked up for, if this is called by
    a look-up."""
    for names in locals_of_callers():
        manager = getattr(names.get("self"), "kv_cache_manager", None)
        if manager is not None and "request" in names:
            return manager, names["request"]
    return None


_EXTRA = "kv_connector_extra_config"
UNREAD = "unread"
"""Id of a model whose files may take a while to hash."""


def read_cache_config(vllm_config: Any, block_size: int) -> CacheConfig:
    """Read `CacheConfig` from ``FLEXCACHE_*`` and ``kv_connector_extra_config``; the latter wins.

    KV events are on by default if vLLM publishes its own, with block hashes of the same kind.
    """
    extra = Layer(vllm_config.kv_transfer_config.kv_connector_extra_config, _EXTRA)
    require_block_size("vLLM's", block_size, read_environment(os.environ), extra)
    events = vllm_config.kv_events_config
    defaults = {
        "kv_events": events is not None and events.enable_kv_cache_events,
        "kv_events_hashes": "int" if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else "bytes",
    }
    return CacheConfig.from_env(None, defaults, _EXTRA, **{**extra, "tokens_per_block": block_size})


@dataclass(frozen=True)
class Place:
    """An engine's name at its cache, and the cache's address.

    ``endpoint`` is None if the cache is in the engine's scheduler process.
    """

    endpoint: str | None
    engine_id: str
    dp_rank: int

    @property
    def client_endpoint(self) -> str:
        """Address that the engine's workers connect to."""
        return self.endpoint or local_endpoint(self.engine_id)


def read_layerwise_setting(extra_config: dict[str, Any]) -> str:
    """Read `layerwise_load` alone, before the rest of the config is known."""
    name = "layerwise_load"
    return str(extra_config.get(name, os.environ.get("FLEXCACHE_LAYERWISE_LOAD", "auto")))


def read_place(vllm_config: Any, cache_config: CacheConfig) -> Place:
    """Return the engine's place, the same for its scheduler and its workers.

    vLLM appends ``_dp<rank>`` to the id of each engine of a data-parallel group. Nothing else
    reveals a group: for dense models every rank is configured as if it were the only one.
    """
    engine_id = vllm_config.kv_transfer_config.engine_id
    in_group = re.fullmatch(r"(.+)_dp(\d+)", engine_id)
    if in_group is None:
        return Place(cache_config.endpoint, engine_id, 0)
    group, rank = in_group.group(1), int(in_group.group(2))
    return Place(cache_config.endpoint or private_endpoint(f"group-{group}"), group, rank)


def why_uncached(vllm_config: Any, num_groups: int) -> str | None:
    """Return why the KV of this engine's model is of no use to another request; None if it is.

    The model decides, not ``enable_prefix_caching``: one who turned vLLM's own caching off may want
    ours. Generative models are left to that setting, as vLLM leaves them.

    Args:
        num_groups: KV cache groups that can be cached.
    """
    model = vllm_config.model_config
    if num_groups == 0:
        return "the model keeps no KV between steps"
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        kinds = (model.pooler_config.seq_pooling_type, model.pooler_config.tok_pooling_type)
        pooling = "/".join(str(kind) for kind in kinds if kind is not None)
        return (
            f"vLLM supports no prefix caching for its pooling ({pooling}) and attention "
            f"({model.attn_type})"
        )
    return None


def read_model_config(vllm_config: Any, kv_cache_config: Any) -> ModelConfig:
    """Return the model, whose id is yet to be read, and how the engine's ranks divide its KV.

    The sizes of blocks are the ranks' to tell: each knows its own layers' tensors, the scheduler
    only the names of rank 0's.
    """
    _refuse_before_033(vllm_config)
    num_tokens = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    if num_tokens:  # vLLM 0.33 has none beside a connector
        raise ConfigError(
            f"vLLM's block hashes cover {num_tokens} tokens after each block, and would not name"
            " what is in it; set disable_lookahead_block_hashes in speculative_config"
        )
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    every = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec)
    ]
    dtypes = [spec.dtype for spec in every if hasattr(spec, "dtype")]
    return ModelConfig(
        model_id=UNREAD,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=max(1, model.get_total_num_kv_heads()),
        head_size=model.get_head_size(),
        dtype=dtypes[0] if dtypes else every[0].dtypes[0],  # of states without any attention
        use_mla=bool(model.use_mla),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        cp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        kv_replicas=_read_replicas(vllm_config, kv_cache_config),
        sized_by_ranks=True,
        groups=read_groups(vllm_config, kv_cache_config),
        engine_keys=_read_engine_keys(vllm_config, kv_cache_config),
    )


def _read_replicas(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return how many neighbouring ranks hold the same KV; None to follow the number of heads.

    vLLM tells the scheduler what is true of rank 0's layers. A draft model's are on the last stage,
    so with both none share; a rank of another stage that differs nevertheless is refused.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        return 1
    if parallel.decode_context_parallel_size > 1 and not hasattr(kv_cache_config, "kv_tp_replicas"):
        return 1
    return getattr(kv_cache_config, "kv_tp_replicas", None)


def read_key_namespace(vllm_config: Any) -> tuple[str, ...]:
    """Name what vLLM's block hashes depend on besides tokens, LoRA, salt and images."""
    return ("vllm", str(vllm_config.cache_config.prefix_caching_hash_algo))


def _read_engine_keys(vllm_config: Any, kv_cache_config: Any) -> EngineKeys | None:
    """Return how vLLM makes block hashes of tokens; None if their root is drawn at random, which
    the connector cannot see: vLLM draws it later."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("sha256"):
        seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if seed is None:
        return None
    root = get_hash_fn_by_name(algorithm)(seed)
    per_position = read_keys_per_position(vllm_config, kv_cache_config)
    size = read_position(vllm_config, kv_cache_config) // per_position
    return EngineKeys(algorithm, size, read_key_namespace(vllm_config), root)


def _refuse_before_033(vllm_config: Any) -> None:
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    remedy = "use vLLM 0.33 or later, leave it off, or run without the connector"
    model = vllm_config.model_config
    if model.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode = True: sleep() would unmap KV memory that FlexCache may be copying;"
            f" {remedy}"
        )
    name = "enable_return_routed_experts"
    if getattr(getattr(vllm_config, "aux_output_config", model), name, False):
        raise ConfigError(
            f"{name} = True: vLLM has no experts of tokens that are loaded, and would end at a hit;"
            f" {remedy}"
        )


_NAME = "FlexCacheConnectorV1"


def read_transfer_config(vllm_config: Any) -> Any:
    """Return the `KVTransferConfig` that vLLM obeys; not the connector's own if it is a child.

    Must be called while the connector is being constructed: nothing in a child's config refers to
    the parent, which is the caller then.
    """
    transfer = vllm_config.kv_transfer_config
    for names in locals_of_callers():
        caller = names.get("self")
        if isinstance(caller, MultiConnector):
            transfer = caller._vllm_config.kv_transfer_config  # the outermost one counts
    return transfer


def check_no_twin(vllm_config: Any) -> None:
    """Refuse a second FlexCache in one engine. Must be called as `read_transfer_config`.

    Raises:
        ConfigError: There is one: both would have the same name, files and memory.
    """
    extra = read_transfer_config(vllm_config).kv_connector_extra_config
    count = _count_ours(extra.get("connectors", ()))
    if count > 1:
        raise ConfigError(
            f"kv_connector_extra_config.connectors: {_NAME} is there {count} times; an engine has "
            "one: leave out the others, and give that one all tiers"
        )


def _count_ours(connectors: Iterable[Any]) -> int:
    count = 0
    for child in connectors:
        count += child.get("kv_connector") == _NAME
        count += _count_ours((child.get("kv_connector_extra_config") or {}).get("connectors", ()))
    return count


def is_among_siblings() -> bool:
    """Whether `MultiConnector` is asking, on behalf of all its children."""
    classes = (names.get("cls") for names in locals_of_callers())
    return any(isinstance(each, type) and issubclass(each, MultiConnector) for each in classes)


def is_served_by_sibling(request: Any) -> bool:
    """Return whether another connector brings the request's KV from the engine that computed it.

    False again once it has done so: a preempted request may be served by any connector.
    """
    params = getattr(request, "kv_transfer_params", None) or {}
    return bool(params.get("do_remote_prefill"))


_HAS_LAYOUTS = find_spec("vllm.v1.kv_cache_layout") is not None  # since vLLM 0.32
_HEADS_FIRST_ONLY = 10  # FlashInfer's kernels for GPUs of this generation want heads before tokens


def preferred_layout(vllm_config: Any) -> str | None:
    """Return vLLM's name of the layout that keeps all layers of a block in one piece, for one copy
    instead of one for each layer; None to leave the choice to vLLM.

    vLLM drops a preference that the attention backends do not support.
    """
    if not _HAS_LAYOUTS or is_among_siblings() or not _suits(vllm_config):
        return None
    capability = current_platform.get_device_capability()
    has_heads_first = capability is not None and capability.major == _HEADS_FIRST_ONLY
    # The bytes of a block are those of vLLM's default, so that what is stored stays valid. Heads
    # before layers (`BHLNC`) would leave each layer in pieces: a load by layer would gain nothing.
    return "BLHNC" if has_heads_first else "BLNHC"


def prefers_one_tensor(vllm_config: Any) -> bool:
    """Whether an engine of vLLM before 0.32 shall have one tensor for all layers.

    Not with heads before tokens: its layers would then be between each other.
    """
    if _HAS_LAYOUTS or not _suits(vllm_config):
        return False
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    with set_current_vllm_config(vllm_config):
        return str(get_kv_cache_layout()) == "NHD"


def split_layers(
    kv_cache: torch.Tensor, attn_backend: Any, vllm_config: Any, kv_cache_config: Any
) -> dict[str, torch.Tensor]:
    """Return each layer's view of one tensor for all layers."""
    with set_current_vllm_config(vllm_config):
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    whole = kv_cache.permute([order.index(dim) for dim in range(len(order))])
    layers = zip(kv_cache_config.kv_cache_tensors, whole.unbind(0), strict=True)
    return {name: layer for tensor, layer in layers for name in tensor.shared_by}


def _suits(vllm_config: Any) -> bool:
    """Whether a block's layers can be in one piece for all that is known: not where it could keep
    the engine from starting or break its attention, as for blocks that are padded, that kernels
    divide, or that have scales of their own."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not current_platform.is_cuda_alike() or model is None or model.is_hybrid:
        return False
    return not (
        cache.user_specified_block_size
        or cache.kv_cache_dtype_skip_layers
        or "per_token_head" in cache.cache_dtype
    )


def describe_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the device, the backends that read and write the KV of this rank, and what its states
    consist of.

    Backends order K, V, heads and tokens differently in tensors of equal shape. vLLM's CPU backend
    also tiles a block for the instruction set of its CPU. States of other parts may have as many
    bytes. Decode context parallelism deals tokens out to the ranks in pieces of a set size.
    """
    layers = vllm_config.compilation_config.static_forward_context
    groups = [group for group in kv_cache_config.kv_cache_groups if group.layer_names]
    backends = {
        layers[name].get_attn_backend().get_name() for group in groups for name in group.layer_names
    }
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        has_tiles = torch.cpu._is_amx_tile_supported()
        device += f" {torch.backends.cpu.get_cpu_capability()}{' AMX' if has_tiles else ''}"
    description = f"{device} {'+'.join(sorted(backends))}"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        pieces = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        description += f" dcp={parallel.decode_context_parallel_size}/{pieces}"
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    states = [_describe_state(spec) for spec in specs if hasattr(spec, "shapes")]
    return " ".join([description, *dict.fromkeys(states)])


def _describe_state(spec: Any) -> str:
    parts = zip(spec.dtypes, spec.shapes, strict=True)
    return "+".join(
        f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]"
        for dtype, shape in parts
    )
