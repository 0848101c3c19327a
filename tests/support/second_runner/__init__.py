"""vLLM's second model runner on a CPU, with asynchronous scheduling: a platform plugin of vLLM.

vLLM chooses both on GPUs, and neither on a CPU. It finds `activate` by its entry point (the
``.dist-info`` beside this directory) in every process that has ``tests/support`` on its path. The
runner's kernels are interpreted by Triton, some 50 ms a step: no times of such an engine say
anything about a GPU.

Environment:
    INTERPRETED_TRITON: Directory of the Triton to use. Without it the plugin does nothing.
    VLLM_USE_V2_MODEL_RUNNER: vLLM's own: "0" for the first runner. Read when an engine starts; vLLM
        takes the second by default, once it finds Triton.
    CUDA_ON_HOST: Set by `cuda_on_host`: the platform is vLLM's CUDA instead of its CPU.
    ASYNC_SCHEDULING: "1" leaves the choice to the engine's arguments and to vLLM, as on a GPU; "0"
        turns it off. By default "1" with the second runner, "0" with the first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TRITON = "3.7.1"
"""The version that torch 2.13 brings to GPUs."""
_OLDEST_VLLM = (0, 32)  # whose second runner is known to run on a CPU


def use_if_installed() -> None:
    """Have this process and those that it starts use the plugin, if `scripts/test.sh` has fetched
    Triton. Before vLLM is imported."""
    directory = Path(sys.prefix) / f"triton-{TRITON}"
    if directory.is_dir():
        os.environ.setdefault("INTERPRETED_TRITON", str(directory))


def is_installed() -> bool:
    return "INTERPRETED_TRITON" in os.environ


def is_first() -> bool:
    """Whether engines run vLLM's first runner."""
    return not is_installed() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


def schedules_ahead() -> bool:
    """Whether engines schedule asynchronously, if they can."""
    return is_installed() and os.environ.get("ASYNC_SCHEDULING", str(int(not is_first()))) == "1"


def activate() -> str | None:
    """Return the name of the platform that vLLM shall use; None for vLLM's own."""
    directory = os.environ.get("INTERPRETED_TRITON")
    if directory is None:
        return None
    from vllm import __version__

    if tuple(map(int, __version__.split(".")[:2])) < _OLDEST_VLLM:
        return None
    if directory not in sys.path:
        sys.path.append(directory)
    from second_runner.kernels import prepare

    if "CUDA_ON_HOST" in os.environ:
        prepare("nvidia")
        return "second_runner.cuda_platform.CudaOnHost"
    prepare("cpu")
    return "second_runner.platform.CpuLikeGpu"
