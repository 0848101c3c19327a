"""A copier whose steps fail or hang as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer.workers.copy_cpu import CpuCopier


class DriverFault(Exception):
    """An error of a class unknown to the project."""


class Landed:
    """The completion of a copy, whose query may fail."""

    def __init__(self, copier: FailingCopier) -> None:
        self._copier = copier

    def query(self) -> bool:
        self._copier.reach("query")
        return True

    def wait(self) -> None:
        self._copier.reach("wait")


class FailingCopier:
    """Copies on the CPU that complete later; each step may fail or hang."""

    def __init__(self) -> None:
        self._copier = CpuCopier()
        self.fails_at: set[str] = set()
        self.is_sticky = False
        self.num_closed = 0
        self.hangs_at: dict[str, threading.Event] = {}
        self.reached: set[str] = set()

    def reach(self, step: str) -> None:
        self.reached.add(step)
        if step in self.hangs_at:
            self.hangs_at[step].wait()
        if step in self.fails_at:
            if self.is_sticky:
                self.fails_at = {"attach", "start", "query", "wait", "close"}
            raise DriverFault("an illegal memory access was encountered")

    def attach(self, segment: HostSegment, after_each_step: Callable[[], None]) -> None:
        self.reach("attach")
        after_each_step()

    def fence(self) -> None:
        pass

    def start(
        self, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray, kind: OpKind,
        after: None,
    ) -> Landed:  # fmt: skip
        self.reach("start")
        self._copier.start(destinations, sources, sizes, kind, after)
        return Landed(self)

    def close(self) -> None:
        self.num_closed += 1
        self.reach("close")
