"""Imports what an SGLang engine takes; see `preloaded`."""

from __future__ import annotations

import logging

from preloaded import make_imports
from sglang_engine import ENVIRONMENT

logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
make_imports(
    ENVIRONMENT,
    "make_models",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "flexcache.integration.sglang",
)
