"""Process-wide facilities: the limit of descriptors, forks, threads whose end can be waited for."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

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
