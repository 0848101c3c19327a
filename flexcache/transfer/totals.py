"""Counters per kind of op."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OpTotals:
    """What ops of one kind did since the start."""

    ops: int = 0
    failed_ops: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Time during which at least one was running: bytes / seconds is what they reach together."""
    running: int = 0
    busy_since_s: float = 0.0

    def report(self) -> dict[str, float]:
        return {
            "ops": self.ops,
            "failed_ops": self.failed_ops,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }

    def started(self, now: float) -> None:
        if self.running == 0:
            self.busy_since_s = now
        self.running += 1

    def ended(self, now: float) -> None:
        self.running -= 1
        if self.running == 0:
            self.seconds += now - self.busy_since_s
