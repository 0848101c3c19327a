"""How an engine is called at its server."""

from __future__ import annotations

import os
import re
import uuid

_ANONYMOUS = re.compile(r"dp\d+")


def engine_name(engine_id: str, dp_rank: int) -> str:
    """One name per data-parallel rank; ``engine_id`` tells engines with the same ranks apart."""
    return f"{engine_id}/dp{dp_rank}" if engine_id else f"dp{dp_rank}"


def is_anonymous(name: str) -> bool:
    """Whether the name lacks an engine id, so that several engines may go by it."""
    return _ANONYMOUS.fullmatch(name) is not None


def new_engine_id() -> str:
    """An id that no other engine has; it begins with our process id, for people."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
