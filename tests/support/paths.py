"""Places in the repository that tests and benchmarks need."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
MODELS = Path(os.environ.get("MODELS_DIR", ROOT / ".models"))
"""Models that `make_models` creates."""


def python_path(*directories: Path | str) -> str:
    """Return a ``PYTHONPATH`` of directories, then the tests' own, which may name another vLLM."""
    own = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, directories), *([own] if own else [])])
