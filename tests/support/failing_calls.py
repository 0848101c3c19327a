"""Errors at any line, or any method, of `flexcache.cache` and `flexcache.tasks`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import flexcache
from flexcache.tasks.engine import KVTaskEngine

_PACKAGE = Path(flexcache.__file__).parent
PARTS = tuple(f"{_PACKAGE / part}/" for part in ("cache", "tasks"))
Point = tuple[CodeType, int]
"""A line of a function that is about to be executed; its first stands for its entry too."""


class Lines:
    """Follows the lines that this thread executes in these parts, between ``with`` and its end.

    Args:
        reached: Called before each of them; what it raises comes from there.
        calls_only: Follow only the entries of functions.
    """

    def __init__(self, reached: Callable[[Point], None], calls_only: bool = False) -> None:
        self._reached = reached
        self._calls_only = calls_only

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PARTS):
            return None
        self._reached((frame.f_code, frame.f_lineno))
        return None if self._calls_only else self._executes

    def _executes(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self._reached((frame.f_code, frame.f_lineno))
        return self._executes


class FailingMethods:
    """Lets methods of all classes in these parts fail: each once, at its entry, on any thread.

    The task engine's own entrances do not fail: whatever calls them has to see to that.

    Args:
        only: Name of the methods that fail; "" for all.
    """

    def __init__(self, only: str = "") -> None:
        self._only = only
        self.failed: set[str] = set()
        """Those that have."""
        self._error: type[BaseException] | None = None
        self._thread: int | None = None
        self._undo = contextlib.ExitStack()

    def arm(self, error: type[BaseException], here_only: bool) -> None:
        """Let the next method fail that has not yet, on this thread or on any."""
        self._thread = threading.get_ident() if here_only else None
        self._error = error

    def disarm(self) -> None:
        self._error = None

    def __enter__(self) -> FailingMethods:
        for part in PARTS:
            for path in sorted(Path(part).glob("*.py")):
                module = importlib.import_module(f"flexcache.{Path(part).name}.{path.stem}")
                for found in vars(module).values():
                    is_class = isinstance(found, type) and found.__module__ == module.__name__
                    if is_class and not issubclass(found, Enum):
                        self._patch(found)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _patch(self, owner: type) -> None:
        for name, function in list(vars(owner).items()):
            is_entrance = owner is KVTaskEngine and (name == "_take_in" or not name.startswith("_"))
            if is_entrance or self._only not in ("", name):
                continue
            if isinstance(function, FunctionType):
                self._undo.callback(setattr, owner, name, function)
                setattr(owner, name, self._failing(function))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            error = self._error
            is_due = error is not None and name not in self.failed
            if is_due and self._thread in (None, threading.get_ident()) and not _is_of_loop():
                assert error is not None
                self._error = None
                self.failed.add(name)
                raise error(name)
            return function(*args, **kwargs)

        return failing


def _is_of_loop() -> bool:
    """Whether the server's loop only asks what there is to do: that failure ends the server."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in ("_next_due", "begin_study"):
        frame = frame.f_back
    return frame is not None
