"""Forks of a process that uses a cache: the child keeps nothing of it.

A fork copies descriptors and mappings. With them a child, such as one of `multiprocessing`, would
keep locks and memory after its parent has ended, and what it closes would end the parent's work.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
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
