"""Processes that begin with their slow imports made: forked from one that has made them.

An engine's imports take several times the CPU of what a test does with the engine. The process
that makes them starts no thread and no engine.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_END_S = 30.0


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
    vars(gc)["unfreeze"] = lambda: None  # which vLLM calls when an engine ends


class ForkedProcess:
    """A process that calls a module's function, in a session of its own.

    It has those methods of `subprocess.Popen` that tests need.

    Args:
        imports: The module that calls `make_imports`, the same for all processes of a test run.
        environment: All variables of the process. Directories of ``PYTHONPATH`` come first.
        log: File that the output is appended to; None leaves it with the test's.
    """

    def __init__(
        self, imports: str, environment: Mapping[str, str], function: Callable[..., None],
        *arguments: Any, log: Path | None = None,
    ) -> None:  # fmt: skip
        self._process = _fork_server(imports).Process(
            target=_begin, args=(imports, dict(environment), log, function, arguments)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def call(
    imports: str, environment: Mapping[str, str], timeout_s: float,
    function: Callable[..., Any], *arguments: Any,
) -> Any:  # fmt: skip
    """Return what a module's function returns in a process of its own.

    Raises:
        AssertionError: It failed; the text is its traceback, or where each of its threads was
            when its time was over.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as stacks:
        process = ForkedProcess(
            imports, environment, _report, theirs, stacks.name, timeout_s, function, arguments
        )
        theirs.close()
        try:
            in_time = ours.poll(timeout_s + _END_S)
            failure, result = ours.recv() if in_time else ("it did not begin in time", None)
            process.wait(0 if failure else _END_S)
        except EOFError:
            failure = f"the process ended with {process.wait(_END_S)}\n{stacks.read().decode()}"
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # what it has started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not failure, failure
    return result


def _report(
    pipe: Connection, stacks: str, timeout_s: float, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    file = open(stacks, "w")  # noqa: SIM115 (for as long as the process lives)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
    try:
        pipe.send(("", function(*arguments)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some engines' threads do not end by themselves


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


def _begin(
    imports: str, environment: Mapping[str, str], log: Path | None, function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    importlib.import_module(imports)  # raises here if the fork server, which says nothing, failed
    function(*arguments)
