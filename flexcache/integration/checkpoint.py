"""Identifies the checkpoint that an engine serves, and settings by their value.

What is equal must be equal in every process, on every host and in every release: no addresses,
cache paths, library versions or plain defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from flexcache.errors import ConfigError

_DIGEST_BYTES = 8
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
"""Path of a model in the hub's cache; offline, vLLM knows the model only by this path."""
_CONFIGS = {
    "config.json", "params.json", "quantize_config.json", "quant_config.json",
    "hf_quant_config.json",
}  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 32, 4096
NOT_NUMBERS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config that change nothing, or are in the id separately."""


def identify_checkpoint(name: str, revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint's name, and what tells its versions apart.

    Args:
        name: Its name on the hub, or a path.
        revision: Commit, branch or tag, if one is set.
    """
    if (snapshot := _SNAPSHOT.fullmatch(name)) is not None:
        yield "model", snapshot[1].replace("--", "/", 1)
        yield "revision", snapshot[2]
    elif (local := Path(name)).exists():
        yield "model", name
        yield "checkpoint", _digest_checkpoint(local)
    else:
        yield "model", name
        commit = _read_revision(name, revision)
        if commit is not None:
            yield "revision", commit


def _read_revision(name: str, revision: str | None) -> str | None:
    """Return the commit that a name like ``main`` stands for, if the hub's cache knows it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # not a repository on the hub
        return revision
    return Path(config).parent.name if isinstance(config, str) else revision


def _digest_checkpoint(path: Path) -> str:
    """Digest a local model's config and samples of its weights: its path does not identify them."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    content: dict[str, Any] = {}
    for file in files:
        if file.name in _CONFIGS:
            config = json.loads(file.read_bytes())
            content[file.name] = {k: v for k, v in config.items() if k not in NOT_NUMBERS}
        elif file.suffix in _WEIGHTS:
            content[file.name] = _sample(file)
    return digest(content)


def _sample(file: Path) -> list[Any]:
    size = file.stat().st_size
    sampled = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with file.open("rb") as stream:
        for index in range(_SAMPLES):
            stream.seek(size * index // _SAMPLES)
            sampled.update(stream.read(_SAMPLE_BYTES))
    return [size, sampled.hexdigest()]


def digest(value: object) -> str:
    """Digest a setting by value: equal settings agree in every process and release."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: object) -> Any:
    """Convert to JSON's types. None in a mapping is left out: new settings start as None."""
    match value:
        case None | bool() | str():
            return value
        case Enum():
            return _plain(value.value)
        case int() | float():
            return int(value) if isinstance(value, int) or value.is_integer() else value
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items() if v is not None}
        case set() | frozenset():
            return sorted((_plain(v) for v in value), key=json.dumps)
        case list() | tuple():
            return [_plain(v) for v in value]
        case torch.dtype():
            return dtype_name(value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case Path():
            return str(value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    kind = type(value).__name__
    raise ConfigError(f"{value!r}: a {kind} in the model's settings cannot be identified by value")


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
