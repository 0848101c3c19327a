"""Where the caches of this process's schedulers are, for ranks in the same process.

TensorRT-LLM makes an engine's scheduler and its first rank in one process, from the same arguments.
"""

from __future__ import annotations

from typing import Any

_ANNOUNCED: dict[str, Any] = {}
"""By endpoint, the arguments that a scheduler was made from. Only their identity counts."""


def announce(llm_args: Any, endpoint: str) -> None:
    """Let the ranks of an engine find its cache."""
    _ANNOUNCED[endpoint] = llm_args


def withdraw(endpoint: str) -> None:
    """The scheduler is shut down. Idempotent."""
    _ANNOUNCED.pop(endpoint, None)


def find(llm_args: Any) -> str | None:
    """Return where the cache of an engine is; None if its scheduler is in another process."""
    found = (place for place, known in _ANNOUNCED.items() if known is llm_args)
    return next(found, None)
