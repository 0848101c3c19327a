"""Processes: descriptors, forks, threads and ZMQ contexts that end, children that are restarted."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

import msgspec
import zmq

from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_MOST = 1 << 20  # some container runtimes allow 2**30: programs that close each take minutes


def raise_limit() -> int:
    """Raise the soft limit as far as the hard one allows; return it. It is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux has no unlimited one
    limit = max(soft, min(hard, _MOST))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class Forked(Protocol):
    """What a child of a fork must let go of.

    A fork copies descriptors and mappings. With them a child, such as one of `multiprocessing`,
    would keep locks and memory after its parent has ended, and what it closes would end the
    parent's work.
    """

    def forked(self) -> None:
        """Let go, in a child, of what is the parent's, and change nothing that both see.

        Takes no lock: it may be held by a thread that the child does not have.
        """


_things: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_of_forks(thing: Forked) -> None:
    """Call its `forked` in every child that is forked from now on."""
    _things.add(thing)


def _forked() -> None:
    for thing in list(_things):
        thing.forked()


os.register_at_fork(after_in_child=_forked)


class ServiceThread(threading.Thread):
    """Runs a function. `wait` holds where `join` does not: up to Python 3.12, an exception during a
    `join`, as that of Ctrl-C, may leave a thread that runs marked as ended (bpo-45274)."""

    def __init__(self, target: Callable[..., Any], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._over = threading.Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: There may be no more threads; its end has come.
        """
        try:
            super().start()
        except BaseException:
            self._over.set()
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether the function has come to its end.

        In a child of a fork there is no such thread.
        """
        return os.getpid() != self._pid or self._over.wait(timeout)


_END_S = 5.0


def end_context(context: zmq.Context[Any]) -> None:
    """Terminate a context whose sockets are closed, without waiting for ever.

    Where connections end while a ROUTER socket is closed, libzmq 4.3.5 sometimes never returns. Its
    threads are then left behind; they hold no address.
    """
    ending = ServiceThread(context.term, "zmq-end")
    try:
        ending.start()
    except RuntimeError:  # the interpreter ends, or there may be no more threads
        context.term()
        return
    if not ending.wait(_END_S):
        log_event(logger, logging.WARNING, "zmq_context_left", waited_s=_END_S)


# A worker that fails at its start must not take a processor with its restarts.
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_STABLE_AFTER_S = 30.0


class WorkerSupervisor:
    """Keeps one child process running. Driven by the event loop's thread; the time is handed in.

    Args:
        name: Name of the child: ``disk``, ``remote``, ``decider``.
        module: Module that it runs.
        make_config: Makes the config that the child reads from its standard input, for a socket
            identity; called for every start.
        keep_fds: Descriptors that the child inherits.
    """

    def __init__(
        self,
        name: str,
        module: str,
        make_config: Callable[[str], msgspec.Struct],
        keep_fds: Sequence[int],
    ) -> None:
        self.name = name
        self._module = module
        self._make_config = make_config
        self._keep_fds = tuple(keep_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._started_s = 0.0
        self.num_starts = 0
        self.restart_at: float | None = 0.0
        self.pidfd = -1
        self.identity = ""
        self.is_ready = False
        """Whether it has said that it serves."""
        tell_of_forks(self)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, now: float) -> bool:
        """Start the worker; returns whether it runs. A failed start is retried with back-off."""
        try:
            self._start(now)
        except OSError as error:
            log_event(logger, logging.ERROR, "worker_not_started", worker=self.name, error=error)
            # It may run, but cannot be watched, or has not got its config.
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                assert self._process.stdin is not None
                _close(self._process.stdin)
                self._process = None
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
            self._plan_restart(now)
            return False
        return True

    def _start(self, now: float) -> None:
        self.num_starts += 1
        self.restart_at = None
        self._started_s = now
        # Known to the worker alone, so that no other process can send in its name.
        self.identity = f"{self.name}-{secrets.token_hex(16)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, self.name],  # the name is for `ps`
            stdin=subprocess.PIPE,
            pass_fds=self._keep_fds,
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        config = msgspec.json.encode(self._make_config(self.identity))
        try:
            self._process.stdin.write(config + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died already: its pidfd reports that

    def died(self, now: float) -> str:
        """Handle the death of the worker and plan the next start. Returns how it ended."""
        assert self._process is not None and self._process.stdin is not None
        code = self._process.wait()
        _close(self._process.stdin)
        os.close(self.pidfd)
        self._process, self.pidfd, self.identity, self.is_ready = None, -1, "", False
        if now - self._started_s > _STABLE_AFTER_S:
            self._backoff_s = _FIRST_BACKOFF_S
        self._plan_restart(now)
        return f"killed by signal {-code}" if code < 0 else f"exited with {code}"

    def _plan_restart(self, now: float) -> None:
        self.restart_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    def hurry(self, now: float) -> None:
        """Forget past deaths: a worker that is away is restarted now, and soon after another."""
        self._backoff_s = _FIRST_BACKOFF_S
        if self.restart_at is not None:
            self.restart_at = min(self.restart_at, now)

    def kill(self) -> None:
        """Kill the worker; `died` must be called when its pidfd reports the death."""
        if self._process is not None:
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """End the worker for good: wait for it, since it was asked to stop before, then kill it."""
        self.restart_at = None
        if self._process is None:
            return
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            log_event(
                logger, logging.WARNING, "worker_killed", worker=self.name, pid=self.pid,
                reason="did not stop", waited_s=timeout,
            )  # fmt: skip
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        _close(self._process.stdin)
        os.close(self.pidfd)
        self._process, self.pidfd, self.is_ready = None, -1, False

    def forked(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            _close(self._process.stdin)  # else the worker could not see its parent's end


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it had not read all of it when it died
        pipe.close()
