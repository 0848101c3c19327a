"""Identity of the weights and the adapter that KV is computed with.

Engines with equal ids compute interchangeable KV. The id must therefore differ wherever the numbers
may differ, and be equal for equal settings after a restart, on another host and with another vLLM
release: no addresses, cache paths, library versions or plain defaults.

    MODEL|revision=..|dtype=bfloat16|quantization=fp8:3f..|positions=9c..|kv=float8_e4m3fn|draft=..
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils

from flexcache.errors import ConfigError, InternalError
from flexcache.integration.checkpoint import identify_adapter, identify_checkpoint
from flexcache.integration.file_digests import (
    ANY_TIME,
    NOT_NUMBERS,
    FileDigests,
    digest,
    dtype_name,
)
from flexcache.integration.vllm.worker import AdapterUse

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
    load, speculative = vllm_config.load_config, vllm_config.speculative_config
    settings = [*_settings(vllm_config)]  # refuses some of them
    parts = [*_model_parts(model, load, digests), *settings]
    _, name = parts.pop(0)
    # The user's overrides and the resolved positions count, not `hf_config.to_dict()`: its defaults
    # change with transformers. For a function, what it returns counts.
    if overrides := model.hf_overrides:
        if callable(overrides):
            effective = model.hf_config.to_dict()
            overrides = {k: v for k, v in effective.items() if k not in NOT_NUMBERS}
        parts.append(("overrides", digest(overrides)))
    if _load_format(load) == "dummy":
        parts.append(("random_weights", model.seed))
    if speculative is not None and str(speculative.method) not in _NO_DRAFT_KV:
        parts.append(("draft", _read_draft(speculative, load, digests)))
    return "|".join([str(name), *(f"{key}={value}" for key, value in parts)])


def _read_draft(speculative: Any, load: Any, digests: FileDigests) -> str:
    """Identify the model whose KV is cached along with the target's."""
    name, draft = str(speculative.method), speculative.draft_model_config
    if draft is None:
        return name
    kv_dtype = getattr(speculative, "kv_cache_dtype", None)
    return f"{name}:{digest([dict(_model_parts(draft, load, digests)), kv_dtype])}"


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
        of_checkpoint = getattr(model.hf_config, "quantization_config", None)
        by_user = getattr(model, "quantization_config", None)
        yield "quantization", f"{model.quantization}:{digest([of_checkpoint, by_user])}"
    yield "positions", digest(_read_positions(model))


def _settings(vllm_config: Any) -> Iterator[tuple[str, Any]]:
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
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    # vLLM's hashes of images and videos do not cover these.
    of_media = ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
    chosen = {name: getattr(media, name, None) or None for name in of_media}
    if any(value is not None for value in chosen.values()):
        yield "media", digest(chosen)


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


_GpuKey = tuple[Any, ...]
_SEVERAL = ""
"""The digest of no adapter."""


def _gpu_key(adapter: Any) -> _GpuKey:
    """Return what vLLM's hashes of an adapter's blocks have of it: its name, and its path in later
    releases than 0.28."""
    read = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if read is None:  # too many adapters count as one then
        return (adapter.lora_name,)
    return tuple(read(SimpleNamespace(lora_request=adapter)))


@dataclass(slots=True, eq=False)
class RequestName:
    """What a request's KV is called.

    Attributes:
        weights: Generation of the weights that it began with.
        adapter: Digest of its adapter; empty without one, None if that is unknown.
        is_mixed: Its KV may be of several weights or adapters: it is stored under no name.
        is_confirmed: Whether the ranks have said that they hold its adapter.
    """

    request: Any
    weights: int
    adapter: str | None
    is_mixed: bool = False
    is_confirmed: bool = False
    _unnamed: _Unnamed | None = None

    @property
    def may_store(self) -> bool:
        return not self.is_mixed and self.is_confirmed and self.adapter is not None

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """vLLM's hashes of the request's blocks, but not of its adapter's name and path."""
        if self._unnamed is None:
            self._unnamed = _Unnamed(self.request)
        return self._unnamed.hash_blocks()


class Names:
    """The names of all requests of one engine. Used on the scheduler's thread.

    A request's KV is stored under the weights that it began with, and not at all if it may be of
    two:

        the weights changed while it ran          -> the cache refuses it by its generation
        blocks came from vLLM's own cache, which
        has not been reset since they changed     -> mixed
        or has blocks of another adapter of this
        name and path                             -> mixed
        its adapter is not what the ranks loaded  -> mixed

    Args:
        generation: Returns the present generation of the weights.
        can_lose_loads: Whether vLLM can be told of any request that what was loaded is of no use.
    """

    def __init__(self, generation: Callable[[], int], can_lose_loads: bool) -> None:
        self._generation = generation
        self._can_lose_loads = can_lose_loads
        self._names: dict[str, RequestName] = {}
        self._loaded: Mapping[int, str] = {}
        """Digest of each adapter that the ranks have loaded, by vLLM's number of it."""
        self._digests = FileDigests(since_ns=ANY_TIME, waits=False)
        self._of_gpu: int | None = None
        """The weights that vLLM's own cached blocks are of; None while it has none."""
        self._adapters_of_gpu: dict[_GpuKey, str] = {}
        """The adapter that those of a name and path are of; `_SEVERAL` if they are of several."""
        self._gpu_keys: dict[int, _GpuKey] = {}
        """What vLLM's hashes have of each adapter that requests have begun with, by its number."""

    def of(self, request: Any) -> RequestName:
        name = self._names.get(request.request_id)
        if name is None:
            adapter = self._find_adapter(request.lora_request)
            name = RequestName(request, self._generation(), adapter)
            lora = request.lora_request
            name.is_confirmed = lora is None or self._is_loaded(lora, adapter)
            self._names[request.request_id] = name
        return name

    def begins(self, request: Any, num_on_gpu: int) -> RequestName:
        """Name a request that is to be computed from now on, but for the first ``num_on_gpu``
        tokens: vLLM has those. Called again while it waits, and after it was preempted: its name is
        the same object as long as it means the same."""
        name, adapter = self.of(request), self._find_adapter(request.lora_request)
        if (name.weights, name.adapter) != (self._generation(), adapter):
            self._names.pop(request.request_id)
            name = self.of(request)
        if self._of_gpu is None:  # from now on vLLM's cache has blocks
            self._of_gpu = name.weights
        is_other = self._of_gpu != name.weights
        if request.lora_request is not None:
            key = _gpu_key(request.lora_request)
            self._gpu_keys[request.lora_request.lora_int_id] = key
            if adapter is not None:
                self._computes(key, adapter)
            is_other |= self._adapters_of_gpu.get(key) != adapter
        name.is_mixed = bool(num_on_gpu) and is_other
        return name

    def _computes(self, key: _GpuKey, digest: str) -> None:
        """Note that vLLM's cache gets blocks of an adapter. They stay when another is loaded
        from the same path, and vLLM finds them for that one, too."""
        former = self._adapters_of_gpu.get(key, digest)
        self._adapters_of_gpu[key] = digest if former == digest else _SEVERAL

    def may_load(self, request: Any) -> bool:
        """Return whether KV may be loaded for a request: where that cannot be taken back, only of
        an adapter that the ranks have loaded."""
        adapter = request.lora_request
        if adapter is None or self._can_lose_loads:
            return True
        return not _reloads(adapter) and self._is_loaded(adapter, self.of(request).adapter)

    def use_of(self, request: Any) -> AdapterUse | None:
        """Return the adapter that a load is for, if any."""
        adapter, digest = request.lora_request, self.of(request).adapter
        if adapter is None or not digest:
            return None
        return AdapterUse(adapter.lora_int_id, digest, _reloads(adapter), self._can_lose_loads)

    def ended(self, request: Any) -> None:
        self._names.pop(request.request_id, None)

    def gpu_reset(self) -> None:
        """Note that vLLM's own cache is empty."""
        self._of_gpu = None
        self._adapters_of_gpu.clear()
        self._gpu_keys.clear()

    def adapters_loaded(self, digests: Mapping[int, str]) -> None:
        """Take what adapters the last step was computed with."""
        self._loaded = digests
        for number, key in self._gpu_keys.items():  # also of requests that have ended by now
            if number in digests:
                self._computes(key, digests[number])
        for name in self._names.values():
            adapter = name.request.lora_request
            if adapter is not None and adapter.lora_int_id in digests:
                is_it = digests[adapter.lora_int_id] == name.adapter
                name.is_confirmed |= is_it
                name.is_mixed |= not is_it

    def _is_loaded(self, adapter: Any, digest: str | None) -> bool:
        return adapter is not None and self._loaded.get(adapter.lora_int_id) == digest

    def _find_adapter(self, adapter: Any) -> str | None:
        """Return the digest of what the ranks have loaded, or will load."""
        if adapter is None:
            return ""
        loaded = self._loaded.get(adapter.lora_int_id)
        if loaded is not None and not getattr(adapter, "load_inplace", False):
            return loaded or None
        return identify_adapter(adapter.lora_path, self._digests)

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        if self._names:
            raise InternalError(f"ended requests are still named: {list(self._names)}")


class _Unnamed:
    """A request as vLLM would hash it without an adapter."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.lora_request = None
        self.block_hashes: list[bytes] = []
        self._last = b""
        """vLLM's hash of the last block: if it is another, the tokens before it are others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def hash_blocks(self) -> list[bytes]:
        theirs, ours = self._request.block_hashes, self.block_hashes
        if ours and (len(ours) > len(theirs) or theirs[len(ours) - 1] != self._last):
            ours.clear()
        if len(ours) < len(theirs):
            ours.extend(self._request._block_hasher(self))
            del ours[len(theirs) :]
            self._last = theirs[len(ours) - 1]
        return ours


def _reloads(adapter: Any) -> bool:
    """Whether vLLM loads an adapter again that it has loaded."""
    return bool(getattr(adapter, "load_inplace", False))
