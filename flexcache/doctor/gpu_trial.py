"""GPU trial: a program that uses a GPU as a rank does, and answers with a `GpuTried`.

Copies run in the memory that it is given, which another process made like a pool's. A pattern is
compared in several places of it, then copies over all of it are timed.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from ctypes import c_uint8
from tempfile import TemporaryFile

import msgspec
import numpy as np
import torch

from flexcache.doctor.gpu_driver import (
    COPY_BYTES,
    DIRECTIONS,
    ChildReport,
    GpuTried,
    TrialRequest,
    WayTried,
    ask_driver,
)
from flexcache.errors import FlexCacheError, NoDirectPathError
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.pieces import PAGE_BYTES
from flexcache.transfer.copier import CopyPermit, Runs
from flexcache.transfer.copy_ways import (
    PROBE_BYTES,
    CopyWay,
    ScratchMemory,
    Verdict,
    check_way,
    describe,
)
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.direct.ops import open_direct_io

_NUM_PLACES = 5
_ROUNDS = 5


class Trial:
    """Copies between a GPU and a mapped segment."""

    def __init__(
        self, device: torch.device, copier: CudaCopier, segment: HostSegment, report: ChildReport
    ) -> None:
        self._device = device
        self._copier = copier
        self._segment = segment
        self._report = report

    def run(self, directories: Sequence[str]) -> GpuTried:
        """Try all ways of copying, and I/O past DRAM in these directories.

        Raises:
            RuntimeError: The GPU failed in the middle.
        """
        self._report.begin("attach the pool, as a rank does")
        try:
            self._copier.attach(self._segment)
        except (FlexCacheError, RuntimeError) as refusal:
            return GpuTried([_tried(v) for v in self._copier.verdicts], refusal=describe(refusal))
        try:
            size = self._segment.size
            memory = (c_uint8 * size).from_address(self._segment.address)
            on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
            scratch = ScratchMemory(np.ctypeslib.as_array(memory), on_device, is_reachable=True)
            ways = [self._try(verdict, scratch) for verdict in self._copier.verdicts]
            used = [gpu.used_bytes for gpu in ask_driver().gpus]
            past_dram = {each: self._try_past_dram(each) for each in directories}
            return GpuTried(ways, self._copier.is_pinned, used_bytes=used, past_dram=past_dram)
        finally:
            self._copier.close()

    def _try(self, verdict: Verdict, scratch: ScratchMemory) -> WayTried:
        """Copy in a way that passed the self-test."""
        if not verdict.passed:
            return _tried(verdict)
        way = verdict.way
        self._report.begin(f"{way.value}: compare bytes")
        for start in np.linspace(0, self._segment.size - PROBE_BYTES, _NUM_PLACES, dtype=np.int64):
            place = slice(start // PROBE_BYTES * PROBE_BYTES, None)
            here = ScratchMemory(scratch.host[place], scratch.device[place], scratch.is_reachable)
            verdict = check_way(way, lambda runs, kind: self._copy(runs, kind, way), here)
            if not verdict.passed:
                return _tried(verdict)
        rates = {}
        for direction in DIRECTIONS:
            self._report.begin(f"{way.value}: time {direction}")
            kind = OpKind[direction]
            rates[direction] = [self._rate(way, kind, size, scratch) for size in COPY_BYTES]
        return WayTried(way.value, rates=rates)

    def _try_past_dram(self, directory: str) -> str:
        """Return why no file in the directory can be read past DRAM, or ""."""
        self._report.begin(f"SSD past DRAM in {directory}")
        try:
            with TemporaryFile(dir=directory, buffering=0) as file:
                file.write(os.urandom(PAGE_BYTES))
                os.fsync(file.fileno())
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
                fds = [file.fileno()]
                io = open_direct_io(
                    self._device, self._copier, fds, self._segment.stride, CopyPermit()
                )
                io.close()
        except (OSError, NoDirectPathError) as refusal:
            return str(refusal)
        return io.through_host

    def _rate(self, way: CopyWay, kind: OpKind, size: int, scratch: ScratchMemory) -> float:
        """Copy all of the memory in blocks of ``size`` bytes, in random order; return GB/s."""
        random = np.random.default_rng(0)
        count = self._segment.size // size
        to, start = (random.permutation(count) * size for _ in range(2))
        runs = scratch.runs(kind, to, start, np.full(count, size, np.int64))
        seconds = []
        for _ in range(1 + _ROUNDS):
            began = time.perf_counter()
            self._copy(runs, kind, way)
            seconds.append(time.perf_counter() - began)
        return count * size / min(seconds[1:]) / 1e9

    def _copy(self, runs: Runs, kind: OpKind, way: CopyWay) -> None:
        self._copier.start(runs, kind, None, way=way).synchronize()


def _tried(verdict: Verdict) -> WayTried:
    failures = {kind.name: failure for kind, failure in verdict.failures.items()}
    return WayTried(verdict.way.value, verdict.missing, failures)


def main() -> None:
    report = ChildReport()
    request = msgspec.json.decode(sys.argv[1], type=TrialRequest)
    report.begin("map the memory")
    ask_driver()
    device = torch.device("cuda", request.gpu)
    with HostSegment.open(request.segment) as segment:
        copier = CudaCopier(device)
        segment.map(node=copier.numa_node)
        trial = Trial(device, copier, segment, report)
        report.answer(msgspec.json.encode(trial.run(request.directories)))


if __name__ == "__main__":
    main()
