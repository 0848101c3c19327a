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
