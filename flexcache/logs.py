"""Logs: one line per change of state, the same fields as text and as JSON.

Text is `event key=value ...`, for people and logfmt parsers. In an engine's process the engine's
handlers print that text; FlexCache's own processes, a server and its workers, are set up here.
Events of single requests are not changes of state: they belong in traces, or at DEBUG.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone

_MAX_NOTED = 64
_MAX_NOTED_CHARACTERS = 500  # a peer may have sent what is logged
_NEEDS_QUOTES = re.compile(r'[\s="\\]|[^ -~]|^$')


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Content of a log record. ``fields`` that are None are left out."""

    name: str
    fields: dict[str, object]

    def __str__(self) -> str:
        pairs = (f"{key}={_as_text(value)}" for key, value in self.fields.items())
        return " ".join((self.name, *pairs))


@dataclass(frozen=True, slots=True)
class NotedEvent:
    """A warning or an error of this process: seconds since 1970, and the log line's parts."""

    time: float
    level: str
    logger: str
    text: str


_noted: deque[NotedEvent] = deque(maxlen=_MAX_NOTED)


def noted_events() -> list[NotedEvent]:
    """Return the last warnings and errors that this process has logged, the latest first."""
    return list(_noted)[::-1]


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    /,
    *,
    exc_info: bool | BaseException = False,
    **fields: object,
) -> None:
    """Log a change of state.

    Args:
        event: What has happened, in the past tense: ``worker_died``.
        exc_info: Add the traceback of the exception being handled, or of this one.
        fields: Plain values; text is quoted where it needs to be.
    """
    if logger.isEnabledFor(level):
        said = LogEvent(event, {key: value for key, value in fields.items() if value is not None})
        logger.log(level, said, exc_info=exc_info, stacklevel=2)
        if level >= logging.WARNING:
            # As text: an exception among the fields would keep its frames.
            text = str(said)
            if (error := sys.exc_info()[1] if exc_info is True else exc_info or None) is not None:
                text += f" ({type(error).__name__}: {error})"
            name, text = logging.getLevelName(level), text[:_MAX_NOTED_CHARACTERS]
            _noted.append(NotedEvent(time.time(), name, logger.name, text))


def set_up_logging(level: str, log_format: str) -> None:
    """Log to standard error, in one of FlexCache's own processes.

    Args:
        level: Level of the `flexcache` logger; that of other libraries is WARNING.
        log_format: See `CacheConfig.log_format`.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("flexcache").setLevel(level)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line: ``ts`` (ISO 8601, UTC), ``level``,
    ``logger``, ``event``, ``fields``, and ``exc`` if there is a traceback. If the record is not a
    `LogEvent`, the whole message is the event."""

    def format(self, record: logging.LogRecord) -> str:
        said = record.msg
        event = said if isinstance(said, LogEvent) else LogEvent(record.getMessage(), {})
        content: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "event": event.name,
            "fields": event.fields,
        }
        if record.exc_info:
            content["exc"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # As JSON, so that the record stays on one line whatever a peer has put into it.
    return json.dumps(text) if _NEEDS_QUOTES.search(text) else text
