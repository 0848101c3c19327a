"""Measures a directory's device with nothing above it: with fio, or else with a bare loop."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from flexcache.bench.results import Unsupported
from flexcache.storage.block_io import BlockIO, Direction, Request

logger = logging.getLogger(__name__)

QUEUE_DEPTH = 32
"""I/Os in flight, the default of `ssd_queue_depth`."""


class RawDisk(ABC):
    """Writes and reads ``size`` bytes of one file past the page cache, in blocks."""

    name: str

    @abstractmethod
    def run(self, direction: Direction) -> float:
        """Write or read everything once; return GB/s."""


_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
"""Gives fio's buffers huge pages, as blocks in the host pool have: a disk may be twice as fast with
them. fio's own way needs reserved ones."""


class Fio(RawDisk):
    """fio, overwriting an existing file."""

    def __init__(self, path: Path, size: int, block_bytes: int, engine: str, *options: str) -> None:
        self.name = f"fio, {engine}"
        self._command = [
            "fio", "--name=bound", f"--filename={path / 'fio'}", f"--bs={block_bytes}",
            f"--size={size}", "--direct=1", f"--ioengine={engine}", f"--iodepth={QUEUE_DEPTH}",
            "--overwrite=1", "--output-format=json", *options,
        ]  # fmt: skip
        self.run(Direction.WRITE)  # lays the file out

    def run(self, direction: Direction) -> float:
        command = [*self._command, f"--rw={direction.value}"]
        own = os.environ.get(_TUNABLES)
        environment = {**os.environ, _TUNABLES: f"{own}:{_HUGE_PAGES}" if own else _HUGE_PAGES}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise Unsupported(f"{self.name}: {done.stderr.strip() or done.stdout.strip()}"[:500])
        answer = done.stdout[done.stdout.index("{") :]  # warnings may come before
        job = json.loads(answer)["jobs"][0][direction.value]
        return float(job["io_bytes"] / job["runtime"] / 1e6)


class BareLoop(RawDisk):
    """FlexCache's own block I/O engine with no cache around it."""

    def __init__(
        self, path: Path, size: int, block_bytes: int, io: BlockIO, syncs: bool = False
    ) -> None:
        self.name = f"bare {io.name} loop"
        self._io = io
        self._syncs = syncs
        self._offsets = range(0, size, block_bytes)
        self._fd = os.open(path / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        mapping = mmap.mmap(-1, QUEUE_DEPTH * block_bytes, flags=mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(mapping)
        self._buffers = [
            memory[i * block_bytes : (i + 1) * block_bytes] for i in range(QUEUE_DEPTH)
        ]
        for buffer in self._buffers:  # else all pages are the kernel's one shared zero page
            buffer[:] = os.urandom(block_bytes)
        self._size = size
        self.run(Direction.WRITE)

    def run(self, direction: Direction) -> float:
        left, free, busy = list(self._offsets)[::-1], list(range(QUEUE_DEPTH)), 0
        started = time.perf_counter()
        while left or busy:
            requests = []
            while left and free:
                buffer, offset = free.pop(), left.pop()
                requests.append(
                    Request(buffer, direction, self._fd, offset, [self._buffers[buffer]])
                )
            self._io.submit(requests)
            busy += len(requests)
            select.select([self._io.fileno()], [], [])
            for completion in self._io.reap():
                if completion.result != len(self._buffers[0]):
                    raise OSError(f"{direction.value}: {completion.result}")
                free.append(completion.token)
                busy -= 1
        if self._syncs and direction is Direction.WRITE:
            os.fdatasync(self._fd)
        return self._size / (time.perf_counter() - started) / 1e9


def raw_disks(
    path: Path, size: int, block_bytes: int, io: BlockIO, syncs: bool = False
) -> list[RawDisk]:
    """Return the bounds to measure: fio with each asynchronous engine that runs, or a bare loop.

    Args:
        syncs: A run that writes ends with a sync of the file.
    """
    disks: list[RawDisk] = []
    options = ("--end_fsync=1",) if syncs else ()
    for engine in ("libaio", "io_uring") if shutil.which("fio") else ():
        try:
            disks.append(Fio(path, size, block_bytes, engine, *options))
        except Unsupported as reason:  # containers often forbid io_uring
            logger.warning("%s", reason)
    return disks or [BareLoop(path, size, block_bytes, io, syncs)]
