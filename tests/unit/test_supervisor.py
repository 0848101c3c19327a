"""Starting worker processes, where that fails."""

from __future__ import annotations

import errno
import os
import subprocess

import msgspec
import pytest

from flexcache.processes import WorkerSupervisor


class Config(msgspec.Struct):
    """What the worker would be told."""


def test_a_failed_start_leaves_no_process_and_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **options))  # type: ignore[call-overload]
        return made[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "pidfd_open", fail)
    supervisor = WorkerSupervisor("disk", "this", lambda identity: Config(), ())
    assert not supervisor.start(0.0)
    (process,) = made
    assert process.returncode is not None
    assert process.stdin is not None
    assert process.stdin.closed
    assert supervisor.pid is None
    assert supervisor.restart_at is not None
