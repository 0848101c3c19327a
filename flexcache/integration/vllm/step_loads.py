"""Loads that run within the engine step that computes with them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

from flexcache.errors import LoadLostError
from flexcache.transfer.gates import LayerLoad


def recovers_in_steps(vllm_config: Any) -> bool:
    """Return whether vLLM can take back a step that computed with KV of no use.

    It then discards that step, but not the next one if it has already scheduled it; and its second
    model runner goes on where the step ended.
    """
    return not (
        getattr(vllm_config, "use_v2_model_runner", False)
        or vllm_config.scheduler_config.async_scheduling
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    )


def find_obstacle(vllm_config: Any, has_groups: bool = False) -> str | None:
    """Return why loads of an engine cannot run within a step; None if they can.

    Args:
        has_groups: Whether the model has KV cache groups.
    """
    if has_groups:
        return "a model with KV cache groups is not loaded layer by layer"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "not tested with pipeline stages"
    return None


def has_full_graphs(vllm_config: Any) -> bool:
    """Return whether CUDA graphs may replay whole steps, which announce no layer."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and bool(mode.has_full_cudagraphs())


SHARE = 0.25
"""Part of a step that all loads within it may take. Most of it is hidden: layers are computed while
later ones are copied."""
_SIZES_PER_OCTAVE = 4  # of steps that are told apart
_NUM_STEPS = 16  # recent ones, of each size
_MIN_STEPS = 2  # one alone may have compiled something, or waited
_NUM_LOADS = 16  # recent readings of the counters


class StepTimes:
    """Durations of steps of about the same number of tokens."""

    def __init__(self) -> None:
        self._last_end_s = 0.0
        self._seconds: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_STEPS)
        )

    def ended(self, num_tokens: int, launched_s: float, now: float) -> None:
        """Record that a step has ended. It was launched maybe while others ran, and began when the
        one before it had ended."""
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

    Between steps such a load would cost its request a step in which it only waits; within the step
    it costs all requests of the step at most what it takes. So it runs there if the step is much
    longer, judged by recent steps and loads.

    Pure: the time is handed in.

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
        if self._read_s is None or now - self._read_s >= self._interval_s:
            self._read_s = now
            if (so_far := self._read_loads()) is not None:
                self.loads.read(*so_far)
        seconds = self.loads.seconds(self._num_loaded + num_loaded)
        num_tokens = self._num_running + self._num_computed + num_computed
        return seconds is not None and seconds <= SHARE * self.steps.at_least(num_tokens)

    def add(self, num_loaded: int, num_computed: int) -> None:
        """Note a load that runs within the step."""
        self._num_loaded += num_loaded
        self._num_computed += num_computed

    def begin_step(self, num_requests: int) -> None:
        """Note that a step was scheduled, with the loads added to it. Its requests are expected to
        compute a token each in the next one."""
        self._num_loaded = self._num_computed = 0
        self._num_running = num_requests


class StepLoads:
    """The loads of the current step. Used on the engine's thread only.

    vLLM announces each layer before it computes it, and waits here until that layer has arrived.
    One that it does not announce would be computed with what is in its place: an indexer's, or any
    that a graph of the whole model replays. So a step waits for its loads before the first layer
    until every layer has been announced once; with such graphs, always. All of a load has arrived
    before the step's results are collected: the draft model of vLLM 0.33 runs after that, others
    announce their layers.

    No load is lost here: each was promised (`StepPromises`). If a copy fails all the same, no
    token may come of the step, since vLLM cannot go back behind it.

    Args:
        layers: Names of all layers that are loaded.
        has_graphs: Whether graphs may replay layers without announcing them.
    """

    def __init__(self, layers: Collection[str], has_graphs: bool = False) -> None:
        self._unannounced = set(layers)
        self._has_graphs = has_graphs
        self._loads: list[LayerLoad] = []

    def add(self, load: LayerLoad) -> None:
        """Add a load; the step has begun."""
        self._loads.append(load)

    def before_step(self) -> None:
        """Wait, if necessary, before the first layer."""
        if self._unannounced or self._has_graphs:
            self._await_all()

    def before_layer(self, name: str) -> None:
        """Wait for this layer, which the model is about to run."""
        if self._unannounced:
            self._unannounced.discard(name)
        for load in self._loads:
            if not load.wait_layer(name, None):
                raise _lost()

    def finish(self) -> None:
        """End the step. No copy is running afterwards."""
        self._await_all()
        self._loads.clear()

    def _await_all(self) -> None:
        for load in self._loads:
            if not load.wait_all(None):
                raise _lost()


def _lost() -> LoadLostError:
    return LoadLostError(
        "a copy from DRAM has failed whose KV vLLM counts as computed: the engine must restart;"
        " layerwise_load = off loads between steps, where vLLM computes what is lost"
    )
