"""Stands in for SGLang's compiled kernels, which have no build for plain CPUs.

SGLang imports names from here; a model with torch's own attention calls none of them. Those that
drafts take are in `speculation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from sgl_kernel import speculation


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return getattr(speculation, name, absent)
