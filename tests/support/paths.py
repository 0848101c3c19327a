"""Places in the repository that tests and benchmarks need."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
MODELS = Path(os.environ.get("MODELS_DIR", ROOT / ".models"))
"""Models that `make_models` creates."""
