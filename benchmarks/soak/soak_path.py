"""Import this first to put the other benchmarks and the tests' helpers on the search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import search_path  # noqa: F401
