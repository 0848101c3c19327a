"""Which loads run within the engine step that computes with them, layer by layer.

Such a load saves the step in which a request waits, and computing begins with its first layer. But
the whole step waits for it: every request in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexcache.errors import ConfigError


class LayerwiseRule:
    """The setting ``layerwise_load``, applied to one engine.

    Args:
        setting: "auto", "on" or "off".
        obstacle: Why this engine cannot do it, if so.

    Raises:
        ConfigError: It is "on" and cannot be done.
    """

    def __init__(self, setting: str, obstacle: str | None) -> None:
        if setting == "on" and obstacle is not None:
            raise ConfigError(f"layerwise_load = 'on': {obstacle}")
        self._is_off = setting == "off" or obstacle is not None
        self._always = setting == "on"
        self._running: set[str] = set()

    def step(self, request_ids: Iterable[str]) -> None:
        """These requests are computed in the step that begins."""
        self._running = set(request_ids)

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def allows(self, request_id: str) -> bool:
        """Whether a load out of DRAM may run within the step that the request begins with."""
        return not self._is_off and (self._always or self._running <= {request_id})


def find_obstacle(vllm_config: Any) -> str | None:
    """Why loads of an engine cannot run within a step. None: they can.

    A load may fail when its step has been computed. vLLM throws the step away then, but not a next
    one that it has scheduled already.
    """
    if vllm_config.scheduler_config.async_scheduling:
        return "vLLM does not recover from a load lost in a step; set async_scheduling=False"
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return "a load lost in a step would end its request; kv_load_failure_policy='recompute'"
    if getattr(vllm_config, "use_v2_model_runner", False):
        return "not tested with vLLM's second model runner; set VLLM_USE_V2_MODEL_RUNNER=0"
    return None
