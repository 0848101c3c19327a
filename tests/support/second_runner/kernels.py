"""Triton's interpreter as vLLM's kernels need it on a CPU: fast enough, and in place."""

from __future__ import annotations

import inspect
import itertools
import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

_translated: set[int] = set()
"""Modules with Triton's language in which the interpreter has put its own functions."""


def prepare(backend: str) -> None:
    """Announce a backend, and take over how kernels are run. Idempotent."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, for its own kernels
    import triton.backends
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    triton.knobs.runtime.interpret = True  # whatever environment a forked process is given
    triton.backends.backends[backend] = SimpleNamespace(driver=_Driver)
    GridExecutor.__call__ = _run
    # A check of Triton's own, which takes a quarter of the time.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


class _Driver:
    """What vLLM asks of Triton's driver when it imports its kernels."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)


def _run(executor: Any, *arguments: Any, **options: Any) -> None:
    """Run all programs of a kernel, on the tensors themselves.

    The interpreter's own way suits GPUs: it ends by copying each argument's whole memory back to
    itself. Meanwhile another thread or process may write to a KV tensor. It also exchanges the
    functions of Triton's language before each kernel and restores them after it, which takes longer
    than most kernels; here they stay.
    """
    from triton.runtime import interpreter

    kernel, builder = executor.fn, interpreter.interpreter_builder
    parameters = _parameters(kernel)
    known = {name: value for name, value in options.items() if name in parameters}
    for hook in executor.pre_run_hooks:
        hook(*arguments, **known)
    _translate(kernel)
    bound = inspect.getcallargs(kernel, *arguments, **known)
    for name in bound.keys() - set(executor.constexprs):
        bound[name] = interpreter._implicit_cvt(bound[name])
    grid = executor.grid(bound) if callable(executor.grid) else executor.grid
    extents = (*grid, 1, 1)[:3]
    builder.set_grid_dim(*extents)
    for place in itertools.product(*map(range, extents)):
        builder.set_grid_idx(*place)
        kernel(**bound)


@cache
def _parameters(kernel: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


def _translate(kernel: Any) -> None:
    """Have the language that a kernel sees run in the interpreter from now on."""
    from triton.runtime import interpreter

    languages = {
        id(value)
        for value in kernel.__globals__.values()
        if value is interpreter.tl or value is interpreter.tl.core
    }
    if not languages <= _translated:
        _translated.update(languages)
        interpreter._patch_lang(kernel)
