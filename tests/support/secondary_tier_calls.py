"""Calls that tests make on the FlexCache tier of an engine with vLLM's OffloadingConnector."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from flexcache.processes import WorkerSupervisor
from flexcache.tasks.instructions import DISK

PATIENCE_S = 120.0
_start = WorkerSupervisor.start


def _host(engine: Any) -> Any:
    manager = engine.scheduler.connector.connector_scheduler.manager
    return manager.secondary_tiers[0].host


def keep_names(engine: Any) -> None:
    """Have the tier find what it stored before vLLM was reset: only DRAM was to be dropped."""
    for tier in engine.scheduler.connector.connector_scheduler.manager.secondary_tiers:
        tier._epoch = b""


def until_up(engine: Any) -> None:
    """Wait for the tier's workers."""
    _until(lambda: not _host(engine)._pool.missing())


def lose_disk_worker_in_a_job(engine: Any) -> None:
    """Kill the disk worker when it has something to do, and keep it from being restarted."""

    def refuse(supervisor: WorkerSupervisor, now: float) -> bool:
        supervisor.restart_at = now + 0.05
        return False

    WorkerSupervisor.start = refuse  # type: ignore[assignment, method-assign]
    pid = _host(engine).pids()[DISK]
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        _until(lambda: _host(engine).tiers.num_open_jobs)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()


def have_disk_worker_again(engine: Any) -> None:
    WorkerSupervisor.start = _start  # type: ignore[method-assign]
    until_up(engine)


def hits(engine: Any) -> dict[str, int]:
    """Chunks that were loaded, by worker."""
    with _host(engine).use() as tiers:
        tiers.check()
        return dict(tiers.hits)


def dropped(engine: Any) -> dict[str, int]:
    """Chunks that were not stored, by reason."""
    with _host(engine).use() as tiers:
        return dict(+tiers.dropped)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
