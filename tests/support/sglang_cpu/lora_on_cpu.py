"""Plugin of SGLang that lets LoRA run without a GPU: memory need not be pinned for one.

SGLang finds `install` by its entry point (the ``.dist-info`` beside this file) in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    for name in ("tensor", "zeros", "empty"):
        vars(torch)[name] = _unpinned(getattr(torch, name))
    type.__setattr__(torch.Tensor, "pin_memory", lambda tensor, *device: tensor)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made
