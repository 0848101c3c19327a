"""Lets vLLM's pipeline stages run in eager mode on a CPU.

    LLM(..., pipeline_parallel_size=2, worker_extension_cls="pp_eager.EagerStages")

A later stage takes its input from buffers that vLLM makes while it warms up, which the CPU backend
leaves out in eager mode. Here they are made when the model has been loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_load_model = CPUModelRunner.load_model


def _load_model_and_make_buffers(self: Any, *args: Any, **options: Any) -> None:
    _load_model(self, *args, **options)
    if not get_pp_group().is_first_rank:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )


CPUModelRunner.load_model = _load_model_and_make_buffers


class EagerStages:
    """Adds nothing to a worker, but has it import this module before it loads the model."""
