"""Fixtures that several GPU tests share."""

from gpu_machines import machine

__all__ = ["machine"]
