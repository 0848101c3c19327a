"""Imports what a vLLM engine takes; see `preloaded`.

Not numba: vLLM's CPU backend does not start in a process that has it.
"""

from __future__ import annotations

from engines import ENGINE_ENV
from preloaded import make_imports

make_imports(
    ENGINE_ENV,
    "make_models",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "flexcache.integration.vllm",
)

import vllm.envs  # noqa: E402

# Have vLLM fork its processes, as it does by default for GPUs; spawned ones would import it all.
vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
