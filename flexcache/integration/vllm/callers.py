"""Variables of the calling functions: vLLM gives its connectors and tiers less than they need."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from typing import Any


def locals_of_callers() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of each function in the call stack, the innermost first."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        yield frame.f_locals


def find_caller(*attributes: str) -> Any:
    """Return the innermost object in whose methods this is called and that has these attributes;
    None if there is none."""
    for names in locals_of_callers():
        caller = names.get("self")
        if all(hasattr(caller, name) for name in attributes):
            return caller
    return None
