"""Fixtures that several unit tests share."""

from engine_memory import memory

__all__ = ["memory"]
