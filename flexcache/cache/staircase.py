"""Staircases: when the blocks of a run were last used.

Uses begin at a run's start and end anywhere, so a later one covers earlier ones up to its end:

    run     |0------------------9|
    steps   |---day 5---|--day 3-|      its last four blocks were last used on day 3

A step is its end, its time, and what else is known of its blocks. Ends rise, times do not.
"""

from __future__ import annotations

from typing import TypeVar

Step = TypeVar("Step", tuple[int, float, int], tuple[int, int])


def cover(steps: list[Step], step: Step) -> bool:
    """Put a step over those up to its end, but for later ones; return whether that changes any.

    Amortised O(1).
    """
    length, time = step[0], step[1]
    kept = 0
    while kept < len(steps) and steps[kept][1] > time:
        kept += 1
    if kept and steps[kept - 1][0] >= length:
        return False
    covered = kept
    while covered < len(steps) and steps[covered][0] <= length:
        covered += 1
    if covered == kept and covered < len(steps) and steps[covered][1:] == step[1:]:
        return False
    steps[kept:covered] = [step]
    return True


def cut(steps: list[Step], length: int) -> None:
    """Drop what the steps say of blocks from ``length`` on."""
    while steps and (steps[-2][0] if len(steps) > 1 else 0) >= length:
        steps.pop()
    if steps and steps[-1][0] > length:
        steps[-1] = (length, *steps[-1][1:])
