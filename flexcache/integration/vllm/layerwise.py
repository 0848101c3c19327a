"""Tells whether loads can run within vLLM's steps."""

from __future__ import annotations

from typing import Any


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


def find_obstacle(vllm_config: Any, failure_policy: str, has_groups: bool = False) -> str | None:
    """Return why loads of an engine cannot run within a step; None if they can.

    A load may fail after its step was computed; see `recovers_in_steps`.

    Args:
        failure_policy: The ``kv_load_failure_policy`` that vLLM obeys.
        has_groups: Whether the model has KV cache groups.
    """
    if has_groups:
        return "vLLM cannot recover from a load lost in a step of a model with KV cache groups"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline stages the next step is under way when a load is lost"
    if getattr(vllm_config, "use_v2_model_runner", False):  # whether it schedules ahead or not
        return (
            "vLLM's second model runner does not recover from a load lost in a step; set "
            "VLLM_USE_V2_MODEL_RUNNER=0 in the environment, and async_scheduling=False"
        )
    if vllm_config.scheduler_config.async_scheduling:
        return "vLLM does not recover from a load lost in a step; set async_scheduling=False"
    if failure_policy != "recompute":
        return (
            "a load lost in a step would fail its request; set kv_load_failure_policy='recompute'"
        )
    return None
