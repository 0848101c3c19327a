"""Import this first: puts the benchmarks, their peers and the tests' helpers on the search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import search_path  # noqa: F401
