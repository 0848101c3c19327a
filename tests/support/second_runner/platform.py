"""vLLM's CPU platform, but for its dislike of asynchronous scheduling."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuLikeGpu(CpuPlatform):  # type: ignore[misc]
    """Schedules asynchronously where vLLM would on a GPU."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        is_chosen, by_default = scheduler.async_scheduling, str(int(_runs_second(vllm_config)))
        super().check_and_update_config(vllm_config)
        is_allowed = os.environ.get("ASYNC_SCHEDULING", by_default) == "1"
        scheduler.async_scheduling = is_chosen and is_allowed


def _runs_second(vllm_config: Any) -> bool:
    return bool(vllm_config.use_v2_model_runner)
