"""vLLM's CUDA platform on the stand-ins of `cuda_on_host`."""

from __future__ import annotations

from vllm.platforms.cuda import NonNvmlCudaPlatform


class CudaOnHost(NonNvmlCudaPlatform):  # type: ignore[misc]
    """Runs its operators and its process group on the host."""

    dist_backend = "gloo"
    dispatch_key = "CPU"

    @classmethod
    def device_count(cls) -> int:
        return 1
