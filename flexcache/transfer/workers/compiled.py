"""Functions compiled with numba, for other threads than Python's: they hold no interpreter lock.

Compiling takes a second, so numba keeps the code beside the source or in the user's cache, for the
processor that it was compiled on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cfunc


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for this signature, or load it; see `numba.cfunc` for what it returns."""

    def compile_or_load(function: Callable[..., Any]) -> Any:
        try:
            return cfunc(signature, cache=True)(function)
        except Exception:  # no place for a cache, or a damaged one: numba raises various classes
            return cfunc(signature)(function)

    return compile_or_load
