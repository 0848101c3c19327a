"""Terminal output shared by the subcommands of `flexcache`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from flexcache.errors import FlexCacheError, InternalError


@contextlib.contextmanager
def user_errors(console: Console | None = None) -> Iterator[None]:
    """Print user errors without a traceback; exit status 1."""
    try:
        yield
    except InternalError:
        raise
    except FlexCacheError as error:
        (console or Console()).print(f"[red]error[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


_UNBOUNDED_WIDTH = 180
"""Width of output to a file or a pipe, in characters, which need not fit a terminal."""


def wide_console(console: Console) -> Console:
    """Return the console, or a wide one if it is no terminal."""
    return console if console.is_terminal else Console(width=_UNBOUNDED_WIDTH)
