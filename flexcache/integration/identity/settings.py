"""Digests of settings by value.

Equal settings have equal digests in every process, on every host and in every release: no
addresses, cache paths, library versions or plain defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from flexcache.errors import ConfigError

_DIGEST_BYTES = 8
NOT_NUMBERS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config that change nothing, or are in the id separately."""


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
