"""Decides which loads run within the engine step that computes with them, layer by layer.

Such a load saves the step in which a request only waits, and computing begins when its first layer
has arrived. But the whole step waits for it, and so does every request in the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexcache.errors import ConfigError


class LayerwiseRule:
    """The setting ``layerwise_load``, applied to one engine.

    Args:
        setting: "auto", "on" or "off".
        obstacle: Why this engine does not support it; None if it does.

    Raises:
        ConfigError: The setting is "on" and not supported.
    """

    def __init__(self, setting: str, obstacle: str | None) -> None:
        if setting == "on" and obstacle is not None:
            raise ConfigError(f"layerwise_load = 'on': {obstacle}")
        self._is_off = setting == "off" or obstacle is not None
        self._always = setting == "on"
        self._running: set[str] = set()

    def step(self, request_ids: Iterable[str]) -> None:
        """Record which requests the step computes that is about to start."""
        self._running = set(request_ids)

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def allows(self, request_id: str) -> bool:
        """Return whether a load from DRAM may run within the step in which the request starts."""
        return not self._is_off and (self._always or self._running <= {request_id})


def find_obstacle(vllm_config: Any, failure_policy: str, has_groups: bool = False) -> str | None:
    """Return why loads of an engine cannot run within a step; None if they can.

    A load may fail after its step was computed. vLLM then discards that step, but not the next one
    if it has already scheduled it.

    Args:
        failure_policy: The ``kv_load_failure_policy`` that vLLM obeys.
        has_groups: Whether the model has KV cache groups.
    """
    if has_groups:
        return "vLLM cannot recover from a load lost in a step of a model with KV cache groups"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline stages the next step is under way when a load is lost"
    if vllm_config.scheduler_config.async_scheduling:
        return "vLLM does not recover from a load lost in a step; set async_scheduling=False"
    if failure_policy != "recompute":
        return (
            "a load lost in a step would fail its request; set kv_load_failure_policy='recompute'"
        )
    if getattr(vllm_config, "use_v2_model_runner", False):
        return "not tested with vLLM's second model runner; set VLLM_USE_V2_MODEL_RUNNER=0"
    return None
