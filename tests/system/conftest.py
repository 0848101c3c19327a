from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_dir() -> Iterator[None]:
    """Sockets go where no other run on this machine puts any. Their paths must be short."""
    path = tempfile.mkdtemp(prefix="fc-")
    os.environ["XDG_RUNTIME_DIR"] = path
    yield
    del os.environ["XDG_RUNTIME_DIR"]
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread, descriptor, child or socket file of ours outlives a test."""
    from flexcache.server.runtime import runtime_dir

    def descriptors() -> list[str]:
        found = []
        for link in Path("/proc/self/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if "flexcache" in target or "pidfd" in target or "io_uring" in target:
                found.append(target)
        return sorted(found)

    def children() -> set[str]:
        path = Path("/proc/self/task")
        found: set[str] = set()
        for task in path.iterdir():
            with contextlib.suppress(OSError):  # a native client's thread has ended meanwhile
                found.update((task / "children").read_text().split())
        return found

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "flexcache" in thread.name]

    before = (descriptors(), children(), sorted(runtime_dir().iterdir()))
    threads_before = threads()
    yield
    assert threads() == threads_before
    assert (descriptors(), children(), sorted(runtime_dir().iterdir())) == before
