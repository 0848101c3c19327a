"""Threads of services: their end is known even if a wait for it was interrupted."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from flexcache.processes import ServiceThread


class _Interrupted(Exception):
    pass


def test_an_interrupted_wait_does_not_take_the_thread_for_ended() -> None:
    may_end = threading.Event()
    thread = ServiceThread(may_end.wait, "service")

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(_Interrupted):
            thread.wait(60.0)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert not thread.wait(0.0)
    may_end.set()
    assert thread.wait(60.0)


def test_a_function_that_fails_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: failures.append(hook.exc_type))
    thread = ServiceThread(int, "service", "no number")
    thread.start()
    assert thread.wait(60.0)
    thread.join()
    assert failures == [ValueError]


def test_a_thread_that_cannot_start_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", fail)
    thread = ServiceThread(int, "service")
    with pytest.raises(RuntimeError):
        thread.start()
    assert thread.wait(0.0)
