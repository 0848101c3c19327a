"""Processes whose GPUs are fake ones: `environment` makes them so, and everything else in them is
as on a machine with a driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeDigests, FakeGpu, FakeKernel, FakeTorchCuda, build_driver
from paths import ROOT, SUPPORT

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libcufile.so.0")
CUDA_OF_TORCH = "13.0"
_SETUP = "FAKE_GPU_SETUP"


def environment(directory: Path, num_gpus: int = 1, setup: str = "") -> dict[str, str]:
    """Return variables for processes with fake GPUs.

    Args:
        directory: An empty directory for links to the driver.
        setup: Python code to run in each process that imports torch, with ``gpu`` (a `FakeGpu`),
            ``kernel`` (a `FakeKernel`) and ``digests`` (a `FakeDigests`).
    """
    for name in LIBRARIES:
        (directory / name).symlink_to(build_driver())

    def before(name: str, *directories: Path) -> str:
        return os.pathsep.join([*map(str, directories), os.environ.get(name, "")]).strip(os.pathsep)

    return {
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", directory),
        "PYTHONPATH": before("PYTHONPATH", SUPPORT / "on_fake_gpu", SUPPORT, ROOT),
        "FAKE_GPUS": str(num_gpus),
        _SETUP: setup,
    }


class TorchCuda(FakeTorchCuda):
    """With what programs ask of torch before they use a device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(os.environ["FAKE_GPUS"])

    def get_device_name(self, device: int) -> str:
        return f"Fake GPU {device}"

    def synchronize(self) -> None:
        self.gpu.wait_idle()


def install() -> None:
    """Give this process its fake GPUs."""
    patch = pytest.MonkeyPatch()  # never undone
    gpu = FakeGpu()
    torch_cuda = TorchCuda(gpu)
    kernel = FakeKernel(torch_cuda)
    torch_cuda.install(patch)
    patch.setattr(torch.version, "cuda", CUDA_OF_TORCH)
    patch.setitem(sys.modules, "flexcache.transfer.copy_kernel", kernel)
    digests = FakeDigests(torch_cuda)
    patch.setitem(sys.modules, "flexcache.transfer.direct.digest_kernel", digests)
    exec(os.environ.get(_SETUP, ""), {"gpu": gpu, "kernel": kernel, "digests": digests})
