"""Import this to put the tests' helpers and the benchmarks of peers on the search path."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "peers"), str(HERE.parent / "tests" / "support")]
