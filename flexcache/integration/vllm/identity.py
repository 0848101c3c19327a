"""Identifies what the KV of a vLLM engine depends on besides its tokens.

Engines with equal ids compute interchangeable KV. The id must therefore differ wherever the numbers
may differ, and be equal for equal settings after a restart, on another host and with another vLLM
release: no addresses, cache paths, library versions or plain defaults.

    MODEL|revision=..|dtype=bfloat16|quantization=fp8:3f..|positions=9c..|kv=float8_e4m3fn|draft=..
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flexcache.errors import ConfigError
from flexcache.integration.identity.checkpoint import identify_checkpoint
from flexcache.integration.identity.files import FileDigests
from flexcache.integration.identity.settings import NOT_NUMBERS, digest, dtype_name

_NO_DRAFT_KV = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
_LLAMA4_TUNED_BEYOND = 32768  # tokens


_FROM_FILES = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors",
    "instanttensor", "runai_streamer", "sharded_state", "bitsandbytes", "gguf",
}  # fmt: skip
"""Formats whose weights are among the model's files. Others may be anywhere."""


def read_model_id(vllm_config: Any, digests: FileDigests) -> str:
    """Name everything that decides the numbers in the engine's KV, the model's name first.

    Raises:
        NotKeptError: Files would have to be read.
    """
    model = vllm_config.model_config
    settings = [*_kv_parts(vllm_config), *_media_parts(model)]  # refuses some of them
    parts = [*_model_parts(model, vllm_config.load_config, digests), *settings]
    _, name = parts.pop(0)
    if model.hf_overrides:
        parts.append(("overrides", _digest_overrides(model)))
    if _load_format(vllm_config.load_config) == "dummy":
        parts.append(("random_weights", model.seed))
    draft = _read_draft(vllm_config.speculative_config, vllm_config.load_config, digests)
    if draft is not None:
        parts.append(("draft", draft))
    return "|".join([str(name), *(f"{key}={value}" for key, value in parts)])


def _load_format(load: Any) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _model_parts(model: Any, load: Any, digests: FileDigests) -> Iterator[tuple[str, Any]]:
    """Yield what determines the numbers of a model, target or draft."""
    name = getattr(model, "model_weights", "") or model.model  # model_weights if it was fetched
    if _load_format(load) not in _FROM_FILES:
        digests.note_unknown(f"load_format = {_load_format(load)!r}: weights may be anywhere")
    yield from identify_checkpoint(
        name, model.revision, digests, trusts_code=bool(model.trust_remote_code),
        download_dir=getattr(load, "download_dir", None),
    )  # fmt: skip
    if model.trust_remote_code and model.code_revision is not None:
        yield "code", model.code_revision
    config_path = getattr(model, "hf_config_path", None)
    if config_path is not None:
        yield "config", config_path
        yield "config_files", digest(dict(identify_checkpoint(config_path, None, digests)))
    if getattr(model, "model_class_overrides", None):
        yield "classes", digest(model.model_class_overrides)
    yield "dtype", dtype_name(model.dtype)
    if model.quantization is not None:
        yield "quantization", f"{model.quantization}:{digest(_read_quantization(model))}"
    yield "positions", digest(_read_positions(model))


def _kv_parts(vllm_config: Any) -> Iterator[tuple[str, Any]]:
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales = True: the scales come from an engine's first prompt, so no "
            "other run can use the KV; use a checkpoint with scales, or leave it off"
        )
    names = {
        "auto": dtype_name(vllm_config.model_config.dtype),
        "fp8": dtype_name(current_platform.fp8_dtype()),
        "fp8_e4m3": dtype_name(current_platform.fp8_dtype()),
    }
    yield "kv", names.get(cache.cache_dtype, cache.cache_dtype)
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped:
        yield "kv_skips", digest(sorted(map(str, skipped)))


def _media_parts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield settings that vLLM's hashes of images and videos do not cover."""
    media = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
    chosen = {name: getattr(media, name, None) or None for name in names}
    if any(value is not None for value in chosen.values()):
        yield "media", digest(chosen)


def _read_draft(speculative: Any, load: Any, digests: FileDigests) -> str | None:
    """Identify the model whose KV is cached along with the target's; None if there is none."""
    if speculative is None or str(speculative.method) in _NO_DRAFT_KV:
        return None
    draft = speculative.draft_model_config
    if draft is None:
        return str(speculative.method)
    kv_dtype = getattr(speculative, "kv_cache_dtype", None)
    return f"{speculative.method}:{digest([dict(_model_parts(draft, load, digests)), kv_dtype])}"


def _read_quantization(model: Any) -> list[Any]:
    """Return the quantization settings of the checkpoint and of the user."""
    by_user = getattr(model, "quantization_config", None)
    return [getattr(model.hf_config, "quantization_config", None), by_user]


def _read_positions(model: Any) -> dict[str, Any]:
    """Return the resolved encoding of positions and the attention window."""
    config = model.hf_text_config
    names = (
        "rope_parameters",
        "rope_scaling",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "sliding_window",
    )
    found: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    if found["rope_parameters"] is not None:
        del found["rope_scaling"]  # former name of rope_parameters
    return found | {"long": _computes_for_long(model, found)}


def _computes_for_long(model: Any, positions: Mapping[str, Any]) -> bool | None:
    """Return which of two ways a model computes if ``max_model_len`` selects it; else None."""
    rope = positions["rope_parameters"] or positions.get("rope_scaling") or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for kind in (rope, *per_layer_type):
        if kind.get("rope_type") == "longrope":
            short = kind.get("original_max_position_embeddings")
            short = short or positions["original_max_position_embeddings"]
            return short is not None and model.max_model_len > short
    if str(getattr(model.hf_config, "model_type", "")).startswith("llama4"):
        by_user = model.override_generation_config.get("attn_temperature_tuning")
        return bool(model.max_model_len > _LLAMA4_TUNED_BEYOND if by_user is None else by_user)
    return None


def _digest_overrides(model: Any) -> str:
    """Digest overrides of the model's config; for a function, the config that it returns."""
    overrides = model.hf_overrides
    if callable(overrides):
        effective = model.hf_config.to_dict()
        overrides = {k: v for k, v in effective.items() if k not in NOT_NUMBERS}
    return digest(overrides)
