"""Findings: the lines of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. An error is a fault that was not repaired.

    Attributes:
        remedy: What to do.
        details: Lines of text to show as they are.
    """

    level: Level
    text: str
    remedy: str = ""
    details: str = ""


def ok(text: str, details: str = "") -> Finding:
    return Finding(Level.OK, text, details=details)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def error(text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, text, remedy)


def in_gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
