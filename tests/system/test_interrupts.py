"""Ctrl-C and signals that come during a call leave a cache that can be shut down."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cluster import PATIENCE_S, Cluster, running_cluster

from flexcache import KVManager
from flexcache.errors import ClosedError
from flexcache.ids import KVStatus
from flexcache.server.server import KVServer

TOKENS = np.arange(64)
BLOCKS = [0, 1, 2, 3]
NUM_INTERRUPTS = 200
LONGEST_S = 0.003


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted call may leave a task half made: the cache is checked no more."""
    monkeypatch.setattr(KVManager, "check", lambda manager: None)


class Alarm:
    """Raises once in the main thread, wherever that is, some time after `set`.

    Attributes:
        has_rung: Whether it has rung since it was last set.
        is_lost: Whether Python ignored what it raised, in a callback of the garbage collector say.
    """

    def __init__(self, raised: type[BaseException] = KeyboardInterrupt) -> None:
        self.raised = raised
        self.has_rung = self.is_lost = False

    def __enter__(self) -> Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._note
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        signal.signal(signal.SIGALRM, self._before)

    def set(self, after_s: float) -> None:
        self.has_rung = self.is_lost = False
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, *_: object) -> None:
        self.has_rung = True
        raise self.raised

    def _note(self, ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is self.raised:
            self.is_lost = True
        else:
            self._hook(ignored)


def call_until_interrupted(
    cluster: Cluster, numbers: Iterator[int], alarm: Alarm, after_s: float
) -> None:
    """Put and cancel until the alarm interrupts a call.

    It is set again if its exception was lost: hypothesis has a callback of the garbage collector.
    """
    deadline = time.monotonic() + PATIENCE_S
    alarm.set(after_s)
    try:
        while time.monotonic() < deadline:
            if alarm.has_rung:
                assert alarm.is_lost
                alarm.set(after_s)
            number = next(numbers)
            task_id, _ = cluster.manager.put_match(TOKENS + 64 * number)
            cluster.manager.launch([task_id], [cluster.slots(BLOCKS)])
            cluster.manager.cancel([task_id])
    finally:
        alarm.stop()


def answers_in_time(cluster: Cluster) -> bool:
    """Whether another thread is served."""
    asking = threading.Thread(target=cluster.manager.stats, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return not asking.is_alive()


def test_interrupted_calls_leave_the_server_to_other_threads() -> None:
    with running_cluster() as cluster:
        cluster.await_copy_thread()
        numbers, delays = itertools.count(1), random.Random(7)
        with Alarm() as alarm:
            for _ in range(NUM_INTERRUPTS):
                with pytest.raises(KeyboardInterrupt):
                    call_until_interrupted(cluster, numbers, alarm, delays.uniform(1e-4, LONGEST_S))
                assert answers_in_time(cluster)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_puts_are_whole_after_others_were_interrupted(raised: type[BaseException]) -> None:
    """The blocks of an interrupted call may be lost until its rank leaves: there are enough."""
    with running_cluster(num_cpu_blocks=2 * NUM_INTERRUPTS * len(BLOCKS)) as cluster:
        cluster.await_copy_thread()
        numbers, delays = itertools.count(1), random.Random(7)
        with Alarm(raised) as alarm:
            for _ in range(NUM_INTERRUPTS):
                # numpy.array_equal, which checks slots, takes any error for "they are not equal".
                with pytest.raises((raised, ValueError)):
                    call_until_interrupted(cluster, numbers, alarm, delays.uniform(1e-4, LONGEST_S))
                assert alarm.has_rung
                tokens = TOKENS + 64 * next(numbers)
                task_id, _ = cluster.manager.put_async(tokens, cluster.slots(BLOCKS))
                answer = cluster.manager.wait([task_id], PATIENCE_S)[task_id]
                assert answer.status is KVStatus.SUCCESS


def test_a_signal_handler_may_shut_down_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster() as cluster:
        manager = cluster.manager
        task_id, _ = manager.put_match(TOKENS)
        pass_on = KVServer.pass_on

        def shut_down_first(server: KVServer) -> None:
            monkeypatch.setattr(KVServer, "pass_on", pass_on)
            manager.shutdown()
            pass_on(server)

        monkeypatch.setattr(KVServer, "pass_on", shut_down_first)
        manager.launch([task_id], [cluster.slots(BLOCKS)])
        manager.shutdown()
        with pytest.raises(ClosedError):
            manager.put_match(TOKENS)
