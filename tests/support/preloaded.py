"""Processes that begin with their slow imports made: forked from one that has made them.

An engine's imports take several times the CPU of what a test does with the engine. The process
that makes them starts no thread and no engine.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


def make_imports(environment: Mapping[str, str], *modules: str) -> None:
    """Import modules that processes will be forked with.

    Args:
        environment: Variables that the modules read while they are imported.
    """
    os.environ.update(environment)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else each process would walk these objects, and so copy their pages


def start(
    imports: str, environment: Mapping[str, str], function: Callable[..., None], *arguments: Any
) -> ForkServerProcess:
    """Start a process that calls a module's function.

    Args:
        imports: The module that calls `make_imports`, the same for all calls of a test run.
        environment: All variables of the process.
    """
    process = _fork_server(imports).Process(
        target=_call, args=(dict(environment), function, arguments)
    )
    process.start()
    return process


@cache
def _fork_server(imports: str) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([imports])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _call(
    environment: Mapping[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
