"""Chooses the block I/O engine."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.storage.block_io.base import BlockIO
from flexcache.storage.block_io.threads import ThreadedBlockIO

logger = logging.getLogger(__name__)

_PROBE = """
import errno, resource, select, tempfile
from flexcache.storage.block_io.base import Direction, Request
from flexcache.storage.block_io.uring import UringBlockIO
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
io, page, results = UringBlockIO(2), [memoryview(bytearray(16))], {}
with tempfile.TemporaryFile() as file:
    io.submit([
        Request(1, Direction.WRITE, file.fileno(), 0, page), Request(2, Direction.READ, -1, 0, page)
    ])
    while len(results) < 2:
        select.select([io.fileno()], [], [])
        results.update((completion.token, completion.result) for completion in io.reap())
    io.close()
if results != {1: 16, 2: -errno.EBADF}:
    raise RuntimeError(f"the liburing binding reports wrong results: {results}")
"""


def io_uring_problem() -> str | None:
    """Return why io_uring cannot be used here; None if it can.

    Tries it in a child process, because a binding built for another CPU dies by a signal (SIGILL
    without AVX-512). Nothing else in FlexCache imports the binding before this has succeeded.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return "the probe did not answer"
    if probe.returncode == 0:
        return None
    if probe.returncode < 0:
        name = signal.Signals(-probe.returncode).name
        return f"the liburing binding dies by {name} on this CPU; liburing==2024.5.3 builds for it"
    return probe.stderr.strip().rsplit("\n", 1)[-1] or f"the probe exited with {probe.returncode}"


def open_block_io(engine: str, depth: int) -> BlockIO:
    """Open ``io_uring``, ``threads``, or for ``auto`` the first of them that works here."""
    if engine == "threads":
        return ThreadedBlockIO(depth)
    problem = io_uring_problem()
    if problem is None:
        from flexcache.storage.block_io.uring import UringBlockIO

        return UringBlockIO(depth)
    if engine == "io_uring":
        if problem.startswith(MissingDependencyError.__module__):
            raise MissingDependencyError(problem)
        raise ConfigError(f"io_engine = 'io_uring': cannot be used here: {problem}")
    log_event(
        logger, logging.WARNING, "io_uring_unusable", problem=problem, effect="I/O runs on threads",
        remedy="run `flexcache doctor` for details",
    )  # fmt: skip
    return ThreadedBlockIO(depth)
