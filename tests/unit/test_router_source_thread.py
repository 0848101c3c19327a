"""The thread that follows a publisher."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from flexcache.router.feed import Item, SourceThread
from flexcache.router.fleet import EventSource


class EndsAtOnce(threading.Event):
    """Once it is set, the thread that looks at it has ended before `set` returns."""

    def __init__(self, source: SourceThread) -> None:
        super().__init__()
        self._source = source

    def set(self) -> None:
        super().set()
        self._source.join()


def test_a_thread_that_ends_at_once_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: queue.Queue[Item] = queue.Queue(1)
    source = EventSource(f"ipc://{tmp_path / 'nobody'}")
    failed = threading.Event()

    def fail(thread: SourceThread) -> None:
        if not failed.is_set():
            thread._stopping = EndsAtOnce(thread)
            failed.set()
        raise OSError("no descriptors left")

    monkeypatch.setattr(SourceThread, "_follow", fail)
    thread = SourceThread(source, items, lambda: None)
    assert failed.wait(60)
    thread.stop()
    thread.stop()
    thread.join()
