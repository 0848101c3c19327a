"""Identifies what the KV of an SGLang engine depends on besides its tokens.

MODEL|revision=..|sglang=..|part=tp 0 of 2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexcache.integration.checkpoint import identify_checkpoint
from flexcache.integration.file_digests import FileDigests, digest

_SETTINGS = (
    "dtype", "quantization", "modelopt_quant", "kv_cache_dtype",
    "json_model_override_args", "context_length", "mamba_ssm_dtype", "qsa_indexer_dtype",
    "speculative_algorithm", "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
)  # fmt: skip
"""Those of SGLang's settings that change the numbers in KV, or which layers have KV."""
_FILES = (
    "quantization_param_path", "kt_weight_path", "modelopt_checkpoint_restore_path",
    "decrypted_config_file",
)  # fmt: skip
"""Settings that name more of what is loaded."""
_FROM_FILES = {
    "auto", "pt", "safetensors", "npcache", "dummy", "sharded_state", "gguf", "bitsandbytes",
    "mistral", "layered", "fastsafetensors", "instanttensor",
}  # fmt: skip
"""Those of SGLang's ways to load that read the files of the checkpoint."""


def read_model_id(server_args: Any, part: str, digests: FileDigests) -> str:
    """Name everything that decides the numbers in a rank's KV, the model's name first.

    Args:
        part: Which part of the model's KV the rank holds; empty for all of it.
    """
    name, *parts = _parts(server_args, digests)
    if part:
        parts.append(("part", part))
    return "|".join([name[1], *(f"{key}={value}" for key, value in parts)])


def _parts(args: Any, digests: FileDigests) -> Iterator[tuple[str, str]]:
    yield from identify_checkpoint(
        args.model_path, args.revision, digests,
        trusts_code=bool(getattr(args, "trust_remote_code", False)),
        download_dir=getattr(args, "download_dir", None),
    )  # fmt: skip
    settings = {name: getattr(args, name, None) for name in _SETTINGS}
    yield "sglang", digest({k: v for k, v in settings.items() if v not in ("", "auto", "{}")})
    for name in _FILES:
        if path := getattr(args, name, None):
            content = dict(identify_checkpoint(path, None, digests))
            del content["model"]  # the path
            yield name, digest(content)
    load_format = str(getattr(args.load_format, "value", args.load_format))
    if load_format not in _FROM_FILES:
        digests.note_unknown(f"load_format = {load_format!r}: weights may be anywhere")
    if load_format == "dummy":
        yield "random_weights", str(args.random_seed)
    draft = getattr(args, "speculative_draft_model_path", None)
    if draft is not None:
        revision = getattr(args, "speculative_draft_model_revision", None)
        yield "draft", digest(dict(identify_checkpoint(draft, revision, digests)))
