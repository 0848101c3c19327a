from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PATIENCE_S
from engine_memory import memory

__all__ = ["memory"]


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_dir() -> Iterator[None]:
    """Put sockets where no other run on this machine does. Their paths must be short."""
    path = tempfile.mkdtemp(prefix="fc-")
    os.environ["XDG_RUNTIME_DIR"] = path
    yield
    del os.environ["XDG_RUNTIME_DIR"]
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Check that no thread, descriptor, process or socket file of ours outlives a test by long."""
    before = _ours()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while _ours() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _ours() == before


def _ours() -> dict[str, list[str]]:
    from flexcache.protocol.endpoints import runtime_dir

    return {
        "threads": [t.name for t in threading.enumerate() if "flexcache" in t.name],
        "descriptors": _descriptors(),
        "children": _children(),
        "processes": _processes(),
        "files": sorted(str(path) for path in runtime_dir().iterdir()),
    }


def _descriptors() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return sorted(t for t in found if "flexcache" in t or "pidfd" in t or "io_uring" in t)


def _children() -> list[str]:
    """Return our children, including those that ended and were not waited for."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a native client's thread has ended meanwhile
            found.update((task / "children").read_text().split())
    return sorted(found)


def _processes() -> list[str]:
    """Return all processes with our runtime directory: servers are not children of ours.

    A server that a test no longer waits for may be just starting.
    """
    ours = b"XDG_RUNTIME_DIR=" + os.environb[b"XDG_RUNTIME_DIR"] + b"\0"
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if ours in environment.read_bytes():
                found.append(environment.parent.name)
    return sorted(found)
