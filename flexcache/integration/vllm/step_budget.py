"""Decides which loads from DRAM are short enough to run within a step that others compute in.

Between steps such a load would cost its request a step in which it only waits; within the step it
costs all requests of the step at most what it takes. So it runs there if the step is much longer,
judged by recent steps and loads.

Pure: the time is handed in.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable

SHARE = 0.25
"""Part of a step that all loads within it may take. Most of it is hidden: layers are computed while
later ones are copied."""
_SIZES_PER_OCTAVE = 4  # of steps that are told apart
_NUM_STEPS = 16  # recent ones, of each size
_MIN_STEPS = 2  # one alone may have compiled something, or waited
_NUM_LOADS = 16  # recent readings of the counters
_MOST_STEPS_AHEAD = 8  # vLLM launches fewer before the first has ended


class StepTimes:
    """Durations of steps of about the same number of tokens."""

    def __init__(self) -> None:
        self._launched: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS_AHEAD)
        """Tokens and times of the steps that were launched and have not ended."""
        self._last_end_s = 0.0
        self._seconds: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_STEPS)
        )

    def begin(self, num_tokens: int, now: float) -> None:
        """Record that a step of ``num_tokens`` is launched, maybe while others run."""
        self._launched.append((num_tokens, now))

    def end(self, now: float) -> None:
        """Record that the oldest step has ended. It began when the one before it had."""
        if self._launched:
            num_tokens, launched_s = self._launched.popleft()
            began_s, self._last_end_s = max(launched_s, self._last_end_s), now
            if num_tokens:
                self._seconds[_size(num_tokens)].append(now - began_s)

    def at_least(self, num_tokens: int) -> float:
        """Return how many seconds a step of ``num_tokens`` takes at least: as long as the fastest
        recent step of the next smaller size that is known, or of a larger one; 0 if none is."""
        known = [(size, min(s)) for size, s in self._seconds.items() if len(s) >= _MIN_STEPS]
        smaller = max((size for size, _ in known if size <= _size(num_tokens)), default=None)
        if smaller is None:
            return 0.0
        return min(seconds for size, seconds in known if size >= smaller)


def _size(num_tokens: int) -> int:
    return int(_SIZES_PER_OCTAVE * math.log2(num_tokens))


class LoadTimes:
    """Speed of the loads from DRAM, from counters that only grow while their server lives."""

    def __init__(self) -> None:
        self._last = (0, 0.0)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_NUM_LOADS)

    def read(self, num_tokens: int, seconds: float) -> None:
        """Record that ``num_tokens`` in all have been loaded, during ``seconds`` in all, which
        grow only when no load runs."""
        tokens, took_s = num_tokens - self._last[0], seconds - self._last[1]
        if tokens < 0 or took_s < 0:  # a new server
            tokens, took_s = num_tokens, seconds
        if tokens and took_s:  # else the next reading has the rest
            self._last = (num_tokens, seconds)
            self._recent.append((tokens, took_s))

    def seconds(self, num_tokens: int) -> float | None:
        """Return how long a load of ``num_tokens`` is likely to take; None if not known."""
        tokens = sum(tokens for tokens, _ in self._recent)
        return num_tokens * sum(took_s for _, took_s in self._recent) / tokens if tokens else None


class StepBudget:
    """The loads within the step that is being scheduled, and how many more there may be.

    Args:
        read_loads: Returns how many tokens were loaded from DRAM and the seconds in which loads
            ran, in all; None if it is not known now.
        interval_s: Between two such readings.
    """

    def __init__(
        self, read_loads: Callable[[], tuple[int, float] | None], interval_s: float
    ) -> None:
        self._read_loads = read_loads
        self._interval_s = interval_s
        self._read_s: float | None = None
        self.steps = StepTimes()
        self.loads = LoadTimes()
        self._num_loaded = self._num_computed = 0
        self._num_running = 0

    def has_room(self, num_loaded: int, num_computed: int, now: float) -> bool:
        """Return whether one more load may run within the step.

        Args:
            num_loaded: Tokens of the load.
            num_computed: Tokens that its request computes after it.
        """
        self._read(now)
        seconds = self.loads.seconds(self._num_loaded + num_loaded)
        num_tokens = self._num_running + self._num_computed + num_computed
        return seconds is not None and seconds <= SHARE * self.steps.at_least(num_tokens)

    def add(self, num_loaded: int, num_computed: int) -> None:
        """Note a load that runs within the step."""
        self._num_loaded += num_loaded
        self._num_computed += num_computed

    def begin_step(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Note that a step was scheduled, with the loads added to it. Its requests are expected to
        compute a token each in the next one."""
        self._num_loaded = self._num_computed = 0
        self._num_running = num_requests
        self.steps.begin(num_tokens, now)

    def end_step(self, now: float) -> None:
        """Note that the step has ended."""
        self.steps.end(now)

    def _read(self, now: float) -> None:
        if self._read_s is None or now - self._read_s >= self._interval_s:
            self._read_s = now
            so_far = self._read_loads()
            if so_far is not None:
                self.loads.read(*so_far)
