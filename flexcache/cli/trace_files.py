"""Arguments and helpers that the trace commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flexcache.errors import TraceError

if TYPE_CHECKING:
    from flexcache.replay.reader import Trace

TracePaths = Annotated[
    list[Path], typer.Argument(help="Files of one trace, or the directory that contains them.")
]


def open_trace(paths: Sequence[Path]) -> Trace:
    """Open FlexCache's own trace, or one file in Mooncake's format."""
    from flexcache.replay.mooncake import MooncakeTrace, is_mooncake
    from flexcache.replay.reader import RecordedTrace

    if len(paths) == 1 and is_mooncake(paths[0]):
        return MooncakeTrace(paths[0])
    return RecordedTrace(paths)


def write_json(path: Path, content: object) -> None:
    """Write JSON to a file.

    Raises:
        TraceError: The file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(content))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
