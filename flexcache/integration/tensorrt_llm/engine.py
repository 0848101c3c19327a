"""Engine of TensorRT-LLM: its arguments, its interface, and what its scheduler and ranks share."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import read_dtype
from flexcache.config.sources import read_environment, require_block_size
from flexcache.config.values import reject
from flexcache.errors import ConfigError
from flexcache.integration.adapter import TaskCalls
from flexcache.integration.checkpoint import identify_checkpoint
from flexcache.integration.file_digests import FileDigests, digest, dtype_name


class When(Enum):
    """When a load runs."""

    BY_LAYER = "within the step that computes with it, layer by layer"
    FIRST = "before the step that computes with it"
    BETWEEN = "while the request is parked"


@dataclass(frozen=True)
class StepLoad:
    """Blocks that a task fills. ``task_id`` is None if it could not be started."""

    request_id: int
    task_id: int | None
    num_blocks: int
    when: When


@dataclass(frozen=True)
class StepMetadata:
    """Pickled by TensorRT-LLM.

    Attributes:
        endpoint: Where the ranks find the cache.
        loads: Loads launched since the last step.
        first_computed: Requests that compute for the first time with what was loaded for them.
    """

    endpoint: str
    loads: list[StepLoad] = field(default_factory=list)
    first_computed: list[int] = field(default_factory=list)


_OF_SCHEDULERS: dict[str, Saves] = {}
"""Those of the schedulers in this process, by the endpoint of their cache. TensorRT-LLM makes an
engine's scheduler and its first rank in one process, from the same arguments."""


class Saves:
    """The requests of a scheduler that are being stored.

    Known to the scheduler's process alone. TensorRT-LLM frees a request's blocks once all ranks say
    that they are saved, so it is enough that this process's rank waits.

    Args:
        llm_args: What the scheduler was made from. Only their identity counts.
    """

    def __init__(self, cache: TaskCalls, llm_args: Any) -> None:
        self._cache = cache
        self._tasks: dict[int, set[int]] = {}
        self.llm_args = llm_args
        _OF_SCHEDULERS[cache.manager.endpoint] = self

    def add(self, request_id: int, task_ids: Iterable[int]) -> None:
        """Keep a request's blocks until these tasks have ended on every rank."""
        self._tasks[request_id] = set(task_ids)

    def take_ended(self, request_ids: Iterable[int]) -> list[int]:
        """Return those of the requests whose blocks are no longer in use."""
        ended = []
        for request_id in request_ids:
            tasks = self._tasks.get(request_id, set())
            tasks.difference_update(self._cache.ended(tasks) if tasks else ())
            if not tasks:
                self._tasks.pop(request_id, None)
                ended.append(request_id)
        return ended

    def is_empty(self) -> bool:
        return not self._tasks

    def close(self) -> None:
        _OF_SCHEDULERS.pop(self._cache.manager.endpoint, None)


def find_cache(llm_args: Any) -> str | None:
    """Return where the cache of an engine is; None if its scheduler is in another process."""
    found = (place for place, saves in _OF_SCHEDULERS.items() if saves.llm_args is llm_args)
    return next(found, None)


def saves_of(endpoint: str) -> Saves | None:
    """Return what the scheduler of this cache waits for, if it is in this process."""
    return _OF_SCHEDULERS.get(endpoint)


_KV_DTYPES = {"fp8": torch.float8_e4m3fn}
_STATE_LAYERS = ("mamba", "linear_attention", "recurrent")
_STATE_KEYS = ("hybrid_override_pattern", "ssm_state_size", "ssm_cfg", "mamba_d_state")


def check_supported(llm_args: Any) -> None:
    """Raise `ConfigError` for settings with which KV would be wrong, or cannot be moved."""
    kv = llm_args.kv_cache_config
    unsupported = {
        "pipeline_parallel_size": _above_one(llm_args, "pipeline_parallel_size"),
        "context_parallel_size": _above_one(llm_args, "context_parallel_size"),
        "max_beam_width": _above_one(llm_args, "max_beam_width"),
        "enable_attention_dp": bool(getattr(llm_args, "enable_attention_dp", False)),
        "speculative_config": getattr(llm_args, "speculative_config", None) is not None,
        "sparse_attention_config": getattr(llm_args, "sparse_attention_config", None) is not None,
        "kv_cache_config.host_cache_size": bool(getattr(kv, "host_cache_size", None)),
        "kv_cache_config.disk_cache_size": bool(getattr(kv, "disk_cache_size", None)),
        "kv_cache_config.max_attention_window": bool(getattr(kv, "max_attention_window", None)),
        "kv_cache_config.enable_block_reuse": not getattr(kv, "enable_block_reuse", True),
        "kv_cache_config.dtype": str(kv.dtype).lower() == "nvfp4",
    }
    for name, is_set in unsupported.items():
        if is_set:
            value: Any = llm_args
            for part in name.split("."):
                value = getattr(value, part)
            raise ConfigError(f"{name} = {value!r}: not supported by FlexCache in TensorRT-LLM")
    config = _text_config(read_model_file(llm_args))
    kinds = [str(kind) for kind in config.get("layer_types") or config.get("layers_block_type", ())]
    if any(config.get(key) for key in _STATE_KEYS) or any(
        word in kind for kind in kinds for word in _STATE_LAYERS
    ):
        raise ConfigError(f"model = {llm_args.model!r}: Mamba and linear attention keep states, "
                          "which TensorRT-LLM does not hand to connectors")  # fmt: skip


def read_cache_config(llm_args: Any) -> CacheConfig:
    """Read `CacheConfig` from ``FLEXCACHE_*``; the block size is TensorRT-LLM's."""
    block_size = int(llm_args.kv_cache_config.tokens_per_block)
    require_block_size("TensorRT-LLM's", block_size, read_environment(os.environ))
    config = CacheConfig.from_env(None, {}, tokens_per_block=block_size)
    if config.store_shards not in (None, llm_args.tensor_parallel_size):
        raise reject(
            "store_shards", config.store_shards,
            "must be tensor_parallel_size, or unset: TensorRT-LLM does not say where heads are",
        )  # fmt: skip
    return config


def read_model_config(llm_args: Any, model_id: str) -> ModelConfig:
    """Return the model, and how the ranks divide its KV. The sizes of blocks are theirs to tell."""
    config = _text_config(read_model_file(llm_args))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    latent = config.get("kv_lora_rank")
    if latent:
        kv_heads, head_size = 1, latent + config["qk_rope_head_dim"]
    return ModelConfig(
        model_id=model_id,
        num_layers=config["num_hidden_layers"],
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype=_read_kv_dtype(llm_args, config),
        use_mla=bool(latent),
        tp_size=llm_args.tensor_parallel_size,
        sized_by_ranks=True,
    )


def read_model_file(llm_args: Any) -> Mapping[str, Any]:
    """Read the checkpoint's ``config.json``, in a directory or in the hub's cache.

    Raises:
        ConfigError: It is in neither.
    """
    name = str(llm_args.model)
    file: Any = Path(name) / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        file = None
        with contextlib.suppress(HFValidationError):  # not a name on the hub
            revision = getattr(llm_args, "revision", None)
            file = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(file, str):
            raise ConfigError(f"model = {name!r}: its config.json was not found")
    found: Mapping[str, Any] = json.loads(Path(file).read_bytes())
    return found


def describe_settings(llm_args: Any) -> str:
    """Return what decides the order of bytes in a block besides the shape of the KV tensors."""
    return f"TensorRT-LLM {getattr(llm_args, 'attn_backend', 'TRTLLM')}"


def _above_one(llm_args: Any, name: str) -> bool:
    return (getattr(llm_args, name, None) or 1) > 1


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _read_kv_dtype(llm_args: Any, config: Mapping[str, Any]) -> torch.dtype:
    name = str(llm_args.kv_cache_config.dtype).lower()
    if name == "auto":
        name = dtype_name(getattr(llm_args, "dtype", "auto"))
    if name == "auto":
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return _KV_DTYPES[name] if name in _KV_DTYPES else read_dtype(name)


def read_model_id(llm_args: Any, digests: FileDigests) -> str:
    """Name what decides the numbers in the engine's KV, the model's name first."""
    (_, name), *parts = identify_checkpoint(
        str(llm_args.model), getattr(llm_args, "revision", None), digests,
        trusts_code=bool(getattr(llm_args, "trust_remote_code", False)),
    )  # fmt: skip
    parts += _settings(llm_args)
    return "|".join([name, *(f"{key}={value}" for key, value in parts)])


def _settings(llm_args: Any) -> Iterator[tuple[str, str]]:
    yield "engine", "tensorrt_llm"
    yield "dtype", dtype_name(getattr(llm_args, "dtype", "auto"))
    yield "kv", str(llm_args.kv_cache_config.dtype)
    for name in ("quant_config", "model_kwargs"):
        value = getattr(llm_args, name, None)
        if value is not None:
            dump = getattr(value, "model_dump", None)
            yield name, digest(value if dump is None else dump(mode="json"))
    load_format = getattr(llm_args, "load_format", "auto")
    if str(getattr(load_format, "name", load_format)).lower() == "dummy":
        yield "random_weights", "dummy"
