"""The waiting part of an event loop: sockets, ended processes, wake-ups. It knows no cache."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable

import zmq

from flexcache.server.router_socket import RouterSocket

EndReport = Callable[[float], None]
"""Called with the time when a process has ended."""

_SPIN_S = 0.0002
_LONGEST_SLEEP_S = 1.0
_POLL_INTERVAL_S = 0.002  # how late a death or a worker is seen while clients keep the loop busy


class Reactor:
    """Lets one thread wait for events. `wake` and `stop` may be called on any thread.

    Attributes:
        stopping: Whether the loop should end.
        spins: Whether to look for the main socket's next message for a moment before sleeping,
            since waking up takes longer than most requests. Only in a process that has no other
            use for the interpreter.
        wakes_at_s: When the present wait ends by itself, as its loop has planned it.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.spins = False
        self.wakes_at_s = math.inf
        self._poller = zmq.Poller()
        self._wake_fd = -1
        self._pidfds: dict[int, EndReport] = {}
        self._processes: dict[bytes, int] = {}
        """Pidfds that were opened here, by name."""
        self._main_socket: RouterSocket | None = None
        self._spin_until_s = 0.0
        self._poll_due_s = 0.0

    def open(self, main_socket: RouterSocket | None = None) -> None:
        """Wait for this socket from now on, if given, and make the loop ready to be woken."""
        if main_socket is not None:
            self._main_socket = main_socket
            self.add_socket(main_socket)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def add_socket(self, socket: RouterSocket) -> None:
        """End a wait when the socket has a message."""
        self._poller.register(socket.zmq_socket, zmq.POLLIN)

    # -- any thread ------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the current or the next wait."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def wake_by(self, due_s: float | None) -> None:
        """End the wait early if something is due before it would end by itself.

        Must be called under the lock under which the wait was planned.
        """
        if due_s is not None and due_s < self.wakes_at_s:
            self.wakes_at_s = due_s
            self.wake()

    def stop(self) -> None:
        """Have the loop end. Safe in a signal handler."""
        self.stopping = True
        self.wake()

    # -- processes -------------------------------------------------------------------------------

    def watch_pidfd(self, pidfd: int, ended: EndReport) -> None:
        """Report the end of a process whose pidfd the caller owns."""
        self._pidfds[pidfd] = ended
        self._poller.register(pidfd, zmq.POLLIN)

    def unwatch_pidfd(self, pidfd: int) -> None:
        """Stop watching; must be called before the pidfd is closed."""
        del self._pidfds[pidfd]
        self._poller.unregister(pidfd)

    def watch_process(self, name: bytes, pid: int, ended: EndReport) -> None:
        """Report the end of a process, if it can be seen from this pid namespace."""
        with contextlib.suppress(OSError, OverflowError):
            pidfd = self._processes[name] = os.pidfd_open(pid)
            self.watch_pidfd(pidfd, ended)

    def unwatch_process(self, name: bytes) -> None:
        """Stop watching a process, which may live on."""
        pidfd = self._processes.pop(name, None)
        if pidfd is not None:
            self.unwatch_pidfd(pidfd)
            os.close(pidfd)

    # -- the loop's thread -----------------------------------------------------------------------

    def wait(self, next_due: Callable[[float], float | None]) -> list[EndReport]:
        """Wait until there is something to do, and return the reports of ended processes.

        Args:
            next_due: Gets the time; returns when the wait has to end, or None.
        """
        now = time.monotonic()
        is_due = now >= self._poll_due_s
        if not is_due and self._message_comes_soon():
            return []
        self._poll_due_s = now + _POLL_INTERVAL_S
        ready = self._poller.poll(0 if is_due else self._patience_ms(next_due(now), now))
        ended = []
        for source, _ in ready:
            if source == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif source in self._pidfds:
                ended.append(self._pidfds[source])
        return ended

    def took_message(self) -> None:
        """The loop has just taken a message: more may follow at once."""
        if self.spins:
            self._spin_until_s = time.monotonic() + _SPIN_S

    def _message_comes_soon(self) -> bool:
        socket = self._main_socket
        while socket is not None and time.monotonic() < self._spin_until_s:
            if socket.has_message():
                return True
        return False

    def _patience_ms(self, due: float | None, now: float) -> int | None:
        if self.spins:  # a signal may come to another thread than this
            due = now + _LONGEST_SLEEP_S if due is None else min(due, now + _LONGEST_SLEEP_S)
        return None if due is None else max(0, int((due - now) * 1000) + 1)

    def close(self) -> None:
        """Idempotent. Processes must not be watched any more."""
        if self._wake_fd >= 0:
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)
