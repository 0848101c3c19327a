"""Single settings: how one is declared, parsed and refused."""

from __future__ import annotations

import os
from dataclasses import field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from flexcache.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Patience = Annotated[float, Meta(gt=0, le=1e9)]
"""Seconds after which a peer is given up, in any case."""
Megabytes = Annotated[float, Meta(gt=0, le=1e12)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e9)]
"""At most an exabyte: a larger number is a typing error."""
Retention = Annotated[float, Meta(ge=0.1, le=1e9)]
"""Seconds: long enough for sweeps between, and at most a lifetime."""

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def setting(default: Any, help: str, unit: str = "", *, is_secret: bool = False) -> Any:
    """Declare a field of a config. A secret's value is never shown."""
    return field(default=default, metadata={"help": help, "unit": unit, "is_secret": is_secret})


def reject(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r}: {allowed}")


def parse(name: str, value: Any, hint: Any, *, is_secret: bool = False) -> Any:
    """Convert a value to its field's type; text from the environment is parsed.

    Raises:
        ConfigError: The type or its bounds do not admit the value.
    """
    try:
        return msgspec.convert(value, hint, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        shown = "..." if is_secret else _as_read(value, hint)
        raise reject(name, shown, f"must be {_allowed(hint)}") from None


def _as_read(value: Any, hint: Any) -> Any:
    """Convert a refused value to its field's type without the bounds, if that admits it: a number
    reads the same from the environment as from a file."""
    kind = next((kind for kind in _members(hint) if get_origin(kind) is Annotated), None)
    if kind is None:
        return value
    try:
        return msgspec.convert(value, get_args(kind)[0], strict=not isinstance(value, str))
    except msgspec.ValidationError:
        return value


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _allowed(hint: Any) -> str:
    """Describe the values that a type admits."""
    hint = _members(hint)[0]  # the other, if any, is None
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is not Annotated:
        return _KINDS[hint]
    kind, meta = get_args(hint)
    bounds = ((meta.ge, "at least"), (meta.gt, "greater than"), (meta.le, "at most"))
    texts = [f"{words} {bound:g}" for bound, words in bounds if bound is not None]
    return f"{_KINDS[kind]} of {' and '.join(texts)}".replace("of greater", "greater")


def check_writable(name: str, directory: str) -> None:
    """Require that a directory is writable, or can be made in one that is.

    Raises:
        ConfigError: It is not.
    """
    existing = Path(directory).absolute()
    while not os.access(existing, os.F_OK) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise reject(name, directory, f"{existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise reject(name, directory, f"{existing} must be writable")
