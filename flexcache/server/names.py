"""How an engine is called at its server."""

from __future__ import annotations


def engine_name(engine_id: str, dp_rank: int) -> str:
    """One name per data-parallel rank; ``engine_id`` tells engines with the same ranks apart."""
    return f"{engine_id}/dp{dp_rank}" if engine_id else f"dp{dp_rank}"
