"""Names that are imported and never used."""

from __future__ import annotations

from typing import Any


class _Kind(type):
    """Metaclass of placeholders: classes with whatever members are asked for, like an enum's."""

    def __getattr__(cls, name: str) -> Any:
        return placeholder(name)


def placeholder(name: str) -> Any:
    """Return a class of this name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (), {})
