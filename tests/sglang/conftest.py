"""Tests on a real SGLang; without it they skip."""

from __future__ import annotations

from pathlib import Path

collect_ignore: list[str] = []
try:
    import sglang  # noqa: F401
except ImportError:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
